"""A loop of one's own is as preemption-proof as the ready-made one: it ends with the weights and metrics of a run that
nobody touched, wherever it was stopped, and whoever died."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Attempt, fingerprint, train
from tests.support.undisturbed import undisturbed_run
from trainer.config.config import Config
from trainer.records.metrics import read_lines

KILLED = -signal.SIGKILL


def config(root: Path, name: str, ranks: int, task: str, *options: str) -> Config:
    """A small run of a function in tests/support/custom_loops.py."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    often = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    often += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]  # a stop or a rescue keeps
    return Config.load(None, [f"task=tests.support.custom_loops.{task}", *often, *options, *place])


def undisturbed(ranks: int, task: str) -> dict[str, Any]:
    """The fingerprint of a run that nobody stops."""
    return undisturbed_run(config(Path("unused"), "unused", ranks, task))


def strike(root: Path, ranks: int, task: str, place: str, *options: str) -> Attempt:
    """One attempt that is struck at that place, and has ended."""
    name = f"{task}-{ranks}-{place}".replace(" ", "-").replace(",", "-")
    attempt = Attempt(config(root, name, ranks, task, *options), {"LASTSTEP_TEST_SIGNAL": place})
    attempt.wait()
    return attempt


def go_on(root: Path, ranks: int, task: str, attempt: Attempt, *options: str) -> list[dict[str, Any]]:
    """The next attempt, which must finish as if nothing had been; returns the records of both."""
    run = train(config(root, attempt.run.name, ranks, task, *options))
    assert fingerprint(run) == undisturbed(ranks, task), attempt.output()
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
        (2, "awkward", "step 7 rank 1", 6),  # the first of an epoch, at whose head something has changed
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


def careless(root: Path, name: str, ranks: int, wrong: str) -> Attempt:
    """One attempt at a run that does something wrong."""
    attempt = Attempt(config(root, name, ranks, "careless"), {"LASTSTEP_TEST_WRONG": wrong})
    attempt.wait()
    return attempt


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("no restore", "call run.restore(...) before run.steps(...)"),
        ("no optimizer", "run.restore(): register the optimizer too"),
        ("no state", "run.restore(best=...): a float has no state_dict() and load_state_dict(), and is no dict"),
        ("strange state", "run.restore(best=...): its state cannot be stored: "),
        ("loader", "run.steps(...) takes what run.loader(...) gave"),
        ("batch size", "run.loader(batch_size=3): not divisible by 2 ranks"),
        ("twice", "run.steps(...) twice in an epoch; put `for epoch in run.epochs(n)` around it"),
        ("log", "run.log(loss=...): must be a number, or a tensor of one element"),
        ("uneven", "run.validation(...) needs as many batches on every rank, not [3, 4]"),
        ("result", "must return a dict of numbers, or nothing"),
        ("nan", "step 1: the loss is not finite"),
    ],
)
def test_what_is_wrong_is_said(root: Path, wrong: str, said: str) -> None:
    """One line that names the call and what to do; the job is not tried again, since it would fail the same way."""
    attempt = careless(root, f"wrong-{wrong}".replace(" ", "-"), 2, wrong)
    (record,) = read_lines(attempt.run.attempts)
    assert said in record["error"] and record["requeue"] is False


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("names", "this run's checkpoints hold model, optimizer; register these, not model, optimizer, teacher"),
        ("shapes", "run.restore(): model does not take what the checkpoint holds: "),
    ],
)
def test_another_state_is_not_put_in(root: Path, wrong: str, said: str) -> None:
    """A run that went on with a part of its state fresh would be another experiment. What crashed before that is an
    error like any other: its steps are kept."""
    name = f"other-{wrong}"
    attempt = careless(root, name, 2, "crash")
    (first,) = read_lines(attempt.run.attempts)
    assert (first["end_step"], first["lost_steps"]) == (2, 0) and "a bug of the user's" in first["error"]
    assert said in read_lines(careless(root, name, 2, wrong).run.attempts)[1]["error"]
    assert careless(root, name, 2, "").output().count('result {"loss": ') == 2


def test_a_finished_run_has_its_result(root: Path) -> None:
    """A job that is requeued after its run was done must not train, or fail, a second time."""
    first, second = (careless(root, "done", 1, wrong) for wrong in ("", "crash"))
    results = [line for line in (first.output() + second.output()).splitlines() if line.startswith("result ")]
    assert len(results) == 2 and results[0] == results[1]


def test_metrics() -> None:
    """What the example logs stands there once for each step and epoch, with the learning rate of the step."""
    lines = undisturbed(2, "example")["metrics"]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert {line["lr"] for line in steps} and steps[0]["lr"] != steps[7]["lr"]
    assert [(line["epoch"], line["step"]) for line in lines if "val_accuracy" in line] == [(1, 7), (2, 14)]


def test_another_number_of_ranks(root: Path) -> None:
    """A run goes on with what the cluster has: the same order of samples, another share for each rank."""
    attempt = strike(root, 2, "example", "SIGTERM step 3 rank 0")
    run = train(config(root, attempt.run.name, 4, "example"))
    assert [line["step"] for line in read_lines(run.metrics) if "loss" in line] == list(range(1, 15))
    assert [record["world_size"] for record in read_lines(run.attempts)] == [2, 4]
