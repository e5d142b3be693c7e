"""A sharded model starts from the very weights of one that is not sharded, though only rank 0 ever holds all of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from laststep.config.config import Config
from laststep.data.order import seed_generators, seed_of
from laststep.loops.learner import prepare_model
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace
from laststep.tasks.decoder import Decoder
from laststep.tasks.sizes import size_of
from tests.loops.test_learner import blocks
from tests.support.images import Images
from tests.support.project import DEADLINE_S
from tests.support.ranks import forked
from tests.support.records import a_world

CPU = torch.device("cpu")


def decoder() -> nn.Module:
    return Decoder(
        size_of("tiny-1m", {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "tied": True}, 64)
    )


def convnext() -> nn.Module:
    """With the parts of a whole one, whose random numbers would take most of the test's time."""
    return ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10)


def odd() -> nn.Module:
    """Buffers that are computed, given numbers, layers whose initialisation is computed, frozen and shared parts."""
    first, second = nn.Linear(6, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second, nn.Embedding(5, 4, padding_idx=1), nn.LSTM(4, 4), first)
    places, angles = torch.arange(10)[:, None], torch.exp(torch.arange(0, 8, 2) * -0.3)
    table = torch.zeros(10, 8)
    table[:, 0::2], table[:, 1::2] = torch.sin(places * angles), torch.cos(places * angles)
    model.register_buffer("table", table, persistent=False)
    model.register_buffer("mean", torch.tensor([1.0, 2.0]))
    model.register_buffer("count", torch.tensor(3))
    model.scale = nn.Parameter(torch.ones(1) * 0.07)
    nn.init.orthogonal_(first.weight)
    nn.init.trunc_normal_(second.weight, std=[each.item() for each in torch.linspace(0.1, 1, 3)][-1])
    second.requires_grad_(False).bias.data.mul_(2)
    return model


def seeds() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 3)


def reads() -> nn.Module:
    """Cannot be built without values."""
    return nn.Linear(3, 3) if float(torch.rand(1)) < 2 else nn.Linear(4, 4)


@pytest.mark.parametrize("build", [decoder, convnext, odd, blocks, seeds, reads])
def test_the_same_bits(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    """Of every parameter and every buffer of the model and of its average, whatever initialises them: else a run could
    not be compared with one on a single GPU."""
    ranks = [forked(_rank, tmp_path, build, rank) for rank in range(2)]
    for rank in ranks:
        rank.join(DEADLINE_S)
        assert rank.exitcode == 0, "\n".join(path.read_text() for path in tmp_path.glob("error*"))
    seed_generators(seed_of("model", Config.load(None, []).seed), CPU)
    model = build()
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    for found in torch.load(tmp_path / "result"):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


def _rank(folder: Path, build: Callable[[], nn.Module], rank: int) -> None:
    torch.set_num_threads(1)
    group = Group(a_world(rank, 2), dist.HashStore(), CPU, "gloo")
    held = _without_memory(build) if rank else build
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
        config = Config.load(None, ["device=cpu", "task=mine.Mine", "train.sharding=full", "train.ema_decay=0.9"])
        seed_generators(seed_of("model", config.seed), CPU)
        model, average = prepare_model(Images(config, held), config, group, ShardPlace(rank, 2, 0, 1))
        assert average is not None
        found = [_full(model), _full(average.module)]
        if rank == 0:
            torch.save(found, folder / "result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def _full(model: Any) -> dict[str, Tensor]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for name, t in tensors}


def _without_memory(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """`build`, which only a model that reads its values may call with memory."""

    def checked() -> nn.Module:
        model = build()
        assert build is reads or all(tensor.is_meta for tensor in model.parameters()), "this rank holds all of it"
        return model

    return checked
