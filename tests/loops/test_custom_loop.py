"""A custom training loop is as preemption-proof as the ready-made one: wherever it was stopped, and whichever rank
died, it ends with the weights and metrics of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from laststep.config.config import Config
from laststep.loops import engine
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_run, without_a_long_wait

KILLED = -signal.SIGKILL


def config(root: Path, name: str, ranks: int, task: str, *options: str) -> Config:
    """A small run of a function in tests/support/custom_loops.py."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    options_for_all = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    options_for_all += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]  # saves at stops and rescues
    return Config.load(None, [f"task=tests.support.custom_loops.{task}", *options_for_all, *options, *place])


def undisturbed(ranks: int, task: str) -> dict[str, Any]:
    """The fingerprint of an undisturbed run."""
    return undisturbed_run(config(Path("unused"), "unused", ranks, task))


def strike(root: Path, ranks: int, task: str, place: str, *options: str) -> Attempt:
    """One attempt that received the signal at that place, and has ended."""
    name = f"{task}-{ranks}-{place}".replace(" ", "-").replace(",", "-")
    attempt = Attempt(config(root, name, ranks, task, *options), {"LASTSTEP_TEST_SIGNAL": place})
    attempt.wait()
    return attempt


def resume(root: Path, ranks: int, task: str, attempt: Attempt, *options: str) -> list[dict[str, Any]]:
    """The next attempt, which must finish like an undisturbed run; returns the records of both attempts."""
    run = train(config(root, attempt.run.name, ranks, task, *options))
    assert fingerprint(run) == undisturbed(ranks, task), attempt.output()
    records = read_lines(run.attempts)
    assert [record["reason"] for record in records][1:] == ["finished"]
    return records


def stop_and_resume(root: Path, ranks: int, task: str, place: str, step: int) -> None:
    """A stop at that place saves `step` steps."""
    attempt = strike(root, ranks, task, place)
    assert [rank.exitcode for rank in attempt.ranks] == [128 + signal.SIGTERM] * ranks, attempt.output()
    first, second = resume(root, ranks, task, attempt)
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
    """The example has dropout, batch norm, momentum and augmented data. With three ranks or more the order of a sum
    depends on DDP's buckets, and this network has several."""
    stop_and_resume(root, ranks, "example", f"SIGTERM {place}", step)


@pytest.mark.parametrize(
    ("ranks", "place", "step"),
    [
        (2, "step 5 rank 1", 5),
        (2, "step 6 rank 0", 6),  # a break ends the epoch in this step
        (2, "step 7 rank 0", 7),
        (2, "validation 3 rank 1", 6),  # the state differs from the steps' here: the ranks stop once it is back
        (4, "step 8 rank 3", 8),
    ],
)
def test_an_awkward_loop(root: Path, ranks: int, place: str, step: int) -> None:
    """Whatever a loop does besides its steps takes effect once, in one attempt or the other. A schedule that advances
    twice, or an averaged model that is taken for the trained one, would be another experiment."""
    stop_and_resume(root, ranks, "awkward", f"SIGTERM {place}", step)


@pytest.mark.parametrize(("place", "step"), [("step 3 rank 1", 3), ("step 6 rank 0", 6), ("validation 3 rank 0", 4)])
def test_own_batches_a_second_loader_and_validations_within_epochs(root: Path, place: str, step: int) -> None:
    """A resumed run draws the batches that the undisturbed run drew. A validation within a step belongs to it: the
    ranks stop after it, and its line is in metrics.jsonl once."""
    stop_and_resume(root, 2, "mixed", f"SIGTERM {place}", step)


@pytest.mark.parametrize(("place", "step"), [("step 6 rank 1", 2), ("step 10 rank 0", 3)])
def test_stop_within_an_accumulation(root: Path, place: str, step: int) -> None:
    """The ranks stop after its update: what earlier micro-batches left in the gradients is in no checkpoint. The
    third step of an epoch has three micro-batches instead of four."""
    stop_and_resume(root, 2, "accumulating", f"SIGTERM {place}", step)


@pytest.mark.parametrize(("ranks", "place", "step"), [(2, "step 6 rank 0", 1), (2, "step 14 rank 1", 3), (1, "", 2)])
def test_killed_within_an_accumulation(root: Path, ranks: int, place: str, step: int) -> None:
    """The survivor saves the last update; the open step is done again, with all its micro-batches."""
    saves = () if place else ("checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    attempt = strike(root, ranks, "accumulating", f"SIGKILL {place or 'step 10 rank 0'}", *saves)
    first, second = resume(root, ranks, "accumulating", attempt, *saves)
    assert (first["lost_steps"], second["start_step"]) == (0, step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_from_a_set(root: Path, ranks: int) -> None:
    """Each process lists them in another order, and an optimiser's state is saved by their numbers: without care, a
    resumed run gives a parameter the moments of another one of its shape, and two ranks save a mixture."""
    stop_and_resume(root, ranks, "unordered", "SIGTERM step 3 rank 0", 3)


@pytest.mark.parametrize(("ranks", "place"), [(1, "SIGTERM step 3 rank 0"), (2, "SIGTERM step 3 rank 1")])
def test_replaced_buffers(root: Path, ranks: int, place: str) -> None:
    """Many models keep a running mean by `self.mean = ...`. A checkpoint has it, and it is the same on all ranks."""
    stop_and_resume(root, ranks, "rebinding", place, 3)


def test_a_curriculum_within_autocast(root: Path) -> None:
    """Workers that stay from epoch to epoch would not see the change, and autocast would go on with the weights of its
    first step. In a resumed run, workers and casts are new."""
    stop_and_resume(root, 1, "careful", "SIGTERM step 5 rank 0", 5)


@pytest.mark.parametrize("dead", [0, 1])
def test_replaced_buffers_and_a_killed_rank(root: Path, dead: int) -> None:
    """The survivor saves the finished step's, not those of the step under way."""
    place = f"SIGKILL step 4 rank {dead}"
    attempt = strike(root, 2, "rebinding", place)
    first, second = resume(root, 2, "rebinding", attempt)
    assert (first["lost_steps"], second["start_step"]) == (0, 3)


def test_it_compiles_by_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch.compile uses one graph for all sizes as soon as it has seen a short batch, and that graph rounds
    differently. The resumed run has not seen one yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "compiled"))
    stop_and_resume(root, 1, "compiling", "SIGTERM step 4 rank 0", 4)


@pytest.mark.parametrize(
    ("ranks", "task", "place", "step"),
    [
        (2, "mixed", "step 9 rank 0", 8),
        (2, "example", "step 10 rank 1", 9),
        (2, "example", "step 10 rank 0", 9),
        (4, "example", "step 5 rank 0,2,3", 4),
        (2, "example", "validation 2 rank 0", 7),
        (2, "awkward", "step 4 rank 0", 3),  # this loop logs after the update
        (2, "logging_late", "step 5 rank 0", 4),  # so does this one, what differs between ranks
        (2, "awkward", "step 7 rank 1", 6),  # the first step of an epoch; something has changed just before it
    ],
)
def test_killed(root: Path, ranks: int, task: str, place: str, step: int) -> None:
    """The surviving ranks save the last finished step, even though its batch norm and losses are those of rank 0."""
    attempt = strike(root, ranks, task, f"SIGKILL {place}")
    hit = [int(rank) for rank in place.split()[-1].split(",")]
    codes = [KILLED if rank in hit else 1 for rank in range(ranks)]
    assert [rank.exitcode for rank in attempt.ranks] == codes, attempt.output()
    first, second = resume(root, ranks, task, attempt)
    assert (first["lost_steps"], second["start_step"]) == (0, step)


@pytest.mark.parametrize(("ranks", "place", "step"), [(2, "step 5 rank 1", 4), (2, "step 9 rank 0", 8)])
def test_killed_between_two_updates(root: Path, ranks: int, place: str, step: int) -> None:
    """The survivor waits for the dead rank in an update that is not the step's first, and what it trains with is a
    mixture. It saves its copy of the step before. Adversarial models and PPO spend most of their time there."""
    attempt = strike(root, ranks, "adversarial", f"SIGKILL {place}")
    first, second = resume(root, ranks, "adversarial", attempt)
    assert (first["lost_steps"], first["end_step"], second["start_step"]) == (0, step, step), attempt.output()


def copies_nothing() -> None:
    """In this rank any state is too large to copy. It does not wait long for one that has what it needs."""
    without_a_long_wait()
    vars(engine)["MOST_COPIED"] = 0


def test_killed_between_two_updates_without_a_copy(root: Path) -> None:
    """The user is told at once, and the record counts what is lost: it used to say that nothing was."""
    small = config(root, "no-copy", 2, "adversarial")
    attempt = Attempt(small, {"LASTSTEP_TEST_SIGNAL": "SIGKILL step 5 rank 1"}, before=copies_nothing)
    attempt.wait()
    assert attempt.output().count("is too large to copy after each step") == 1, attempt.output()
    first, _ = resume(root, 2, "adversarial", attempt)
    assert (first["lost_steps"], first["end_step"]) == (4, 4), attempt.output()


def test_stop_between_two_updates(root: Path) -> None:
    """The ranks finish the step first."""
    stop_and_resume(root, 2, "adversarial", "SIGTERM step 5 rank 1", 5)


def test_all_are_killed(root: Path) -> None:
    """The steps since the last save are repeated, and metrics.jsonl has each of them once. The lines of the last 0.1 s
    may not have been written: their steps do not count as lost."""
    saves = ("checkpoint.every_steps=4", "checkpoint.asynchronous=false")
    attempt = strike(root, 2, "example", "SIGKILL step 7 rank 0,1", *saves)
    assert [rank.exitcode for rank in attempt.ranks] == [KILLED, KILLED]
    first, second = resume(root, 2, "example", attempt, *saves)
    assert (first["reason"], second["start_step"]) == ("lost", 4) and first["lost_steps"] <= 2


def careless(root: Path, name: str, ranks: int, wrong: str) -> Attempt:
    """One attempt at a run whose loop makes a mistake."""
    attempt = Attempt(config(root, name, ranks, "careless"), {"LASTSTEP_TEST_WRONG": wrong})
    attempt.wait()
    return attempt


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no restore", "call run.restore(model=model, optimizer=optimizer, ...) before run.steps(...)"),
        ("no optimizer", "run.restore(): register the optimizer too"),
        ("no state", "run.restore(best=...): a float has no state_dict() and load_state_dict(), and is no dict"),
        ("strange state", "run.restore(best=...): best['of'][0] is a _thread.lock, which no checkpoint can"),
        ("loader", "run.steps(...) takes what run.loader(...) gave, not a DataLoader: write `loader = run.loader("),
        ("batch size", "run.loader(batch_size=3): not divisible by 2 ranks"),
        ("twice", "run.steps(...) twice in an epoch: put `for epoch in run.epochs(n):` around one loop over run.steps"),
        ("log", "run.log(loss=...): must be a number, or a tensor of one element"),
        ("uneven", "run.validation(...) needs as many batches on every rank, not [3, 4]"),
        ("result", "must return a dict of numbers, or nothing"),
        ("nan", "step 1: the loss is not finite"),
        ("differs", "differs between ranks at step 4: best.loss (rank 1 against rank 0)"),
    ],
)
def test_misuse_is_reported(root: Path, wrong: str, message: str) -> None:
    """One line names the call and what to do. The job is not requeued: a retry would fail the same way."""
    attempt = careless(root, f"wrong-{wrong}".replace(" ", "-"), 2, wrong)
    (record,) = read_lines(attempt.run.attempts)
    assert message in record["error"] and record["requeue"] is False


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("names", "this run's checkpoints hold model, optimizer; register these, not model, optimizer, teacher"),
        ("shapes", "run.restore(): model does not take what the checkpoint holds: "),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(root: Path, wrong: str, message: str) -> None:
    """A run that continued with part of its state fresh would be another experiment. A crash in the user's function
    before that keeps its steps, like any other error."""
    name = f"other-{wrong}"
    attempt = careless(root, name, 2, "crash")
    (first,) = read_lines(attempt.run.attempts)
    assert (first["end_step"], first["lost_steps"]) == (2, 0) and "a bug of the user's" in first["error"]
    assert message in read_lines(careless(root, name, 2, wrong).run.attempts)[1]["error"]
    assert careless(root, name, 2, "").output().count('result {"loss": ') == 2


def test_a_finished_run_has_its_result(root: Path) -> None:
    """A job that is requeued after its run has finished must neither train nor fail a second time."""
    first, second = (careless(root, "done", 1, wrong) for wrong in ("", "crash"))
    results = [line for line in (first.output() + second.output()).splitlines() if line.startswith("result ")]
    assert len(results) == 2 and results[0] == results[1]


def test_metrics() -> None:
    """metrics.jsonl has one line for each step and each epoch, and the learning rate of each step."""
    lines = undisturbed(2, "example")["metrics"]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert {line["lr"] for line in steps} and steps[0]["lr"] != steps[7]["lr"]
    assert [(line["epoch"], line["step"]) for line in lines if "val_accuracy" in line] == [(1, 7), (2, 14)]


def test_another_number_of_ranks(root: Path) -> None:
    """A run continues with more ranks: the same order of samples, another share for each rank."""
    attempt = strike(root, 2, "example", "SIGTERM step 3 rank 0")
    run = train(config(root, attempt.run.name, 4, "example"))
    assert [line["step"] for line in read_lines(run.metrics) if "loss" in line] == list(range(1, 15))
    assert [record["world_size"] for record in read_lines(run.attempts)] == [2, 4]
