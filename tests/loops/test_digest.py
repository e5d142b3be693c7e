"""The digest of the state in metrics.jsonl: the same for any number of ranks and any sharding; no change escapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.loops import digest
from laststep.loops.digest import BLOCK, StateDigest
from laststep.ranks.world import ShardPlace
from laststep.records.metrics import read_lines
from tests.support.loops import a_loop, settings_of
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


class Gpu(TorchDispatchMode):
    """A GPU whose tensors have no contents. An operator that would make the CPU wait for it fails the test: one that
    asks for a value, or copies between the two."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in given} | {torch.device(kwargs.get("device") or "cpu").type}
        if "cuda" not in devices:
            with _disable_current_modes():
                return func(*args, **kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is asked for"
        if func is torch.ops.aten.copy_.default or func is torch.ops.aten._to_copy.default:
            where = {each.device.type for each in given} | {str(kwargs.get("device") or "cuda")[:4]}
            assert where == {"cuda"}, "the CPU and the GPU copy from each other"
        return func(*args, **kwargs)


def test_the_cpu_waits_for_no_gpu() -> None:
    """Else each digest would leave the GPU without work until Python has prepared the next step."""
    gpu = torch.device("cuda", 0)
    with FakeTensorMode(), Gpu():
        large = torch.zeros(65 * BLOCK + 5, device=gpu)
        state = {"model": {"a": large, "b": torch.zeros(40, dtype=torch.bfloat16, device=gpu)}}
        found = StateDigest(gpu).of(state, WHOLE)
        assert isinstance(found, FakeTensor) and found.device == gpu
        for waits in (large[0].item, large.cpu, lambda: large.__setitem__(0, 1)):
            with pytest.raises(AssertionError):
                waits()


def scaled(run: Run) -> None:
    """A loop with a gradient scaler."""
    x = torch.arange(60.0).view(20, 3) / 60
    loader, model = run.loader(TensorDataset(x), 4), nn.Linear(3, 1)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    run.restore(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.epochs(2):
        for (inputs,) in run.steps(loader):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_no_scaler_is_asked_for_its_scale(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to wait for the device."""
    asked = torch.amp.GradScaler.state_dict
    times = {"1": 0, "null": 0}
    for every in times:

        def counted(scaler: torch.amp.GradScaler, every: str = every) -> dict[str, Any]:
            times[every] += 1
            return asked(scaler)

        monkeypatch.setattr(torch.amp.GradScaler, "state_dict", counted)
        settings = settings_of(tmp_path, every, f"train.digest_every={every}", "train.precision=fp16")
        with contextlib.ExitStack() as closing, a_loop(kind, settings, closing, scaled) as engine:
            engine.run()
    assert times["1"] == times["null"] > 0
