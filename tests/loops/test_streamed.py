"""A loop over a stream ends with the same weights and metrics, wherever it was stopped and whichever rank died."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_run


def config(root: Path, name: str, ranks: int, *options: str) -> Config:
    """A run of tests/loops/streamed_loops.py, which saves at stops and in rescues only."""
    fixed = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=30"]
    fixed += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    return Config.load(None, ["task=tests.loops.streamed_loops.streamed", *fixed, *options, *place])


def strike(root: Path, name: str, ranks: int, places: str, *options: str, silent: str = "") -> Attempt:
    """One attempt, which received a signal at that place and has ended."""
    env = {"LASTSTEP_TEST_SIGNAL": places, "LASTSTEP_TEST_COUNTED": silent}
    attempt = Attempt(config(root, name, ranks, *options), env)
    attempt.wait()
    return attempt


@pytest.mark.parametrize("silent", ["", "1"], ids=["state", "counted"])
def test_stopped_twice(root: Path, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that was taken after a resume must be right as well."""
    for place, step in (("SIGTERM step 4 rank 1", 4), ("SIGTERM step 5 rank 0", 9)):
        attempt = strike(root, f"stopped{silent}", 2, place, silent=silent)
        assert read_lines(attempt.run.attempts)[-1]["end_step"] == step, attempt.output()
    monkeypatch.setenv("LASTSTEP_TEST_COUNTED", silent)
    run = train(config(root, f"stopped{silent}", 2))
    assert fingerprint(run) == undisturbed_run(config(Path("unused"), "unused", 2))


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("step", [2, 9])
def test_killed(root: Path, dead: int, step: int) -> None:
    """The survivor saves the last step, and knows enough of the dead rank's part of the stream: nothing at first, later
    where it was some steps before."""
    attempt = strike(root, f"killed-{dead}-{step}", 2, f"SIGKILL step {step} rank {dead}")
    assert attempt.ranks[dead].exitcode == -signal.SIGKILL, attempt.output()
    run = train(config(root, f"killed-{dead}-{step}", 2))
    assert fingerprint(run) == undisturbed_run(config(Path("unused"), "unused", 2)), attempt.output()
    first, second = read_lines(run.attempts)
    assert (first["lost_steps"], second["start_step"]) == (0, step - 1)


def test_any_number_of_ranks(root: Path) -> None:
    """With train.shares: on 2 ranks, stopped, on 4, killed, on 1."""
    shares = "train.shares=4"
    strike(root, "sizes", 2, "SIGTERM step 3 rank 1", shares)
    attempt = strike(root, "sizes", 4, "SIGKILL step 4 rank 2", shares)
    run = train(config(root, "sizes", 1, shares))
    assert fingerprint(run) == undisturbed_run(config(Path("unused"), "unused", 2, shares)), attempt.output()


@pytest.mark.parametrize("place", ["first 4 rank 1", "last 4 rank 0"])
def test_killed_within_a_step_of_micro_batches(root: Path, place: str) -> None:
    """The open step is done again from its first micro-batch: its samples must not count as used."""
    name, task = f"micro-{place[:5]}", "task=tests.loops.streamed_loops.in_micro_batches"
    strike(root, name, 2, f"SIGTERM {place}", task)
    attempt = strike(root, name, 2, f"SIGKILL {place.replace('4', '2')}", task)
    run = train(config(root, name, 2, task))
    assert fingerprint(run) == undisturbed_run(config(Path("unused"), "unused", 2, task)), attempt.output()
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0, 0, 0]
