"""A run that has finished is started once more: it ends at once, and its records stay as they are.

Slurm 24.11 does that to a job that was preempted and requeued; a user who repeats a command does it, too.
"""

from __future__ import annotations

from pathlib import Path

from laststep.rundir import RunDir
from tests.support.project import DEADLINE_S
from tests.support.ranks import Attempt, starts
from tests.support.runs import config


def files(run: RunDir) -> dict[str, bytes]:
    """What a second start could spoil."""
    kept = [run.attempts, run.metrics, run.submissions, *run.checkpoints.rglob("*.*")]
    return {str(path): path.read_bytes() for path in kept if path.is_file()}


def test_every_rank_ends_at_once(root: Path) -> None:
    """With an empty attempt more in its record the run would look as if it had been resumed, and would hold its nodes
    while torch is imported. The caller gets the same result as before: submitit writes it down again."""
    small = config(root, "twice", 2, ("train.max_steps=2",))
    first = Attempt(small)
    assert first.wait() == [0, 0], first.output()
    before = files(first.run)
    again = Attempt(small)
    assert again.wait() == [0, 0], again.output()
    assert files(first.run) == before
    for old, new in zip(first.logs, again.logs):
        assert "finished at 2 of 2" in new.read_text()
        assert "importing torch" not in new.read_text() and "attempt begins" not in new.read_text()
        result, again_result = (text.read_text().rpartition("result ")[2] for text in (old, new))
        assert result == again_result and "val_loss" in result


def test_a_command_that_is_repeated(root: Path) -> None:
    """Not even a submission is recorded, or `status` would wait for its attempt and call the run lost."""
    words = ["launch.name=repeated", f"launch.root={root}", "train.max_steps=2", "device=cpu"]
    logs = [root / "first.log", root / "second.log"]
    for log in logs:
        process = starts(words, {}, log)
        process.join(DEADLINE_S)
        assert process.exitcode == 0, log.read_text()
        if log is logs[0]:
            before = files(RunDir(root / "repeated"))
    assert "finished at 2 of 2" in logs[1].read_text()
    assert files(RunDir(root / "repeated")) == before
