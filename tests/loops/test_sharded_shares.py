"""With train.shares a sharded run ends with the same bits on any number of ranks, and under full as under hybrid.

A difference in the last bit means that a sum depends on how the ranks cut it: a resume on fewer nodes would be another
experiment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.loops.sharded import BlockSum, ExactSquare, row_squares
from laststep.loops.shares import in_order, shares_of, team_of
from laststep.ranks.group import tree_sum
from laststep.ranks.world import shard_rows
from laststep.records.metrics import read_lines
from tests.loops.forked_learners import Result, learn
from tests.loops.test_learner import blocks
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.records import a_world
from tests.support.runs import SMALL
from tests.support.tasks import transformer

EVERYTHING = (
    *("train.ema_decay=0.9", "train.activation_checkpointing=true", "optim.clip_norm=0.5", "optim.name=adamw"),
    *("optim.lr=0.001", "optim.warmup_steps=3"),
)


def test_two_ranks_four_and_two_nodes(tmp_path: Path) -> None:
    """Four ranks, two that compute two shares each, and two nodes with a copy each: the same weights, averages, state
    of the optimiser, losses, norms and validation. Some tensors have fewer rows than ranks."""
    four, two, hybrid = (
        learned(tmp_path, blocks, sharding, size, nodes, *EVERYTHING)
        for sharding, size, nodes in (("full", 4, 1), ("full", 2, 1), ("hybrid", 4, 2))
    )
    assert_same(two, four)
    assert_same(hybrid, four)


def test_half_precision(tmp_path: Path) -> None:
    """The weights are gathered in fp16, and the gradients are added in fp32, scaled."""
    options = ("train.precision=fp16", "train.nonfinite=skip", "optim.clip_norm=0.1")
    four, two = (learned(tmp_path, transformer, "full", size, 1, *options) for size in (4, 2))
    assert_same(two, four)


def test_as_without_sharding(tmp_path: Path) -> None:
    """One rank that has all of the model computes the same bits, dropout and all."""
    alone, sharded = (
        learned(tmp_path, transformer, sharding, size, 1, "train.ema_decay=0.9", "train.activation_checkpointing=true")
        for sharding, size in (("none", 1), ("full", 2))
    )
    assert_same(sharded, alone)


def learned(root: Path, build: Callable[[], nn.Module], sharding: str, size: int, nodes: int, *options: str) -> Result:
    """Four steps of twelve images in four shares."""
    words = (*options, "train.shares=4", "train.batch_size=12", f"train.sharding={sharding}")
    return learn(root / f"{sharding}-{size}", build, (*words, f"launch.tasks_per_node={size}"), size, nodes)


def assert_same(one: Result, other: Result) -> None:
    """Bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def config(root: Path, name: str, sharding: str, size: int) -> Config:
    """A run in four shares. 52 samples in batches of 16: the last of four batches an epoch has one sample a share."""
    words = [
        *("task=tests.support.tasks.SignalledTransformer", "data.args.classes=16", "train.batch_size=16"),
        *("train.shares=4", "train.ema_decay=0.9", "optim.name=adamw", "optim.lr=0.001", "train.nonfinite=skip"),
        *(f"launch.root={root}", f"launch.name={name}", f"train.sharding={sharding}", f"launch.tasks_per_node={size}"),
    ]
    return Config.load(None, [*SMALL, *words])


def test_sizes_and_shardings_that_change(tmp_path: Path) -> None:
    """Stopped on four ranks, on two, on one without sharding, in a step or in a validation, and ended by two nodes of
    two: like a run that one rank has trained undisturbed."""
    expected = fingerprint(train(config(tmp_path, "calm", "none", 1)))
    for sharding, size, nodes, place in (
        ("full", 4, 1, "SIGUSR2 step 3 rank 2"),
        ("full", 2, 1, "SIGTERM step 1 rank 1"),
        ("none", 1, 1, "SIGUSR2 validation 1 rank 0"),
        ("hybrid", 4, 2, ""),
    ):
        attempt = Attempt(config(tmp_path, "resized", sharding, size), {"LASTSTEP_TEST_SIGNAL": place}, nodes)
        codes = attempt.wait()
        assert len(set(codes)) == 1 and (codes[0] > 128) == bool(place), attempt.output()
    records = read_lines(attempt.run.attempts)
    assert [(record["world_size"], record["lost_steps"]) for record in records] == [(4, 0), (2, 0), (1, 0), (4, 0)]
    assert fingerprint(attempt.run) == expected


# --- the arithmetic, without ranks


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_order_of_a_sum(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that deal out their shares in turns add in the tree of one rank that computes all of them."""
    gradients = torch.randn(shares, 1000, generator=torch.Generator().manual_seed(3))
    expected = tree_sum(gradients.clone())
    for layout, size, local in layouts(shares):
        worlds = [a_world(rank, size, local_size=local, nodes=size // local) for rank in range(size)]
        dealt = torch.tensor([list(shares_of(layout, world)) for world in worlds])
        assert in_order(dealt, layout, worlds[0]).tolist() == list(range(shares)) and dealt[0, 0] == 0
        team = team_of(layout, worlds[0])
        nodes = torch.stack([add(gradients[node], team, monkeypatch) for node in dealt.split(local)])
        assert torch.equal(tree_sum(nodes), expected), f"{size} ranks, {layout.sharding}"


def add(gradients: Tensor, team: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What FSDP2 gets of the gradients of all ranks that shard a model, each in several turns."""
    ranks, turns, _ = gradients.shape
    block, output = BlockSum(team), torch.empty(1000)
    for turn in range(turns):
        chunks = gradients[:, turn].flatten()
        monkeypatch.setattr(dist, "all_to_all_single", lambda received, *_, chunks=chunks, **__: received.copy_(chunks))
        block.begin(turn, ends=turn == turns - 1)
        block(output, torch.empty(ranks * 1000), None, None)
    assert not block.waits
    return output


def test_a_parameter_without_a_gradient_in_some_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum would lack some shares, or mix two parameters up. It ends the run."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: None)
    block = BlockSum(team=2)
    block.begin(0, ends=False)
    block(torch.empty(5), torch.empty(10), None, None)
    block.begin(1, ends=True)
    assert block.waits, "in the first share alone"
    with pytest.raises(ConfigError, match="has a gradient in some shares only"):
        block(torch.empty(4), torch.empty(8), None, None)
    with pytest.raises(ConfigError, match="has a gradient in some shares only"):
        block(torch.empty(5), torch.empty(10), None, None)


def layouts(shares: int) -> list[tuple[Train, int, int]]:
    """All ways to have so many shares computed: the settings, the ranks, and the ranks of a node."""
    sizes = [shares >> turns for turns in range(10) if shares % (1 << turns) == 0]
    full = [(Train(shares=shares, sharding="full"), size, size) for size in sizes]
    hybrid = [
        (Train(shares=shares, sharding="hybrid"), size, local)
        for size, local in itertools.product(sizes, (2, 4, 8))
        if size % local == 0 and size > local
    ]
    return full + hybrid


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_the_norm_does_not_depend_on_the_cut(scale: float) -> None:
    """Rows of very different sizes, some ranks with none or with zeros alone, in any order of the ranks."""
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(shape, generator=generator) * scale for shape in ((37, 5), (3,), (64, 7, 3), (1, 9))]
    gradients[0] *= torch.logspace(-6, 6, 37)[:, None]
    gradients[2][8:] = 0
    exact = ExactSquare(sum(map(len, gradients)), torch.device("cpu"))
    expected = exact.total(exact.of(gradients)[None])
    assert expected.item() == pytest.approx(sum(g.double().square().sum().item() for g in gradients), rel=1e-6)
    assert exact.total(exact.of([])[None]).item() == 0
    for ranks in (2, 3, 4, 7, 16):
        parts = [[g[slice(*shard_rows(len(g), rank, ranks))] for g in gradients] for rank in range(ranks)]
        found = torch.stack([exact.of([rows for rows in part if rows.numel()]) for part in parts])
        assert torch.equal(exact.total(found.flip(0)), expected), f"{ranks} ranks"


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_the_norm_of_a_gradient_that_is_not_finite(value: str) -> None:
    """A step with such a gradient is skipped, or ends the run."""
    exact = ExactSquare(8, torch.device("cpu"))
    good, bad = torch.ones(4, 3), torch.ones(4, 3)
    bad[2, 1] = float(value)
    assert not exact.total(torch.stack([exact.of([good]), exact.of([bad])])).isfinite()


def test_squares_of_a_row() -> None:
    """Their sum is that of the row alone, whatever the other rows are, and of any length."""
    for length in (1, 2, 3, 7, 64, 100):
        rows = torch.randn(9, length, generator=torch.Generator().manual_seed(length))
        found = row_squares(rows)
        assert torch.equal(found, torch.cat([row_squares(row[None]) for row in rows]))
        torch.testing.assert_close(found, rows.square().sum(1))
