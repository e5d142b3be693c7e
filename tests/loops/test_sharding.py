"""With train.sharding each rank holds its rows of the model, and the run trains as without, to the last rounding.

A wrong sum over shards still learns, only worse, and a state that is put together wrongly shows when a run resumes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.loops.test_learner import blocks, convnet
from tests.support.forked_learners import Result, learn
from tests.support.ranks import Attempt, fingerprint
from tests.support.runs import config
from trainer.records.metrics import read_lines

EVERYTHING = ("train.ema_decay=0.9", "train.accumulate=2", "optim.clip_norm=0.5", "train.activation_checkpointing=true")

CARRIES_STATE = ("train.ema_decay=0.9", "train.accumulate=2", "optim.clip_norm=1.0", "optim.warmup_steps=3")
EPS = "optim.args.eps=0.01"  # else the sign of a gradient of 1e-9 decides how a weight moves


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="sgd"),
        pytest.param((*EVERYTHING, "optim.name=adamw", "optim.lr=0.001", EPS), id="everything"),
        pytest.param(("train.precision=bf16", "optim.name=rmsprop", "optim.lr=0.001", EPS), id="bf16"),
        pytest.param(("train.precision=fp16", "train.nonfinite=skip", "optim.clip_norm=0.5"), id="fp16"),
    ],
)
def test_trains_as_without_sharding(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The same losses, norms, weights, averages and state of the optimiser, up to the order of sums, though no rank has
    a whole gradient. One block of the model is used twice."""
    words = (*options, "train.batch_size=12", "launch.tasks_per_node=2")
    plain = learn(tmp_path / "plain", blocks, words, 2)
    full = learn(tmp_path / "full", blocks, (*words, "train.sharding=full"), 2)
    assert_close(plain, full)


def test_hybrid_trains_as_without_sharding(tmp_path: Path) -> None:
    """Two nodes hold a copy each, cut over two ranks; some tensors have fewer rows than ranks. The norm of the gradient
    must not count both copies."""
    words = (*EVERYTHING, "train.accumulate=1", "train.batch_size=12", "launch.tasks_per_node=4")
    plain = learn(tmp_path / "plain", convnet, words, 4)
    for sharding, nodes in (("hybrid", 2), ("full", 1)):
        sharded = learn(tmp_path / sharding, convnet, (*words, f"train.sharding={sharding}"), 4, nodes)
        assert_close(plain, sharded)


def assert_close(one: Result, other: Result) -> None:
    """Up to rounding."""
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        pytest.param("SIGUSR2 step 4 rank 1", (*CARRIES_STATE, "optim.name=adamw", "optim.lr=0.001"), id="in-a-step"),
        pytest.param("SIGTERM validation 3 rank 0", ("train.precision=fp16",), id="in-a-validation"),
    ],
)
def test_stop_anywhere(tmp_path: Path, place: str, options: tuple[str, ...]) -> None:
    """A run that was stopped ends with the same bits as one that was not. The last batches are short: a rank without a
    sample must gather weights all the same."""
    stop_and_resume(tmp_path, 2, 1, ("train.sharding=full", *options), place)


def test_compiled(tmp_path: Path) -> None:
    """Each block is compiled by itself."""
    options = ("train.sharding=full", "train.compile=true", "data.args.samples=32", "train.epochs=1")
    stop_and_resume(tmp_path, 2, 1, options, "SIGTERM step 3 rank 1")


def stop_and_resume(root: Path, ranks: int, nodes: int, options: tuple[str, ...], place: str) -> None:
    """Stop a run at `place`, see tests.support.tasks.Signalled; compare it with one that is not stopped."""
    calm = Attempt(config(root, "calm", ranks, options), nodes=nodes)
    assert calm.wait() == [0] * ranks, calm.output()
    stopped = Attempt(config(root, "stopped", ranks, options), {"LASTSTEP_TEST_SIGNAL": place}, nodes)
    number = signal.Signals[place.split()[0]]
    assert stopped.wait() == [128 + number] * ranks, f"a stop, on every rank:\n{stopped.output()}"
    resumed = Attempt(config(root, "stopped", ranks, options), nodes=nodes)
    assert resumed.wait() == [0] * ranks, resumed.output()
    assert "WARNING" not in calm.output() + stopped.output() + resumed.output()
    assert [line["lost_steps"] for line in read_lines(resumed.run.attempts)] == [0, 0]
    assert fingerprint(resumed.run) == fingerprint(calm.run)
