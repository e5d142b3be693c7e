"""`resume --watch` continues a run that its nodes cannot requeue, and leaves alone one that has ended for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laststep.cli import resume as module
from laststep.cli.resume import watch
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.runs.queue import Job, Queue
from tests.runs.test_run_status import attempt, write


class Cluster:
    """A queue in which the run's jobs end at once: `ends` says, for each, how."""

    def __init__(self, run: RunDir, ends: list[tuple[str, dict[str, Any] | None]]) -> None:
        self.run, self.ends = run, ends
        self.records: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.jobs = 0
        self.state = ""
        self.submit()

    def submit(self) -> None:
        """A job of the run starts, and ends."""
        self.state, record = self.ends[self.jobs]
        if self.state == "refused":
            self.ends.pop(self.jobs)
            raise ConfigError("Slurm refused the job: try later")
        self.jobs += 1
        if record is not None:
            self.records.append(attempt(self.jobs, job_id=str(self.jobs), **record))
        write(self.run.attempts, *self.records)
        submitted = [{"job_id": str(number + 1), "time": 0.0} for number in range(self.jobs)]
        write(self.run.submissions, *submitted)

    def watch(self) -> int:
        return watch(self.run, 1, self.submit, self.said.append)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()

    def make(*ends: tuple[str, dict[str, Any] | None]) -> Cluster:
        made = Cluster(run, list(ends))
        monkeypatch.setattr(module, "show_job", lambda _: {"JobState": made.state})
        return made

    polls = [Queue(0.0, {"1": Job("RUNNING", "", None)}), Queue(0.0, None)]  # running, then Slurm is silent

    def ask(_: object) -> Queue:
        return polls.pop(0) if polls else Queue(1e10, {})

    monkeypatch.setattr(Queue, "ask", ask)
    monkeypatch.setattr(module, "POLL_S", 0.0)
    return make


STOPPED = ("FAILED", {"reason": "preempted", "end_step": 5, "requeue": True})
FINISHED = ("COMPLETED", {"reason": "finished", "end_step": 9})
KEPT_NOTHING = ("FAILED", {"reason": "lost"})
NEVER_BEGAN = ("FAILED", None)


@pytest.mark.parametrize(
    ("ends", "jobs", "said"),
    [
        ([STOPPED, FINISHED], 2, ""),
        ([STOPPED, ("refused", None), FINISHED], 2, "Slurm refused the job: try later; trying again every 0 s"),
        ([NEVER_BEGAN, STOPPED, KEPT_NOTHING, FINISHED], 4, ""),
        ([KEPT_NOTHING, NEVER_BEGAN], 2, "run: not resumed: retry budget used up (launch.max_failures=1)"),
        ([STOPPED, KEPT_NOTHING, NEVER_BEGAN], 3, "run: not resumed: retry budget used up (launch.max_failures=1)"),
        ([("CANCELLED", STOPPED[1])], 1, "run: not resumed: job 1 was cancelled"),
        ([("", {"reason": "cancelled"})], 1, "run: not resumed: job 1 was cancelled"),
        ([("FAILED", {"reason": "failed", "error": "seed=x: wrong"})], 1, "run: not resumed: seed=x: wrong"),
    ],
)
def test_until_it_has_ended(
    cluster: Callable[..., Cluster], ends: list[tuple[str, dict[str, Any] | None]], jobs: int, said: str
) -> None:
    """It must not start a run again that its user has cancelled, nor one that fails each time, nor give up because
    Slurm is away for a while."""
    slurm = cluster(*ends)
    finished = ends[-1] is FINISHED
    assert slurm.watch() == (0 if finished else 1)
    assert slurm.jobs == jobs
    assert said in slurm.said or not said
    if not finished:
        assert slurm.said[-1] == said
