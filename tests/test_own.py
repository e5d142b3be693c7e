"""A loop of one's own is as preemption-proof as the ready-made one: it ends with the weights and metrics of a run that
nobody touched, wherever it was stopped, and whoever died."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Attempt, fingerprint, train
from trainer.config import Config
from trainer.observe.metrics import read_lines

KILLED = -signal.SIGKILL


def config(root: Path, name: str, ranks: int, task: str, *options: str) -> Config:
    """A small run of a function in tests/own.py."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    often = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    return Config.load(None, [f"task=tests.own.{task}", *often, *options, *place])


@cache
def undisturbed(root: Path, ranks: int, task: str) -> dict[str, Any]:
    """The fingerprint of a run that nobody touched."""
    return fingerprint(train(config(root, f"undisturbed-{task}-{ranks}", ranks, task)))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


def strike(root: Path, ranks: int, task: str, place: str, *options: str) -> Attempt:
    """One attempt that is struck at that place, and has ended."""
    name = f"{task}-{ranks}-{place}".replace(" ", "-").replace(",", "-")
    attempt = Attempt(config(root, name, ranks, task, *options), {"LASTSTEP_TEST_SIGNAL": place})
    attempt.wait()
    return attempt


def go_on(root: Path, ranks: int, task: str, attempt: Attempt, *options: str) -> list[dict[str, Any]]:
    """The next attempt, which must finish as if nothing had been; returns the records of both."""
    run = train(config(root, attempt.run.name, ranks, task, *options))
    assert fingerprint(run) == undisturbed(root, ranks, task), attempt.output()
    records = read_lines(run.attempts)
    assert [record["reason"] for record in records][1:] == ["finished"]
    return records


def stop_and_go_on(root: Path, ranks: int, task: str, place: str, step: int) -> None:
    """A stop at that place keeps `step` steps."""
    attempt = strike(root, ranks, task, place)
    assert [rank.exitcode for rank in attempt.ranks] == [128 + signal.SIGTERM] * ranks, attempt.output()
    first, second = go_on(root, ranks, task, attempt)
    assert (first["lost_steps"], first["end_step"], second["start_step"]) == (0, step, step)


@pytest.mark.parametrize(
    ("ranks", "place", "step"),
    [
        (2, "step 1 rank 0", 1),
        (2, "step 4 rank 1", 4),
        (2, "step 7 rank 1", 7),
        (2, "validation 2 rank 0", 7),
        (2, "step 8 rank 0,1", 8),
        (4, "step 1 rank 3", 1),
        (4, "step 3 rank 2", 3),
        (4, "validation 1 rank 0", 7),
        (4, "step 8 rank 1,2", 8),
    ],
)
def test_stop_anywhere(root: Path, ranks: int, place: str, step: int) -> None:
    """The example, whose network has dropout, batch norm and momentum, and whose data is augmented. From three ranks on
    the order of a sum depends on DDP's buckets, of which this network has several."""
    stop_and_go_on(root, ranks, "example", f"SIGTERM {place}", step)


@pytest.mark.parametrize(
    ("ranks", "place", "step"),
    [
        (2, "step 5 rank 1", 5),
        (2, "step 6 rank 0", 6),  # which ends an epoch with a break
        (2, "step 7 rank 0", 7),
        (2, "validation 3 rank 1", 6),  # the state is another one then: the ranks stop when it is that of a step again
        (4, "step 8 rank 3", 8),
    ],
)
def test_an_awkward_loop(root: Path, ranks: int, place: str, step: int) -> None:
    """What a hand-written loop does beside its steps is done once, whichever attempt it falls to: a schedule that moved
    on twice, or an averaged model taken for the other, would be another experiment."""
    stop_and_go_on(root, ranks, "awkward", f"SIGTERM {place}", step)


@pytest.mark.parametrize(
    ("ranks", "task", "place", "step"),
    [
        (2, "example", "step 10 rank 1", 9),
        (2, "example", "step 10 rank 0", 9),
        (4, "example", "step 5 rank 0,2,3", 4),
        (2, "example", "validation 2 rank 0", 7),
        (2, "awkward", "step 4 rank 0", 3),  # which logs after the update
    ],
)
def test_killed(root: Path, ranks: int, task: str, place: str, step: int) -> None:
    """Who is left saves the last whole step, even where rank 0 alone knew of its batch norm and its losses."""
    attempt = strike(root, ranks, task, f"SIGKILL {place}")
    hit = [int(rank) for rank in place.split()[-1].split(",")]
    codes = [KILLED if rank in hit else 1 for rank in range(ranks)]
    assert [rank.exitcode for rank in attempt.ranks] == codes, attempt.output()
    first, second = go_on(root, ranks, task, attempt)
    assert (first["lost_steps"], second["start_step"]) == (0, step)


def test_all_are_killed(root: Path) -> None:
    """Then the steps since the last save are done again, and stand in metrics.jsonl once."""
    often = ("checkpoint.every_steps=4", "checkpoint.asynchronous=false")
    attempt = strike(root, 2, "example", "SIGKILL step 7 rank 0,1", *often)
    assert [rank.exitcode for rank in attempt.ranks] == [KILLED, KILLED]
    first, second = go_on(root, 2, "example", attempt, *often)
    assert (first["reason"], first["lost_steps"], second["start_step"]) == ("lost", 2, 4)
