"""What the batch shell does after srun has failed, with a stand-in for Slurm. tests/slurm/ tests it on a real one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from laststep.attempt.attempt import Attempt
from laststep.checkpoint import store as store_module
from laststep.checkpoint.files import FileEntry
from laststep.checkpoint.store import STRUCTURE, CheckpointStore, Manifest, shard_name
from laststep.config.errors import ConfigError
from laststep.config.schema import Launch
from laststep.job.after_ranks import main
from laststep.ranks import disk
from laststep.ranks.fault import Retry
from laststep.ranks.launchers import RESTARTS as RESTARTS_VARIABLE
from laststep.ranks.launchers import UNDECIDED
from laststep.ranks.process import Signals
from laststep.ranks.slurm import TAG_VARIABLE
from laststep.ranks.world import World
from laststep.records.attempt_record import Reason, read_ended_attempts
from laststep.records.attempts import begin_attempt, end_attempt, lower_start_step, never_began
from laststep.records.metrics import MetricsFile
from laststep.rundir import RunDir
from tests.support.commands import FakeSlurm, after_ranks
from tests.support.disk import flock_fails, refusing
from tests.support.records import a_world
from tests.support.runs import config

WORLD = a_world(size=2, launcher="submitit-slurm", hosts=("n1", "n2"), local_size=1, nodes=2)
LAUNCH = Launch(max_failures=1, max_restarts=0)
KILLED = 137


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm("n1")
    monkeypatch.setattr(subprocess, "run", slurm.answer)
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def begin(run: RunDir, restart: int = 0) -> World:
    """An attempt begins, and does a step that no rank saves."""
    world = replace(WORLD, restart=restart)
    log = begin_attempt(run, world, start_step=0)
    MetricsFile(run.metrics, writes=True).append([{"step": 1, "time": log["start"] + 1}])
    return world


def ends(run: RunDir) -> list[tuple[str, bool]]:
    return [(end["reason"], end["requeue"]) for end in read_ended_attempts(run.attempts)]


def test_all_ranks_were_killed(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """The job is requeued, and the attempt recorded as lost at once, for `status` to show while the job is queued."""
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)] and not run.attempt_now.exists()
    assert capsys.readouterr().out.endswith("] requeueing job 7: the attempt ended (lost), the run continues\n")
    slurm.job = {"JobState": "RUNNING", "Restarts": 1}
    after_ranks(run, begin(run, restart=1), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True), ("lost", False)]
    said = capsys.readouterr().out
    assert "not requeued: the attempt ended (lost): retry budget used up (launch.max_failures=1); `python " in said


def test_slurmctld_goes_away_before_the_requeue(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has just shown the job, and is restarted. The run ended for good, although it could go on in a minute."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    slurm.away_for = 6
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)]
    assert "not requeued" not in capsys.readouterr().out


@pytest.mark.parametrize("carries_out", [False, True])
def test_slurmctld_is_too_busy_to_answer(
    run: RunDir,
    slurm: FakeSlurm,
    carries_out: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The order times out, then Slurm shows the job. That was taken for a refusal, and the run ended for good. If the
    order was carried out all the same, a second one would hit the job's next start."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    slurm.busy, slurm.carries_out = ["requeue"], carries_out
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)]
    assert "not requeued" not in capsys.readouterr().out


def test_cancelled_while_slurmctld_is_busy(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second order would start again what the user has ended since the first one."""

    def cancel(_: float) -> None:
        slurm.job = {"JobState": "COMPLETING", "Restarts": 0}

    monkeypatch.setattr(time, "sleep", cancel)
    slurm.busy = ["requeue"] * 2
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 0 and ends(run) == [("lost", False)]


def test_slurm_requeues_and_reports_an_error(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """An expedited job must not be forbidden to return then, and the log must not say that it will not."""
    slurm.lies = True
    after_ranks(run, begin(run), replace(LAUNCH, slurm={"requeue": "expedite"}), KILLED)
    assert slurm.requeues == 1 and not slurm.updated
    assert "not requeued" not in capsys.readouterr().out


def test_an_expedited_requeue_ends_too(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm requeues such a job by itself when it fails, but holds it: a run that has ended would seem to wait in the
    queue. Where the run continues, nothing must stand in the way of the requeue."""
    expedited = replace(LAUNCH, slurm={"requeue": "expedite"})
    after_ranks(run, begin(run), expedited, KILLED)
    assert slurm.requeues == 1 and not slurm.updated
    slurm.job = {"JobState": "RUNNING", "Restarts": 1}
    after_ranks(run, begin(run, restart=1), expedited, KILLED)
    assert slurm.requeues == 1 and slurm.updated == [("JobId=7", "Requeue=0")]
    slurm.refuses = True
    after_ranks(run, replace(WORLD, restart=1), expedited, KILLED)
    assert "Slurm will hold this job in the queue, where `scancel 7` ends it: " in capsys.readouterr().out
    after_ranks(run, replace(WORLD, restart=1), LAUNCH, KILLED)
    assert len(slurm.updated) == 2, "any other job ends by itself"


RESTARTS = replace(LAUNCH, max_restarts=2)


def restarts(run: RunDir, done: int, world: World = WORLD, status: int = KILLED) -> bool:
    """The shell has started the ranks again this often; returns whether it is to do so once more."""
    return after_ranks(run, world, RESTARTS, status, restarts=done, can_restart=True)


def test_restarted_in_the_allocation(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed rank must not cost a place at the end of the queue. Restarts that get nowhere give the nodes back, and
    the next allocation has as many again."""
    for done in range(2):
        assert restarts(run, done, begin(run)) and slurm.requeues == 0
    said = capsys.readouterr().out
    assert said.count("restarting the ranks in job 7: the attempt ended (lost), the run continues") == 2
    assert not restarts(run, 2, begin(run)) and slurm.requeues == 1
    assert ends(run) == [("lost", True)] * 3 and not run.attempt_now.exists()
    slurm.job = {"JobState": "RUNNING", "Restarts": 1}
    assert not restarts(run, 0, begin(run, restart=1)), "launch.max_failures=1 allocation"
    assert ends(run)[3:] == [("lost", False)] and slurm.requeues == 1


def test_a_restart_that_began_no_attempt(run: RunDir, slurm: FakeSlurm) -> None:
    """These nodes cannot start the ranks, so the job leaves them. The record of the attempt before must not be taken
    for that start's own: it counts, or the job would be requeued forever."""
    end_attempt(run, begin(run), RESTARTS, "failed", 5, 5)
    assert restarts(run, 0) and not restarts(run, 1)
    assert ends(run) == [("failed", True)] * 2 and slurm.requeues == 1
    assert read_ended_attempts(run.attempts)[1]["error"] == "srun exited with 137 before the attempt began"


@pytest.mark.parametrize(
    ("job", "node", "follows"),
    [
        ({"JobState": "RUNNING"}, "ALLOCATED", "restart"),
        ({"JobState": "RUNNING"}, "MIXED+CLOUD", "restart"),
        ({"JobState": "RUNNING"}, "ALLOCATED+DRAIN", "requeue"),
        ({"JobState": "RUNNING"}, "MIXED*", "requeue"),
        ({"JobState": "RUNNING"}, "DOWN*+NOT_RESPONDING", "requeue"),
        ({"JobState": "RUNNING", "PreemptTime": "2026-11-22T05:17:24"}, "MIXED", "requeue"),
        ({"JobState": "COMPLETING", "Restarts": 1}, "MIXED", "Slurm requeues"),
        ({"JobState": "COMPLETING"}, "MIXED", "end"),  # scancel
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, "MIXED", "requeue"),
    ],
)
def test_the_allocation_must_last(run: RunDir, slurm: FakeSlurm, job: dict[str, Any], node: str, follows: str) -> None:
    """Ranks that start on a bad node, or in a job that Slurm is about to end, would die again."""
    slurm.job, slurm.states["n1"] = {"Restarts": 0, **job}, node
    assert restarts(run, 0, begin(run)) == (follows == "restart")
    assert slurm.requeues == (follows == "requeue")
    assert ends(run) == [("lost", follows != "end")]


@pytest.mark.parametrize(("left_s", "restarted"), [(3600, True), (140, False)])
def test_shortly_before_the_time_limit(run: RunDir, slurm: FakeSlurm, left_s: int, restarted: bool) -> None:
    """Slurm sends its warning once, up to 60 s early: ranks that start after it would never receive it."""
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    slurm.job = {"JobState": "RUNNING", "Restarts": 0, "EndTime": end}
    assert restarts(run, 0, begin(run)) is restarted
    assert slurm.requeues == (not restarted) and ends(run) == [("lost", True)]


def test_the_shell_cannot_restart(run: RunDir, slurm: FakeSlurm) -> None:
    """It has received a signal, or it is a user's own script that only asks for a requeue: the job is requeued."""
    end_attempt(run, begin(run), RESTARTS, "failed", 5, 5)
    assert not after_ranks(run, WORLD, RESTARTS, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("failed", True)]


def test_a_signal_while_it_decides(run: RunDir, slurm: FakeSlurm) -> None:
    """The shell asks twice about the same attempt: first it is to restart, then a signal comes, and it asks again."""
    assert restarts(run, 0, begin(run))
    assert not after_ranks(run, WORLD, RESTARTS, KILLED, restarts=0, can_restart=False)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)]


@pytest.mark.parametrize("reason", ["preempted", "timeout"])
def test_a_stopped_attempt_is_not_restarted(run: RunDir, slurm: FakeSlurm, reason: Reason) -> None:
    """Its nodes are wanted by another job, or its time is up."""
    end_attempt(run, begin(run), RESTARTS, reason, 5, 5)
    assert not restarts(run, 0) and slurm.requeues == 1


def lost_with_two_checkpoints(run: RunDir) -> World:
    """An attempt of two steps, each with a checkpoint, is lost. The newer checkpoint is damaged, but not in size."""
    store = CheckpointStore(run.checkpoints)
    for step in (1, 2):
        writing = store.create_writing_folder(step, "test")
        files: dict[str, FileEntry] = {}
        for name in (STRUCTURE, shard_name(0, 1)):
            (writing / name).write_bytes(b"whole")
            files[name] = {"bytes": 5, "sha256": hashlib.sha256(b"whole").hexdigest()}
        store.commit(writing, Manifest(step, 1, step, 1, {}, files))
    (store.path(2) / STRUCTURE).write_bytes(b"wrong")
    world = begin(run)
    MetricsFile(run.metrics, writes=True).append([{"step": 2, "time": time.time()}])
    return world


def test_the_newest_checkpoint_is_damaged(run: RunDir, slurm: FakeSlurm) -> None:
    """The next attempt begins at the checkpoint before it, so the steps since then are recorded as lost: at once where
    nothing starts the job again, else by that attempt, which reads the checkpoints."""
    slurm.refuses = True
    after_ranks(run, lost_with_two_checkpoints(run), LAUNCH, KILLED)
    (end,) = read_ended_attempts(run.attempts)
    assert (end["end_step"], end["lost_steps"], end["requeue"]) == (2, 1, False)


def test_requeued_before_checkpoints_are_read(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """To hash a checkpoint of a terabyte takes longer than the batch shell lives, and longer than KillWait after the
    requeue: a shell that read it first would be killed, and the run would never continue."""
    world = lost_with_two_checkpoints(run)
    monkeypatch.setattr("laststep.checkpoint.store.verify_files", lambda *_: pytest.fail("a checkpoint was read"))
    after_ranks(run, world, LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [("lost", True)]
    restarted = replace(world, restart=1)
    begin_attempt(run, restarted, start_step=2)
    lower_start_step(run, restarted, 1)
    (end,) = read_ended_attempts(run.attempts)
    assert (end["end_step"], end["lost_steps"], end["requeue"]) == (2, 1, True)
    assert json.loads(run.attempt_now.read_text())["start_step"] == 1


def test_not_requeued_and_slow_to_read(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell is killed while it reads (`timeout -s KILL`): by then the attempt is recorded, with its reason."""
    slurm.refuses = True
    world = lost_with_two_checkpoints(run)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("laststep.checkpoint.store.verify_files", killed)
    with pytest.raises(KeyboardInterrupt):
        after_ranks(run, world, LAUNCH, KILLED)
    assert ends(run) == [("lost", False)] and not run.attempt_now.exists()


def test_a_rank_recorded_that_the_run_continues(run: RunDir, slurm: FakeSlurm) -> None:
    """Rank 0 could not reach Slurm at a stop, or a rank failed that may be retried: the shell requeues the job."""
    end_attempt(run, begin(run), LAUNCH, "preempted", 1, 1)
    after_ranks(run, WORLD, LAUNCH, 140)
    assert slurm.requeues == 1 and ends(run) == [("preempted", True)]


def test_a_node_without_scontrol(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Waiting for the controller would be in vain. The log names the way back, for a login node."""
    end_attempt(run, begin(run), LAUNCH, "preempted", 1, 1)
    slurm.missing = True
    after_ranks(run, WORLD, LAUNCH, 140)
    said = capsys.readouterr().out
    assert "not requeued: Slurm does not answer on this node; where it does, `" in said
    assert f"resume {run.path} --watch` continues the run" in said


@pytest.mark.parametrize(("reason", "retry"), [("cancelled", "yes"), ("finished", "yes"), ("failed", "no")])
def test_ends_for_good(run: RunDir, slurm: FakeSlurm, reason: Reason, retry: Retry) -> None:
    """A run that is over, or would fail the same way, is not requeued, and Slurm is not even asked."""
    end_attempt(run, begin(run), LAUNCH, reason, 1, 1, retry=retry)
    slurm.job = None
    after_ranks(run, WORLD, LAUNCH, 1)
    assert ends(run) == [(reason, False)]


@pytest.mark.parametrize(
    ("job", "returns"), [({"JobState": "COMPLETING", "Restarts": 1}, True), ({"JobState": "COMPLETING"}, False)]
)
def test_slurm_has_decided(run: RunDir, slurm: FakeSlurm, job: dict[str, Any], returns: bool) -> None:
    """Else a job that Slurm requeues would be requeued twice, and a cancelled job would start again."""
    slurm.job = job
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 0 and ends(run) == [("lost", returns)]


def test_slurm_refuses(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A site may forbid requeues: then the record promises none, and the log has Slurm's own error."""
    slurm.refuses = True
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert ends(run) == [("lost", False)]
    said = capsys.readouterr().out
    assert "] not requeued: Operation disabled; `" in said and f"resume {run.path}` continues the run\n" in said


def test_slurm_is_away_for_a_while(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slurmctld that is just restarting answers a little later."""
    job, slurm.job = slurm.job, None

    def back_again(_: float) -> None:
        slurm.job = job

    monkeypatch.setattr(time, "sleep", back_again)
    after_ranks(run, begin(run), LAUNCH, KILLED)
    assert slurm.requeues == 1


def test_killed_before_it_began(run: RunDir, slurm: FakeSlurm) -> None:
    """It counts as a failure, or a job that cannot even start would be requeued without end."""
    for restart in range(3):
        slurm.job = {"JobState": "RUNNING", "Restarts": restart}
        after_ranks(run, replace(WORLD, restart=restart), LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run)[:2] == [("failed", True), ("failed", False)]
    assert read_ended_attempts(run.attempts)[0]["error"] == "srun exited with 137 before the attempt began"


@pytest.mark.parametrize(
    ("job", "recorded"),
    [({"JobState": "COMPLETING"}, [("cancelled", False)]), ({"JobState": "COMPLETING", "Restarts": 1}, [])],
)
def test_slurm_ended_it_before_it_began(
    run: RunDir, slurm: FakeSlurm, job: dict[str, Any], recorded: list[Any]
) -> None:
    """A job that is cancelled or preempted in its first second has not failed."""
    slurm.job = job
    after_ranks(run, WORLD, LAUNCH, 143)
    assert slurm.requeues == 0 and ends(run) == recorded


@pytest.mark.parametrize(("left_s", "reason"), [(60, "timeout"), (7200, "preempted")])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_asked_to_stop_before_it_began(
    run: RunDir, slurm: FakeSlurm, number: signal.Signals, left_s: int, reason: Reason
) -> None:
    """The warning of a time limit, or of a preemption, ends a rank that has no handler for it yet. In a user's own
    batch script (examples/srun.sbatch) the log with srun's words is elsewhere, so only srun's status says it. It
    counted as a failure, and a few of them ended the run."""
    ends_at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    slurm.job = {"JobState": "RUNNING", "Restarts": 0, "EndTime": ends_at}
    after_ranks(run, WORLD, replace(LAUNCH, max_failures=0), 128 + number)
    assert slurm.requeues == 1 and ends(run) == [(reason, True)]


def test_why_it_failed_before_it_began(run: RunDir, slurm: FakeSlurm) -> None:
    """`status` shows the error: it must say which line of the setup, which program, or what the log ends with."""
    launch = replace(LAUNCH, max_failures=0)

    def error(launch: Launch, setup_line: int | None = None) -> str | None:
        run.attempts.unlink(missing_ok=True)
        after_ranks(run, WORLD, launch, 3, setup_line)
        return read_ended_attempts(run.attempts)[0]["error"]

    setup = replace(launch, setup=["export A=1", "test -d /scratch/data || exit 3"])
    assert error(setup, 2) == "line 2 of launch.setup exited with 3: test -d /scratch/data || exit 3"
    assert error(replace(launch, python="/no/such/python -X dev")) == "launch.python: /no/such/python not found on n1"
    assert error(launch) == "srun exited with 3 before the attempt began"
    run.logs.mkdir()
    log = run.logs / f"{WORLD.job_id}_0_log.out"
    log.write_text("[laststep 08:00:00] attempt begins\nNo module named torch\nsrun: error: n1: task 0: Exited\n")
    assert error(launch) == "srun exited with 3 before the attempt began: No module named torch"


def test_a_setup_line_exits_as_if_asked_to_stop(run: RunDir, slurm: FakeSlurm) -> None:
    """Slurm signals the ranks, not the setup. Counted as a stop, a program that always exits with 140 would have the
    job requeued without end."""
    after_ranks(run, WORLD, replace(LAUNCH, max_failures=0, setup=["exit 140"]), 140, 1)
    assert slurm.requeues == 0 and ends(run) == [("failed", False)]


def test_a_cancelled_run_ends_as_cancelled(run: RunDir, slurm: FakeSlurm) -> None:
    """By its exit status Slurm would take its job for FAILED, for sacct and in its mail."""
    run.logs.mkdir()
    (run.logs / f"{WORLD.job_id}_submitted.pkl").touch()
    end_attempt(run, begin(run), LAUNCH, "cancelled", 1, 1)
    after_ranks(run, WORLD, LAUNCH, 130)
    assert slurm.cancelled == [WORLD.job_id]


def test_another_job_has_the_id_now(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller lost its state, and has given this job's id to another one: it must be left alone."""
    (run.logs).mkdir()
    (run.logs / f"{WORLD.job_id}_submitted.pkl").touch()
    monkeypatch.setenv(TAG_VARIABLE, "laststep:0000000000aa")
    slurm.job = {"JobState": "RUNNING", "Restarts": 0, "Comment": "laststep:0000000000bb"}
    after_ranks(run, begin(run), LAUNCH, KILLED)
    end_attempt(run, begin(run), LAUNCH, "cancelled", 1, 1)
    after_ranks(run, WORLD, LAUNCH, 130)
    assert slurm.requeues == 0 and slurm.cancelled == []


def test_the_disk_does_not_show_the_checkpoints(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell requeues all the same, and does not record as lost what the records say is saved."""
    monkeypatch.setattr(store_module, "COUNT_S", 0.0)
    world = begin(run)
    end_attempt(run, world, LAUNCH, "preempted", 7, 7)
    begin_attempt(run, replace(world, restart=1), start_step=7)
    slurm.job = {"JobState": "RUNNING", "Restarts": 1}
    run.checkpoints.mkdir()
    with refusing(run.checkpoints, errno.ESTALE):
        after_ranks(run, replace(world, restart=1), LAUNCH, KILLED)
    assert slurm.requeues == 1 and "checkpoints: cannot be listed: Stale file handle" in capsys.readouterr().out
    lost = read_ended_attempts(run.attempts)[-1]
    assert (lost["reason"], lost["end_step"], lost["lost_steps"]) == ("lost", 7, 0)


@pytest.fixture
def locked(run: RunDir) -> Iterator[Path]:
    """The lock of the run, held as by a live rank 0; each test writes the holder's name into it."""
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run.lock


def test_only_srun_was_killed(run: RunDir, slurm: FakeSlurm, locked: Path) -> None:
    """The ranks live on. The requeue stops them in an orderly way, and they record the end themselves."""
    locked.write_text("job 7, restart 0, on n1")
    assert not restarts(run, 0, begin(run)), "two attempts at once would tear the run apart"
    assert slurm.requeues == 1 and ends(run) == [] and run.attempt_now.exists()


def test_srun_was_killed_while_a_rank_starts(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That rank lives on until the requeue ends it. If it began while the shell decides, the shell would record it as
    lost although it lives; if it began after that, its start would have two records."""
    monkeypatch.setattr(disk, "LOCK_WAIT_S", {True: -1.0})
    monkeypatch.setenv(RESTARTS_VARIABLE, "0")
    rank_0, signals = replace(WORLD, step_id=0), SimpleNamespace(first=None, first_at=None, received=[], requeue=None)

    def meanwhile(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with pytest.raises(ConfigError, match="another attempt is at work on this run"):
            disk.acquire_run_lock(run.lock, rank_0)
        return slurm.answer(words)

    with monkeypatch.context() as while_the_shell_decides:  # not when rank 0 asks Slurm for its time limit
        while_the_shell_decides.setattr(subprocess, "run", meanwhile)
        after_ranks(run, WORLD, LAUNCH, KILLED)
    assert slurm.requeues == 1
    with pytest.raises(SystemExit) as ended:
        Attempt(config(run.path, "small", 2, ()), run, rank_0, cast(Signals, signals)).run()
    assert ended.value.code == 1 and "never began; ending it" in capsys.readouterr().out
    assert ends(run) == [("failed", True)] and not run.attempt_now.exists()
    assert not never_began(run, replace(rank_0, restart=1), 0), "the requeued job must begin"
    assert not never_began(run, replace(rank_0, step_id=1), 1), "so must the ranks that the shell starts on other nodes"


def test_the_lock_of_an_earlier_start(
    run: RunDir, slurm: FakeSlurm, locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network file system may keep the lock of a dead node for days. It must not pass for a live rank 0, which would
    record the end itself: no record, no budget that counts, and a requeue without end."""
    locked.write_text("job 7, restart 0, on n3")
    for restart in (1, 2, 3):
        slurm.job = {"JobState": "RUNNING", "Restarts": restart}
        after_ranks(run, replace(WORLD, restart=restart), LAUNCH, 1)
    assert slurm.requeues == 1 and ends(run)[:2] == [("failed", True), ("failed", False)]
    assert (
        "locked by an earlier start of this job (job 7, restart 0, on n3), which has ended" in capsys.readouterr().out
    )


def test_the_lock_of_an_earlier_step(run: RunDir, slurm: FakeSlurm, locked: Path) -> None:
    """The same within one allocation, where the ranks have started again without the dead node. But a rank 0 of this
    start counts as alive, also while it still ends."""
    first = replace(WORLD, step_id=0)
    begin_attempt(run, first, start_step=0)
    locked.write_text(f"{disk.lock_signature(first)}\n4711 12")
    assert not restarts(run, 0), "rank 0 of this start lives"
    assert ends(run) == [] and slurm.requeues == 1
    end_attempt(run, first, RESTARTS, "failed", 0, 0)
    begin_attempt(run, replace(WORLD, step_id=1), start_step=0)
    restarts(run, 1)
    assert ends(run) == [("failed", True), ("lost", True)]


DISK_FULL = "WARNING: the disk fails after the ranks have ended: [Errno 28] No space left on device"


def test_the_disk_is_full(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """The start cannot be recorded. It may be the fault of this node's disk, so the job is requeued, but not without
    end: Slurm itself keeps the count, beside the user's comment and the run's tag. A recorded start ends the row."""
    launch, limit = replace(LAUNCH, max_failures=2), "in a row (launch.max_failures=2); `"
    comment = "mine laststep:0123456789ab"

    def start(restart: int) -> str:
        slurm.job = {**(slurm.job or {}), "Restarts": restart}
        assert not after_ranks(run, replace(WORLD, restart=restart), launch, KILLED)
        return capsys.readouterr().out

    slurm.job = {"JobState": "RUNNING", "Comment": comment}
    with full(run):
        for restart, requeues, noted in ((4, 1, "1@4"), (5, 2, "2@5"), (5, 3, "2@5"), (6, 3, "2@5"), (8, 4, "1@8")):
            said = start(restart)
            assert DISK_FULL in said and slurm.requeues == requeues
            assert (limit in said) is (restart == 6)
            assert slurm.job["Comment"] == f"{comment} laststep-unrecorded:{noted}"
    slurm.refuses = True
    with full(run):
        assert limit in start(9), "a site may forbid to change comments: then the job's restarts count"


@pytest.mark.parametrize("order", ["update", "requeue"])
def test_the_disk_is_full_and_slurmctld_busy(
    run: RunDir, slurm: FakeSlurm, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer that is late says nothing about the job: it must neither end the run nor count as a refusal of the
    note, after which all earlier restarts would count."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    slurm.job = {"JobState": "RUNNING", "Restarts": 3}
    slurm.busy = [order]
    with full(run):
        after_ranks(run, replace(WORLD, restart=3), LAUNCH, KILLED)
    assert slurm.requeues == 1 and slurm.job["Comment"].endswith("laststep-unrecorded:1@3")


def test_the_end_cannot_be_recorded(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided what follows, and that is done: a run that has used up its budget ends, any other one goes on."""
    monkeypatch.setattr("laststep.job.after_ranks.COUNT_S", 0.0)
    begin(run)
    with full(run):
        after_ranks(run, WORLD, LAUNCH, KILLED)
        assert slurm.requeues == 1
        after_ranks(run, WORLD, replace(LAUNCH, max_failures=0), KILLED)
        assert slurm.requeues == 1 and ends(run) == [] and run.attempt_now.exists()


@pytest.mark.parametrize(
    ("job", "reason", "held"),
    [
        ({"JobState": "COMPLETING"}, None, ""),
        ({"JobState": "COMPLETING", "Restarts": 1}, None, ""),
        ({"JobState": "RUNNING"}, "cancelled", ""),
        ({"JobState": "RUNNING"}, None, "job 6, restart 0, on n3"),
    ],
    ids=["Slurm has ended it", "Slurm starts it again", "the run has ended", "another attempt is at work"],
)
def test_the_disk_fails_where_nothing_is_to_be_requeued(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, Any],
    reason: Reason | None,
    held: str,
) -> None:
    """A run that was cancelled must not begin again because of a bad disk, nor one that another job trains."""
    slurm.job = {"Restarts": 0, **job}
    if reason:
        end_attempt(run, begin(run), LAUNCH, reason, 1, 1)
    monkeypatch.setattr("laststep.job.after_ranks.newest_step", lambda *_: pytest.fail("it is not asked"))
    monkeypatch.setattr(
        "laststep.job.after_ranks.look_anew", Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    with run.lock.open("w") as file:
        if held:
            file.write(held)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        after_ranks(run, WORLD, LAUNCH, KILLED)
    assert slurm.requeues == 0


def test_the_lock_cannot_be_read(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether rank 0 lives, so nothing is recorded. The requeue ends it if it does."""
    monkeypatch.setattr(disk, "LOCK_LOOK_S", 0.0)
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    begin(run)
    flock_fails(errno.ENOLCK)
    after_ranks(run, WORLD, LAUNCH, KILLED)
    assert slurm.requeues == 1 and ends(run) == [] and run.attempt_now.exists()


@pytest.mark.parametrize("spare", [True, False])
def test_the_folder_cannot_be_read(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spare: bool
) -> None:
    """A bad mount on this node: not even the configuration is there. The job is requeued, and leaves the node if the
    partition has enough others. The shell is told that there is nothing left for it to do."""
    monkeypatch.setattr(disk, "LOCK_LOOK_S", 0.0)
    undecided = run.path / "undecided"
    undecided.touch()
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    for name, value in {**environ, UNDECIDED: str(undecided)}.items():
        monkeypatch.setenv(name, value)
    slurm.partition_nodes = 4 if spare else 2
    slurm.job = {"JobState": "RUNNING", "Restarts": 0, "Partition": "main", "ExcNodeList": "n4"}
    with refusing(run.path / "runs" / "first", errno.ESTALE):
        assert main(str(run.path / "runs" / "first"), KILLED) == KILLED
    assert slurm.requeues == 1 and not undecided.exists()
    assert slurm.excluded == (["n4,n1"] if spare else [])
    assert ("job 7 leaves n1, which does not show the run's folder" in capsys.readouterr().out) is spare
    (run.path / "runs").mkdir()
    assert main(str(run.path / "runs" / "first"), KILLED) == KILLED
    assert slurm.requeues == 1, "the user has deleted the run"


@contextmanager
def full(run: RunDir) -> Iterator[None]:
    """No file of the run's folder can be written."""

    def refuse(path: Path, text: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laststep.records.attempts._write_temporary", refuse)
        yield


def test_another_job_is_at_work(run: RunDir, slurm: FakeSlurm, locked: Path) -> None:
    """A second job on the same run was refused. It must not be requeued, nor touch the record of the first."""
    locked.write_text("job 6, restart 0, on n3")
    begin_attempt(run, replace(WORLD, job_id="6"), start_step=0)
    before = json.loads(run.attempt_now.read_text())
    after_ranks(run, WORLD, LAUNCH, 1)
    assert slurm.requeues == 0 and ends(run) == [] and json.loads(run.attempt_now.read_text()) == before
