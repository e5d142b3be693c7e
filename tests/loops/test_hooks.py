"""A Task's validation sets, its hook at the end of an epoch, and its own state: exact through stops and deaths.

Early stopping, a lower learning rate on a plateau, a second validation set: what people write by hand beside a trainer,
and what is forgotten when their job is requeued. A state that is lost, or that counts an epoch twice because the hook
was called again after a kill, trains another model without a word.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint.export import read_run
from laststep.loops.task_loop import evaluate
from laststep.records.metrics import read_lines
from laststep.report.curves import read_curves
from laststep.rundir import RunDir
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, undisturbed_folder

HOOKED = ("task=tests.loops.hooked_tasks.Hooked", "checkpoint.every_steps=3", "checkpoint.asynchronous=false")
KILLED = -signal.SIGKILL


def all_of(run: RunDir) -> dict[str, Any]:
    """What interruptions must not change, with the task's own state."""
    state = read_run(run).task["now"]
    return {**fingerprint(run), "task": {**state, "losses": state["losses"].tolist()}}


@pytest.mark.parametrize(
    ("name", "env", "resumes_at"),
    [
        ("stop-second-set", {"LASTSTEP_TEST_SIGNAL": "SIGTERM validation 6 rank 0"}, 7),
        ("stop-hook", {"LASTSTEP_TEST_HOOK": "SIGTERM epoch 1 rank 1"}, 7),
        ("kill-second-set", {"LASTSTEP_TEST_SIGNAL": "SIGKILL validation 6 rank 1"}, 7),
        ("kill-one-in-hook", {"LASTSTEP_TEST_HOOK": "SIGKILL epoch 1 rank 0"}, 7),
        ("kill-all-in-hook", {"LASTSTEP_TEST_HOOK": "SIGKILL epoch 1 rank 0,1"}, 6),
        ("kill-one-after-hook", {"LASTSTEP_TEST_SIGNAL": "SIGKILL step 8 rank 0"}, 7),
        ("kill-all-after-hook", {"LASTSTEP_TEST_SIGNAL": "SIGKILL step 10 rank 0,1"}, 9),
    ],
)
def test_exact(root: Path, name: str, env: dict[str, str], resumes_at: int) -> None:
    """Whatever ends the ranks, and wherever, weights, metrics and the task's own state are those of the undisturbed
    run: a hook that is called again finds the state before it."""
    options = (*HOOKED, "launch.hang_timeout_s=10", "launch.max_failures=9")
    whole = config(root, name, 2, options)
    ended = Attempt(whole, env)
    codes = ended.wait()
    assert KILLED in codes or codes == [128 + signal.SIGTERM] * 2, ended.output()
    run = train(whole)
    assert read_lines(run.attempts)[-1]["start_step"] == resumes_at, ended.output()
    assert all_of(run) == all_of(undisturbed_folder(whole))


def test_one_rank_with_shares(root: Path) -> None:
    """With train.shares the sets, and what the hook makes of them, have the same bits on any number of ranks. Batch
    counts of a step differ, so the task counts none here."""
    found = []
    for ranks in (1, 2):
        run = train(config(root, f"shares-{ranks}", ranks, (*HOOKED[:1], "train.shares=2", "data.args.augment=false")))
        found.append(fingerprint(run))
    assert found[0] == found[1]


def test_metrics_of_each_set(root: Path) -> None:
    """Each set's metrics have its name, in metrics.jsonl, for checkpoint.best_by, in the report, TensorBoard and
    evaluate. The plain form of one set has the same bits as {"val": it}."""
    whole = config(root, "sets", 1, (*HOOKED, "checkpoint.best_by=test_few_loss"))
    run = train(whole)
    epochs = [line for line in read_lines(run.metrics) if "val_loss" in line]
    sets = {"val_loss", "val_accuracy", "val_noise", "test_few_loss", "test_few_accuracy", "test_few_noise"}
    assert epochs[0].keys() >= sets | {"factor", "drawn", "val_drawn"} and len(epochs) == 2
    assert read_curves(run.metrics, []).validation.keys() == sets | {"val_drawn"}
    best = min(epochs, key=lambda line: line["test_few_loss"])
    weights = read_run(run, best=True)
    assert weights.manifest.step == best["step"]
    assert evaluate(whole, run, weights) == {name: best[name] for name in sets}
    assert b"test/few_loss" in b"".join(path.read_bytes() for path in run.tensorboard.glob("*"))
    plain = train(config(root, "plain", 1, ("optim.schedule=constant", "checkpoint.best_by=test_few_loss:max")))
    (first, *_) = (line for line in read_lines(plain.metrics) if "val_loss" in line)
    assert first["val_loss"] == epochs[0]["val_loss"]
    assert "checkpoint.best_by=test_few_loss: the epochs have train_loss, val_loss" in all_output(plain)


def test_a_hook_ends_the_run(root: Path) -> None:
    """Early stopping: the run is finished, resuming it trains nothing, and a later end continues it exactly."""
    options = ("task=tests.loops.hooked_tasks.EndsEarly", "train.epochs=4", "launch.max_failures=9")
    whole = config(root, "early", 2, options)
    ended = Attempt(whole, {"LASTSTEP_TEST_HOOK": "SIGKILL epoch 2 rank 0"})
    assert KILLED in ended.wait(), ended.output()
    run = train(whole)
    expected = all_of(undisturbed_folder(whole))
    assert all_of(run) == expected and expected["step"] == 14 and reasons(run)[-1] == "finished"
    assert "epoch 2: on_epoch_end() ends the run" in all_output(run)
    train(whole)
    assert all_of(run) == expected
    train(config(root, "early", 2, (*options, "train.epochs=3")))
    assert [line["step"] for line in read_lines(run.metrics) if "val_loss" in line] == [7, 14, 21]


def test_a_later_end_within_an_epoch(root: Path) -> None:
    """A run that ended within an epoch, and is continued, ends as one that had the later end from the start: the hook
    at the end that was cut short is undone with it."""
    short = train(config(root, "longer", 2, (*HOOKED, "train.max_steps=10")))
    assert len(read_run(short).task["now"]["losses"]) == 2
    whole = config(root, "longer", 2, (*HOOKED, "train.max_steps=12"))
    assert all_of(train(whole)) == all_of(undisturbed_folder(whole))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dev", "'dev' cannot be the name of a validation set; call it val or test, or begin its name with"),
        ("no_sets", "'' cannot be the name of a validation set"),
        ("none", "the validation set is a NoneType, without __len__ and __getitem__"),
        ("empty", "empty (52 training, 0 validation samples)"),
        ("nothing", "validation_step(): must return a dict with at least one value"),
        ("object", "state_dict(): a checkpoint cannot hold it; return plain values, tensors, lists, dicts"),
        ("weights", "on_epoch_end(): it has changed the model, which only the steps may change"),
        ("frozen", "on_epoch_end(): it has changed the model, which only the steps may change"),
        ("log", "on_epoch_end(): must do the same on every rank; different: log.more"),
        ("end", "on_epoch_end(): must do the same on every rank; different: end_run"),
        ("state", "state_dict.rank"),
        ("taken", "on_epoch_end(): run.log(val_loss=...): the epoch's line has that already"),
    ],
)
def test_what_a_hook_may_not_do(root: Path, what: str, says: str) -> None:
    """What could not be exact, or would let ranks part, is one line: never a hang, never another training."""
    wrong = ("task=tests.loops.hooked_tasks.Wrong", f"args.what={what}", "launch.max_failures=0", "train.epochs=1")
    attempt = Attempt(config(root, what, 2, wrong))
    assert 1 in attempt.wait(), attempt.output()
    assert any(line.startswith("task=") and says in line for line in attempt.output().splitlines()), attempt.output()


def test_half_a_state(root: Path) -> None:
    """A state that could be saved and not loaded would be lost at the first resume."""
    attempt = Attempt(config(root, "half", 1, ("task=tests.loops.hooked_tasks.HalfState", "launch.max_failures=0")))
    assert attempt.wait() == [1]
    assert "defines state_dict() without load_state_dict(); define both" in attempt.output()


def test_validation_measures_anything(root: Path) -> None:
    """No loss is needed. With train.sanity=false the first batch gives the names. What is not measured is said."""
    words = ("task=tests.loops.hooked_tasks.Wrong", "args.what=noise", "train.epochs=1", "train.batch_size=64")
    run = train(config(root, "anything", 2, (*words, "train.sanity=false")))
    (epoch,) = (line for line in read_lines(run.metrics) if "val_noise" in line)
    assert not epoch.keys() & {"val_loss", "val_accuracy"}
    run = train(config(root, "said", 2, words))
    assert all_output(run).count("accuracy of step() is not measured; validation_step() must return it") == 1


def all_output(run: RunDir) -> str:
    """What all ranks of a run have printed."""
    return "".join(path.read_text() for path in run.logs.glob("*.out"))
