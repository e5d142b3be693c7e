"""The status of a run, from Slurm's queue and the run's own files, without accounting.

A wrong status is expensive: a run that seems finished is forgotten, and one that seems lost is started twice.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import require_root
from trainer.cluster.queue import Job, Queue
from trainer.cluster.run_folders import find_run
from trainer.cluster.run_status import status_of
from trainer.commands.main import main
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir

NOW = time.time()
EMPTY = Queue(NOW, {})
SILENT = Queue(NOW, None)


def queued(state: str, reason: str = "", starts_at: float | None = None) -> Queue:
    """A queue with the run's job and somebody else's."""
    return Queue(NOW, {"7": Job(state, reason, starts_at), "8": Job("RUNNING", "", None)})


def attempt(number: int = 0, reason: str | None = None, job_id: str = "7", **more: Any) -> dict[str, Any]:
    """A record of attempts.jsonl; without a reason, the attempt is under way."""
    record = {"attempt": number, "job_id": job_id, "restart": number, "hosts": ["n1"], "world_size": 1}
    record |= {"start": NOW - 100, "end": NOW if reason else None, "start_step": 0, "end_step": 0, "reason": reason}
    return record | {"lost_steps": 0, "lost_s": 0.0, "step_s": None, "requeue": False, "error": None} | more


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted as job 7 an hour ago."""
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    write(run.submissions, {"job_id": "7", "time": NOW - 3600})
    return run


@pytest.mark.parametrize(
    ("queue", "ended", "under_way", "state", "why"),
    [
        (queued("PENDING", "Priority"), [], None, "queued", "Priority"),
        (queued("RUNNING"), [], None, "running", ""),
        (queued("RUNNING"), [attempt(0, "preempted")], attempt(1), "running", ""),
        (queued("PENDING", "BeginTime"), [attempt(0, "preempted")], None, "requeued", "BeginTime"),
        (queued("PENDING", "BeginTime"), [], attempt(), "requeued", "BeginTime"),  # its ranks were all killed
        (queued("COMPLETING"), [], attempt(), "stopping", "completing"),
        (queued("COMPLETING"), [attempt(0, "finished")], None, "finished", ""),
        (queued("CONFIGURING"), [], None, "running", "configuring"),
        (EMPTY, [attempt(0, "finished")], None, "finished", ""),
        (EMPTY, [attempt(0, "failed", error="Traceback\n  ...\nValueError: bad")], None, "failed", "ValueError: bad"),
        (EMPTY, [attempt(0, "hung")], None, "failed", "a rank was stuck"),
        (EMPTY, [attempt(0, "cancelled")], None, "cancelled", ""),
        (EMPTY, [attempt(0, "timeout")], None, "stopped", "time limit"),
        (
            EMPTY,
            [attempt(0, "preempted", requeue=True)],
            None,
            "cancelled",
            "job left the queue before it restarted",
        ),
        (EMPTY, [attempt(0, "lost")], None, "lost", ""),
        (EMPTY, [], attempt(), "lost", "job disappeared without recording why"),
        (EMPTY, [], None, "cancelled", "job left the queue before it started"),
        (SILENT, [], None, "unknown", "squeue does not answer"),
        (SILENT, [], attempt(), "unknown", "squeue does not answer"),
        (SILENT, [attempt(0, "preempted", requeue=True)], None, "unknown", "squeue does not answer"),
        (SILENT, [attempt(0, "finished")], None, "finished", ""),
        (SILENT, [attempt(0, "cancelled")], None, "cancelled", ""),
        # An attempt of an older job says nothing about the job that was submitted to continue the run.
        (EMPTY, [attempt(0, "failed", job_id="3")], None, "cancelled", "job left the queue before it started"),
        (SILENT, [attempt(0, "failed", job_id="3")], None, "unknown", "squeue does not answer"),
        (queued("PENDING", "Priority"), [attempt(0, "failed", job_id="3")], None, "queued", "Priority"),
    ],
)
def test_state(
    run: RunDir, queue: Queue, ended: list[Any], under_way: dict[str, Any] | None, state: str, why: str
) -> None:
    """Every combination of queue and files."""
    write(run.attempts, *ended)
    if under_way:
        write(run.attempt_now, under_way)
    found = status_of(run, queue)
    assert (found.state, found.why) == (state, why)
    assert found.attempts == len(ended) + bool(under_way)


def test_submitted_after_the_queue_was_asked(run: RunDir) -> None:
    """squeue's answer may be older than the run, which is then queued, not cancelled."""
    write(run.submissions, {"job_id": "9", "time": NOW + 1})
    assert status_of(run, EMPTY).state == "queued"


def test_when_it_is_expected_to_start(run: RunDir) -> None:
    """Slurm's estimate for a waiting job; for a running one the same field is its start."""
    assert status_of(run, queued("PENDING", "Resources", NOW + 60)).starts_at == NOW + 60
    assert status_of(run, queued("RUNNING", "", NOW - 60)).starts_at is None


def test_how_far_it_is(run: RunDir) -> None:
    """100 steps of 0.5 s were kept in 100 s, and 20 of 0.8 s in another 100 s, where 5 more were lost: goodput 0.33."""
    first = attempt(0, "preempted", start=NOW - 300, end=NOW - 200, end_step=100, step_s=0.5)
    second = attempt(1, "lost", start=NOW - 100, end=NOW, start_step=100, end_step=125, lost_steps=5, step_s=0.8)
    write(run.attempts, first, second)
    write(run.plan, {"total_steps": 520, "batch_size": 64})
    steps = [{"step": n, "epoch": 1, "loss": 1 / n, "samples_per_s": 32.0, "time": NOW} for n in range(1, 121)]
    write(run.metrics, *steps, {"epoch": 1, "step": 120, "val_loss": 1.0})
    found = status_of(run, queued("RUNNING"))
    assert (found.step, found.total_steps, found.epoch, found.loss) == (120, 520, 1, 1 / 120)
    assert found.eta_s == 400 * 64 / 32
    assert (found.attempts, found.lost_steps) == (2, 5)
    assert found.goodput == pytest.approx((100 * 0.5 + 20 * 0.8) / 200)


def test_a_run_that_a_crash_has_damaged(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """Half a last line in either file: the intact lines are shown, and the damage is reported."""
    write(run.attempts, attempt(0, "finished", end_step=20))
    write(run.metrics, {"step": 20, "epoch": 1, "loss": 0.5, "samples_per_s": 9.0, "time": NOW})
    for path in (run.attempts, run.metrics):
        with path.open("a") as file:
            file.write('{"attempt": 1, "sta')
    run.config.write_text("")
    assert main(["status", str(run.path)]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^run +finished +20 ", said, re.MULTILINE)
    assert "attempts.jsonl: damaged, 1 line skipped" in said
    assert "metrics.jsonl: damaged, 1 line skipped" in said


def test_a_run_of_an_older_version(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """An older run lacks files and fields that did not exist then. Its status can be shown; the message names what is
    not possible, and where the reason is documented."""
    known = {key: value for key, value in attempt(0, "preempted").items() if key not in ("lost_s", "step_s", "requeue")}
    write(run.attempts, known)
    run.submissions.unlink()
    run.config.write_text("dropped_key: 3\n")
    assert main(["status", str(run.path), "--json"]) == 0
    (said,) = json.loads(capfd.readouterr().out)
    assert (said["attempts"], said["lost_steps"], said["total_steps"]) == (1, 0, None)
    assert main(["status", str(run.path)]) == 0
    capfd.readouterr()
    assert main(["resume", str(run.path), "--local"]) == 2
    assert capfd.readouterr().err.startswith(f"error: {run.config}: dropped_key: no such key; choose from")


def test_a_run_of_somebody_else(run: RunDir) -> None:
    """No permission is not the same as no such run."""
    require_root("only root can become another user")
    run.config.write_text("")
    run.path.chmod(0o700)
    for folder in run.path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    pid = os.fork()
    if not pid:
        os.setuid(65534)
        try:
            find_run(run.name, str(run.path.parent))
        except ConfigError as error:
            os._exit(int("you may not read" not in str(error)))
        os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_squeue_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per job; the reason may contain any character."""
    said = "7|PENDING|2026-11-21T12:00:00|ReqNodeNotAvail, UnavailableNodes:n[1-2]|x\n8_3|RUNNING|N/A|None\n"

    def answer(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, said, "")

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", answer)
    jobs = Queue.ask([]).jobs
    at = time.mktime(time.strptime("2026-11-21T12:00:00", "%Y-%m-%dT%H:%M:%S"))
    assert jobs == {
        "7": Job("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]|x", at),
        "8_3": Job("RUNNING", "", None),
    }


def test_squeue_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarting controller does not mean that all jobs are gone."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "slurm_load_jobs"))
    assert Queue.ask([]).jobs is None
