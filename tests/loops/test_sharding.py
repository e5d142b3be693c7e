"""With train.sharding each rank holds its rows of the model, and the run trains as without, to the last rounding.

A wrong sum over shards still learns, only worse, and a state that is put together wrongly shows when a run resumes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laststep.config.checks import check_no_sharding, check_shards
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.data.order import Order
from laststep.records.metrics import read_lines
from tests.loops.forked_learners import Result, learn
from tests.loops.test_learner import blocks, convnet
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import check_samples, config

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


class Residual(nn.Module):
    """A repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def tied() -> nn.Module:
    """Two blocks have one weight, and so have a layer in front of the blocks and the last one."""
    first, last, blocks = nn.Linear(12, 5), nn.Linear(12, 5), [Residual() for _ in range(4)]
    last.weight, blocks[3].linear.weight = first.weight, blocks[0].linear.weight
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 12), first, nn.Tanh(), nn.Linear(5, 12), *blocks, last)


def test_tied_weights(tmp_path: Path) -> None:
    """Both places use one weight, with the sum of both gradients, and stay one in the averaged model."""
    words = ("optim.name=adamw", "optim.lr=0.001", EPS, "train.ema_decay=0.9", "launch.tasks_per_node=2")
    plain = learn(tmp_path / "plain", tied, words, 2)
    full = learn(tmp_path / "full", tied, (*words, "train.sharding=full"), 2)
    assert_close(plain, full)
    for model, prefix in ((full["state"]["model"], ""), (full["state"]["average"], "module.")):
        assert torch.equal(model[f"{prefix}2.weight"], model[f"{prefix}9.weight"])
        assert torch.equal(model[f"{prefix}5.linear.weight"], model[f"{prefix}8.linear.weight"])


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


def test_stop_a_hybrid_run(tmp_path: Path) -> None:
    """Two nodes of two ranks."""
    options = ("train.sharding=hybrid", *CARRIES_STATE, "train.accumulate=1", "train.epochs=1")
    stop_and_resume(tmp_path, 4, 2, options, "SIGTERM step 3 rank 2")


SIZES = (
    ("full", 4, 2, "SIGUSR2 step 6 rank 2"),
    ("full", 2, 1, "SIGUSR2 step 5 rank 1"),
    ("none", 1, 1, "SIGUSR2 step 3 rank 0"),
    ("hybrid", 4, 2, ""),
)


def test_other_sizes_and_shardings(tmp_path: Path) -> None:
    """Four ranks, two, one without sharding, two nodes of two, stopped in mid-epoch each time: each sample is seen in
    the step in which it would have been, and the state is carried from one sharding to the next."""
    calm = train(recorded(tmp_path, "calm", "none", 1), {"LASTSTEP_TEST_NOTES": str(tmp_path / "calm.jsonl")})
    for sharding, ranks, nodes, place in SIZES:
        environment = {"LASTSTEP_TEST_NOTES": str(tmp_path / "notes.jsonl"), "LASTSTEP_TEST_SIGNAL": place}
        attempt = Attempt(recorded(tmp_path, "resized", sharding, ranks), environment, nodes)
        codes = attempt.wait()
        assert len(set(codes)) == 1 and (codes[0] > 128) == bool(place), attempt.output()
        changes = ranks == 1 or sharding == "hybrid"
        assert ("resuming with sharding" in attempt.output()) == changes, "a warning that the last bits may differ"
    order = Order(110, 24, seed=0)
    check_samples(tmp_path / "notes.jsonl", order, 4 * order.steps_per_epoch)
    one, other = fingerprint(attempt.run)["metrics"], fingerprint(calm)["metrics"]
    assert one == [{key: pytest.approx(x, rel=1e-4) for key, x in line.items()} for line in other]


def recorded(root: Path, name: str, sharding: str, ranks: int) -> Config:
    """A run that notes its samples, with an optimiser that has a state."""
    words = [
        "task=tests.support.tasks.RecordedLinear", "device=cpu", "data.name=fake", "data.args.samples=110",
        "data.args.classes=3", "data.args.image_size=8", "train.batch_size=24", "train.epochs=4", "optim.name=adamw",
        "optim.lr=0.001", EPS, "train.ema_decay=0.5", f"train.sharding={sharding}", f"launch.root={root}",
        f"launch.name={name}", f"launch.tasks_per_node={ranks}",
    ]  # fmt: skip
    return Config.load(None, words)


def test_starts_from_weights(tmp_path: Path) -> None:
    """Rank 0 reads them, and each rank takes its rows: the first loss is that of a run without sharding."""
    trained = train(config(tmp_path, "trained", 1, ("train.max_steps=2",)))
    options = (f"model.weights={trained.path}", "train.max_steps=1", "train.ema_decay=0.5")
    runs = [train(config(tmp_path, s, 2, (*options, f"train.sharding={s}"))) for s in ("none", "full")]
    one, other = (read_lines(run.metrics)[0]["loss"] for run in runs)
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train.sharding=full train.shares=2 train.accumulate=4 launch.tasks_per_node=2",
            r"train.accumulate=4: with train.sharding=full and train.shares=2 each share is one micro-batch",
        ),
        ("train.sharding=full train.channels_last=true", "train.channels_last=true: cannot be combined with"),
        ("train.sharding=hybrid optim.name=muon", "optim.name=muon: updates a matrix as a whole"),
        ("train.sharding=half", "train.sharding=half: "),
    ],
)
def test_keys_that_contradict_each_other(words: str, said: str) -> None:
    """Before anything is submitted, by words alone."""
    with pytest.raises(ConfigError, match=said):
        Config.load(None, words.split())


@pytest.mark.parametrize(
    ("sharding", "nodes", "each", "hosts", "said"),
    [
        ("full", 1, 1, ("a",), "this run has one rank"),
        ("hybrid", 2, 3, tuple("aaabbb"), "with train.shares=12 the ranks of a node must be 2, 4, 8 ..., not 3; use"),
        ("hybrid", 4, 1, tuple("abcd"), "cuts the state over the ranks of a node, and a node has one"),
        ("hybrid", 1, 4, ("a",) * 4, "keeps a copy of the state on each node, and this run has one node"),
        ("hybrid", 2, 2, tuple("abab"), "numbered node by node; these are on a, b, a, b"),
        ("hybrid", 2, 2, tuple("aaab"), "numbered node by node"),
    ],
)
def test_ranks_that_cannot_share_a_state(sharding: str, nodes: int, each: int, hosts: Sequence[str], said: str) -> None:
    """The ranks would hang, or hold a state that no node has as a whole, or add gradients in another order."""
    shares = 12 if "shares" in said else None
    with pytest.raises(ConfigError, match=said):
        check_shards(Train(sharding=sharding, shares=shares), nodes, each, hosts)


def test_a_custom_loop_shards_by_itself() -> None:
    """It would silently train with a copy on each rank."""
    with pytest.raises(ConfigError, match=r"train.sharding=full: examples.custom_loop.main is a custom loop"):
        check_no_sharding(Config.load(None, ["task=examples.custom_loop.main", "train.sharding=full"]))


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
