"""The batch shell's last act: what it does of an attempt's end, with a Slurm that only answers.

tests/slurm/ has it on a real one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds import a_world
from trainer.checkpoint.store import STRUCTURE, CheckpointStore, Manifest, shard_name
from trainer.cluster.after_ranks import afterwards
from trainer.config.schema import Launch
from trainer.records.attempts import begin_attempt, end_attempt
from trainer.records.metrics import MetricsFile, read_lines
from trainer.rundir import RunDir
from trainer.world.world import World

WORLD = a_world(size=2, launcher="submitit-slurm", hosts=("n1", "n2"), local_size=1, nodes=2)
LAUNCH = Launch(max_failures=1)
KILLED = 137


class Slurm:
    """Stands in for scontrol: shows the job as it is told to, and counts the requeues."""

    def __init__(self) -> None:
        self.job: dict[str, Any] | None = {"JobState": "RUNNING", "Restarts": 0}
        self.refuses = False
        self.requeues = 0

    def answer(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if self.job is None:
            return subprocess.CompletedProcess(words, 1, "", "Unable to contact slurm controller (connect failure)")
        if words[1] == "requeue":
            self.requeues += not self.refuses
            return subprocess.CompletedProcess(words, int(self.refuses), "", "Operation disabled\n" * self.refuses)
        return subprocess.CompletedProcess(words, 0, " ".join(f"{k}={v}" for k, v in self.job.items()), "")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(subprocess, "run", slurm.answer)
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def begin(run: RunDir, restart: int = 0) -> World:
    """An attempt begins, and does a step that nobody saves."""
    world = replace(WORLD, restart=restart)
    log = begin_attempt(run, world, start_step=0)
    MetricsFile(run.metrics, writes=True).append([{"step": 1, "time": log["start"] + 1}])
    return world


def ends(run: RunDir) -> list[tuple[str, bool]]:
    return [(end["reason"], end["requeue"]) for end in read_lines(run.attempts)]


def test_nobody_was_left_to_say(run: RunDir, slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Requeued and entered as lost at once: who looks at a run that waits in the queue sees what became of it."""
    afterwards(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)] and not run.attempt_now.exists()
    assert capsys.readouterr().out.endswith("] requeueing job 7: the attempt ended (lost), the run goes on\n")
    slurm.job = {"JobState": "RUNNING", "Restarts": 1}
    afterwards(run, begin(run, restart=1), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True), ("lost", False)]
    assert "not requeued: the attempt ended (lost) and the next one would, too" in capsys.readouterr().out


def test_the_newest_checkpoint_is_damaged(run: RunDir, slurm: Slurm) -> None:
    """The next attempt will begin at the one before it: a step that nobody has any more must not stand as kept."""
    store = CheckpointStore(run.checkpoints)
    for step in (1, 2):
        writing = store.begin(step, "test")
        files = {}
        for name in (STRUCTURE, shard_name(0, 1)):
            (writing / name).write_bytes(b"whole")
            files[name] = {"bytes": 5, "sha256": hashlib.sha256(b"whole").hexdigest()}
        store.commit(writing, Manifest(step, 1, step, 1, {}, files))
    (store.path(2) / STRUCTURE).write_bytes(b"wrong")
    world = begin(run)
    MetricsFile(run.metrics, writes=True).append([{"step": 2, "time": time.time()}])
    afterwards(run, world, LAUNCH, KILLED)
    (end,) = read_lines(run.attempts)
    assert (end["end_step"], end["lost_steps"]) == (2, 1)


def test_what_a_rank_has_said_counts(run: RunDir, slurm: Slurm) -> None:
    """Rank 0 could not reach Slurm at a stop, or a failed rank asked for another attempt: the shell makes up for it."""
    end_attempt(run, begin(run), LAUNCH, "preempted", 1, 1)
    afterwards(run, WORLD, LAUNCH, 140)
    assert slurm.requeues == 1 and ends(run) == [("preempted", True)]


@pytest.mark.parametrize(("reason", "retry"), [("cancelled", True), ("finished", True), ("failed", False)])
def test_ends_for_good(run: RunDir, slurm: Slurm, reason: str, retry: bool) -> None:
    """What is over, or would only fail again, is not requeued, and Slurm not even asked."""
    end_attempt(run, begin(run), LAUNCH, reason, 1, 1, retry=retry)
    slurm.job = None
    afterwards(run, WORLD, LAUNCH, 1)
    assert ends(run) == [(reason, False)]


@pytest.mark.parametrize(
    ("job", "returns"), [({"JobState": "COMPLETING", "Restarts": 1}, True), ({"JobState": "COMPLETING"}, False)]
)
def test_slurm_has_decided(run: RunDir, slurm: Slurm, job: dict[str, Any], returns: bool) -> None:
    """A job that comes back by itself would be requeued twice, and a cancelled one would rise again."""
    slurm.job = job
    afterwards(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 0 and ends(run) == [("lost", returns)]


def test_slurm_refuses(run: RunDir, slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A site may forbid it: then the record does not promise what does not come, and the log has Slurm's word."""
    slurm.refuses = True
    afterwards(run, begin(run), LAUNCH, KILLED)
    assert ends(run) == [("lost", False)]
    assert capsys.readouterr().out.endswith("] not requeued: Operation disabled\n")


def test_slurm_is_away_for_a_while(run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that restarts in this very moment answers a little later."""
    job, slurm.job = slurm.job, None

    def back_again(_: float) -> None:
        slurm.job = job

    monkeypatch.setattr(time, "sleep", back_again)
    afterwards(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1


def test_killed_before_it_began(run: RunDir, slurm: Slurm) -> None:
    """It counts as a failure, or a job that cannot even start would be started for ever."""
    for restart in range(3):
        slurm.job = {"JobState": "RUNNING", "Restarts": restart}
        afterwards(run, replace(WORLD, restart=restart), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run)[:2] == [("failed", True), ("failed", False)]
    assert read_lines(run.attempts)[0]["error"] == "srun exited with 137 before the attempt began"


@pytest.mark.parametrize("job", [{"JobState": "COMPLETING"}, {"JobState": "COMPLETING", "Restarts": 1}])
def test_slurm_ended_it_before_it_began(run: RunDir, slurm: Slurm, job: dict[str, Any]) -> None:
    """A job that is cancelled or preempted in its first second has failed at nothing."""
    slurm.job = job
    afterwards(run, WORLD, LAUNCH, 143)
    assert slurm.requeues == 0 and ends(run) == []


@pytest.fixture
def locked(run: RunDir) -> Iterator[Path]:
    """The run, locked by some rank 0 that lives; what it signs with is for the test to write."""
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run.lock


def test_only_srun_was_killed(run: RunDir, slurm: Slurm, locked: Path) -> None:
    """The ranks live on. The requeue stops them in good order, and they enter themselves how they ended."""
    locked.write_text("job 7, restart 0, on n1")
    afterwards(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [] and run.attempt_now.exists()


def test_another_job_is_at_work(run: RunDir, slurm: Slurm, locked: Path) -> None:
    """A second job on the same run was refused; it must neither be tried again nor touch the record of the first."""
    locked.write_text("job 6, restart 0, on n3")
    begin_attempt(run, replace(WORLD, job_id="6"), start_step=0)
    before = json.loads(run.attempt_now.read_text())
    afterwards(run, WORLD, LAUNCH, 1)
    assert slurm.requeues == 0 and ends(run) == [] and json.loads(run.attempt_now.read_text()) == before
