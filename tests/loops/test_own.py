"""State that differs between ranks: any rank saves that of all, and each gets its own back."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from tests.loops.own_loops import refused, too_late
from tests.support.loops import run_function
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_run


def config(root: Path, name: str, ranks: int = 2, *options: str) -> Config:
    """A run of tests/loops/own_loops.py, which saves at stops and in rescues only."""
    fixed = ["device=cpu", "launch.max_failures=9", "launch.hang_timeout_s=30"]
    fixed += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    return Config.load(None, ["task=tests.loops.own_loops.played", *fixed, *options, *place])


@pytest.mark.parametrize(
    ("place", "end"),
    [
        ("SIGTERM step 4 rank 1", 4),
        ("SIGKILL step 5 rank 0", 4),
        ("SIGKILL step 9 rank 1", 8),
        ("SIGKILL step 7 rank 1", 6),
        ("SIGTERM validation 2 rank 0", 6),
    ],
)
def test_resumed(root: Path, place: str, end: int) -> None:
    """A survivor saves the game of a dead rank too. Between epochs, a game that was played on is played again from
    where the steps had left it."""
    name = place.replace(" ", "-")
    attempt = Attempt(config(root, name), {"LASTSTEP_TEST_SIGNAL": place})
    attempt.wait()
    run = train(config(root, name))
    assert fingerprint(run) == undisturbed_run(config(Path("unused"), "unused")), attempt.output()
    first, second = read_lines(run.attempts)
    assert (first["end_step"], first["lost_steps"], second["start_step"]) == (end, 0, end)


def test_another_number_of_ranks(root: Path) -> None:
    """There is no game for a third rank: the run ends with that."""
    attempt = Attempt(config(root, "fewer"), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 4 rank 1"})
    attempt.wait()
    again = Attempt(config(root, "fewer", 1))
    assert again.wait() != [0]
    assert "it is the state of each of 2 ranks, and now there are 1; resume on 2" in again.output()


def test_played_too_late(tmp_path: Path) -> None:
    """What a rank does after the others have its state would be lost with it."""
    with pytest.raises(ConfigError, match=r"own of run.own\(...\) has changed after the update of the step"):
        run_function(too_late, tmp_path, "late")


def test_with_shares(root: Path) -> None:
    """A game of each rank cannot have the same bits on another number of ranks."""
    attempt = Attempt(config(root, "shares", 2, "train.shares=2"))
    assert attempt.wait() != [0, 0]
    assert "run.own(...) with train.shares: what is a rank's own would change" in attempt.output()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (0.5, r"run.own\(what=...\): a float has no state_dict\(\) and load_state_dict\(\), and is no dict"),
        ({"lock": threading.Lock()}, r"run.own\(...\): what\['lock'\] is a _thread.lock, which no checkpoint can hold"),
    ],
)
def test_refused(what: Any, said: str, tmp_path: Path) -> None:
    """Before the first step, by name."""
    with pytest.raises(ConfigError, match=said):
        run_function(functools.partial(refused, what=what), tmp_path, "refused")
