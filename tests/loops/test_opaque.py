"""A loop whose framework saves its own files is stopped, restarted and resumed as exactly as any other; only a rescue
cannot save what no rank has alone."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint.store import CheckpointStore
from laststep.cli.main import main
from laststep.cli.verify import inspect
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.submission.branch import copy_state
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_folder, undisturbed_run

KILLED = -signal.SIGKILL


def config(root: Path, name: str, *options: str, task: str = "hidden", ranks: int = 2) -> Config:
    """A small run of a function in tests/loops/opaque_loops.py, which saves when it is told to."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    fixed = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    fixed += ["checkpoint.every_epochs=null", "checkpoint.every_minutes=null", "checkpoint.asynchronous=false"]
    return Config.load(None, [f"task=tests.loops.opaque_loops.{task}", *fixed, *options, *place])


def attempt(settings: Config, place: str = "", save: str = "", breaks: bool = False) -> Attempt:
    """One attempt that has ended."""
    env = {"LASTSTEP_TEST_SIGNAL": place, "LASTSTEP_TEST_SAVE": save} | ({"LASTSTEP_TEST_BREAK": ""} if breaks else {})
    ended = Attempt(settings, env)
    ended.wait()
    return ended


def undisturbed() -> dict[str, Any]:
    """The fingerprint of an undisturbed run; how often it saves changes nothing."""
    return undisturbed_run(config(Path("unused"), "unused"))


def records(ended: Attempt) -> list[tuple[str, int, int]]:
    """Why the attempts of the run ended, after which step, and how many steps they lost."""
    return [(each["reason"], each["end_step"], each["lost_steps"]) for each in read_lines(ended.run.attempts)]


def resume(settings: Config) -> None:
    """The next attempt, which must finish like an undisturbed run."""
    assert fingerprint(train(settings)) == undisturbed()


def test_stopped_killed_and_resumed(root: Path) -> None:
    """A stop in the middle of an epoch keeps every step. When a rank is killed, the others cannot save what it alone
    has had; the record must count the steps since the last save as lost, and the log must say why."""
    settings = config(root, "journey", "checkpoint.every_steps=4")
    stopped = attempt(settings, "SIGTERM step 3 rank 1")
    assert [rank.exitcode for rank in stopped.ranks] == [143, 143], stopped.output()
    killed = attempt(settings, "SIGKILL step 4 rank 1")
    assert [rank.exitcode for rank in killed.ranks] == [1, KILLED], killed.output()
    assert records(killed) == [("cancelled", 3, 0), ("failed", 6, 2)], killed.output()
    assert "a rank that dies costs the steps since the newest checkpoint" in killed.output()
    assert "only all ranks together can save this run's state: step 4 is the last saved" in killed.output()
    resume(settings)


@pytest.mark.parametrize(("saves", "lines"), [("7", 7), ("null", 8)])
def test_a_stop_in_a_validation(root: Path, saves: str, lines: int) -> None:
    """The function has changed the hidden state after the steps, and will do so again if it resumes within the epoch.
    So the ranks leave a validation only if the state that the steps left is saved; else they stop after it, and the
    epoch has its line."""
    settings = config(root, f"validation-{saves}", f"checkpoint.every_steps={saves}")
    stopped = attempt(settings, "SIGTERM validation 2 rank 0")
    assert [rank.exitcode for rank in stopped.ranks] == [143, 143], stopped.output()
    assert len(read_lines(stopped.run.metrics)) == lines and records(stopped) == [("cancelled", 7, 0)]
    resume(settings)


def test_a_break(root: Path) -> None:
    """What follows a break has changed the hidden state when the engine learns that the steps are over: a checkpoint
    made then, as of the end of the steps, would have that change twice."""
    expected = attempt(config(root, "break"), breaks=True)
    settings = config(root, "break-stopped", "checkpoint.every_steps=6")
    stopped = attempt(settings, "SIGTERM validation 1 rank 1", breaks=True)
    assert records(stopped) == [("cancelled", 6, 0)], stopped.output()
    resumed = attempt(settings, breaks=True)
    assert fingerprint(resumed.run) == fingerprint(expected.run), resumed.output()


def test_killed_in_the_middle_of_a_save(root: Path) -> None:
    """A rank has written its part of the second checkpoint, and dies. The first one stands, the torn one is gone after
    the next attempt."""
    settings = config(root, "torn", "checkpoint.every_steps=3")
    killed = attempt(settings, save="kill 2 rank 1")
    assert [rank.exitcode for rank in killed.ranks] == [1, KILLED], killed.output()
    assert records(killed) == [("failed", 6, 3)] and CheckpointStore(killed.run.checkpoints).steps() == [3]
    resume(settings)
    names = sorted(path.name for path in killed.run.checkpoints.iterdir())
    assert names == ["step_000000012", "step_000000014"], "two are kept, and nothing is left of any other"


def test_a_save_that_raises(root: Path) -> None:
    """The error of the one rank ends the attempt: the ranks' frameworks are no longer in step. It is the error that is
    recorded, and no checkpoint is committed."""
    settings = config(root, "raises", "checkpoint.every_steps=3")
    failed = attempt(settings, save="raise 2 rank 1")
    (record,) = read_lines(failed.run.attempts)
    assert "rank 1 on" in record["error"] and "the engine has lost a part" in record["error"], record["error"]
    assert records(failed) == [("failed", 6, 3)] and CheckpointStore(failed.run.checkpoints).steps() == [3]
    resume(settings)


def test_a_slow_save_is_no_hang(root: Path) -> None:
    """A save that takes longer than launch.hang_timeout_s, in which files grow on one rank only."""
    run = attempt(config(root, "slow", "checkpoint.every_steps=6", "launch.hang_timeout_s=6"), save="slow 1 rank 1").run
    assert [record["reason"] for record in read_lines(run.attempts)] == ["finished"]


def test_a_save_that_hangs_is_one(root: Path) -> None:
    """Nothing grows any more: the attempt ends, and names the rank and its line."""
    hung = attempt(config(root, "hung", "checkpoint.every_steps=3", "launch.hang_timeout_s=6"), save="hang 2 rank 1")
    (record,) = read_lines(hung.run.attempts)
    assert record["reason"] == "hung" and "rank 1 on" in record["error"] and "wait (" in record["error"]
    assert record["lost_steps"] == 3


@pytest.mark.parametrize("hidden_first", [False, True])
def test_the_other_kind_of_checkpoint_is_refused(root: Path, hidden_first: bool) -> None:
    """A loop that was changed to save in the other way cannot continue the run, and must not begin it anew."""
    settings = config(root, f"other-{hidden_first}", task="registers_instead", ranks=1)
    hides = {"LASTSTEP_TEST_HIDES": ""}
    train(settings, hides if hidden_first else {})
    other = dataclasses.replace(settings, train=dataclasses.replace(settings.train, epochs=9))  # it is extended
    refused = Attempt(other, {} if hidden_first else hides)
    refused.wait()
    here, there = ("restore", "checkpoint") if hidden_first else ("checkpoint", "restore")
    line = f"run.{here}(): this run's checkpoints were written by run.{there}(...); call that"
    assert line in read_lines(refused.run.attempts)[-1]["error"], refused.output()


def test_what_other_commands_say(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody but the framework can read the weights: `verify` checks the files and shows what is known of them, the
    others say where the files are. A branch has all of them."""
    run = undisturbed_folder(config(Path("unused"), "unused"))
    newest = inspect(run)[-1]
    assert newest["ok"] and newest["weights_sha256"] is None and len(newest["files_sha256"]) == 64
    assert main(["verify", str(run.path)]) == 0
    assert f"intact, files {newest['files_sha256'][:16]}" in capsys.readouterr().out
    for words in (["export", str(run.path), str(root / "out.pt")], ["evaluate", str(run.path)]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{run.checkpoints}/step_000000014/opaque: the weights are in" in said, said
    branch = RunDir(root / "branch")
    branch.checkpoints.mkdir(parents=True)
    assert copy_state(run, branch) == 14
    assert inspect(branch)[-1] == newest
