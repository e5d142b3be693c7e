"""The digest of the state in metrics.jsonl: the same for any number of ranks and any sharding; no change escapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.loops import digest
from laststep.loops.digest import BLOCK, StateDigest
from laststep.ranks.world import ShardPlace
from laststep.records.metrics import read_lines
from tests.support.ranks import train
from tests.support.runs import config

WHOLE = ShardPlace(0, 1, 0, 1)
CPU = torch.device("cpu")


def number(state: object) -> int:
    """The digest of a state that this process holds."""
    found = StateDigest(CPU).of(state, WHOLE)
    assert found is not None
    return int(found)


def swap(tensor: torch.Tensor) -> None:
    """Two elements change places."""
    rows = tensor.view(-1)
    rows[3], rows[-5] = rows[-5].clone(), rows[3].clone()


def equal_pair(tensor: torch.Tensor) -> None:
    """The same bit flips in two elements, which an exclusive or would not show."""
    bits = tensor.view(-1).view(torch.int32)
    bits[2] ^= 1 << 9
    bits[-2] ^= 1 << 9


@pytest.mark.parametrize("elements", [40, BLOCK + 77, 65 * BLOCK + 5])
@pytest.mark.parametrize("change", [swap, equal_pair])
def test_a_change_is_seen(elements: int, change: Callable[[torch.Tensor], None]) -> None:
    """If a swap, or two equal flips, left the digest as it was, a run that went wrong would count as the same."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    state = {"model": {"a": tensor, "b": torch.ones(3)}, "step": torch.tensor(4.0)}
    before = number(state)
    assert number(state) == before
    change(tensor)
    assert number(state) != before


def test_names_count() -> None:
    """Two tensors that change places are another state."""
    first, second = torch.arange(5.0), torch.arange(5.0) + 1
    assert number({"a": first, "b": second}) != number({"a": second, "b": first})


def test_read_back() -> None:
    """All 64 bits arrive: they travel as two float64."""
    for value in (0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF):
        scalars = digest.as_scalars(torch.tensor(value))
        found, rest = digest.take({"loss": 1.0, **{name: float(one) for name, one in scalars.items()}})
        assert found == f"{value & (1 << 64) - 1:016x}" and rest == {"loss": 1.0}


def digests(root: Path, name: str, ranks: int, *options: str) -> tuple[list[str], str]:
    """Those of a small run, which notes one every two steps; and that of its last checkpoint, put together again."""
    words = ("train.digest_every=2", "train.max_steps=4", "model.args.width=8", *options)
    small: Config = config(root, name, ranks, words)
    run = train(small)
    lines = [line for line in read_lines(run.metrics) if "digest" in line]
    assert [line["step"] for line in lines] == [2, 4]
    store = CheckpointStore(run.checkpoints)
    saved = load(store.path(4), store.manifest(4))
    return [line["digest"] for line in lines], f"{number(saved) & (1 << 64) - 1:016x}"


def test_any_number_of_ranks_and_any_sharding(root: Path) -> None:
    """The digest is that of the whole state, whichever rank holds which part, or a replay on fewer ranks could not be
    compared. A sharded optimiser may round otherwise, so that run is compared with its own checkpoint."""
    shares = ("train.shares=2",)
    one = digests(root, "one", 1, *shares)
    assert digests(root, "two", 2, *shares) == one
    for found, saved in (one, digests(root, "sharded", 2, *shares, "train.sharding=full")):
        assert found[-1] == saved and len(set(found)) == 2
