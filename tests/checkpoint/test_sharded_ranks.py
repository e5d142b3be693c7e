"""Two real ranks with a model that FSDP2 has sharded: what they save, restore, and load from an export.

tests/checkpoint/test_sharded.py has the cases; here torch itself makes the shards, and gloo carries the bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from laststep.checkpoint.export import read_store, weights_of, weights_sha256, write_folder
from laststep.checkpoint.pack import load, tensors_of
from laststep.checkpoint.restore import NewestCheckpoint
from laststep.checkpoint.store import CheckpointStore
from laststep.loops.registered import live_state
from laststep.ranks.group import Group
from laststep.ranks.seal import Seal
from laststep.ranks.world import ShardPlace
from tests.checkpoint.test_writer import Rank, Ranks, end, info_of, nothing
from tests.support.records import a_world
from tests.support.states import local

SIZE = 2


class Trained:
    """A small sharded model and its optimiser; 7, 3 and 1 rows are not divided evenly among two ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("shard",))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        """One step, on the same batch for anyone."""
        torch.manual_seed(7)
        self.model(torch.randn(4, 5)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}

    def local(self) -> list[torch.Tensor]:
        """What this rank holds."""
        return [local(tensor).detach().clone() for tensor in tensors_of(self.state())]

    def full(self) -> dict[str, torch.Tensor]:
        """The weights, gathered from all ranks."""
        return {name: cast(DTensor, tensor).full_tensor() for name, tensor in self.model.state_dict().items()}


def saves_and_loads(rank: Rank) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", rank.keys), rank=rank.rank, world_size=SIZE)
    trained = Trained(seed=1)
    trained.step()
    rank.writer.place = ShardPlace(rank.rank, SIZE, 0, 1)
    rank.writer.start(info_of(1), {"position": {"step": 1}, **trained.state()}, nothing, 3, 0)
    end(rank.writer)
    rank.test.send((rank.outcome(), weights_sha256(trained.full())))

    restored = Trained(seed=2)
    group = Group(a_world(rank.rank, SIZE), rank.keys, torch.device("cpu"), "gloo", seal=Seal(b"test"))
    found = NewestCheckpoint(rank.store, group, rank.store.candidates(print), print, lambda count: None).finish()
    assert found is not None
    live = {"model": restored.model.state_dict(), "optimizer": live_state(restored.optimizer)}
    state = found.load(live, lambda: None)
    restored.model.load_state_dict(state["model"])
    restored.optimizer.load_state_dict(state["optimizer"])
    rank.test.send(all(map(torch.equal, trained.local(), restored.local())))
    trained.step()
    restored.step()
    rank.test.send(all(map(torch.equal, trained.local(), restored.local())))

    folder = rank.store.folder.parent / "exported"
    if rank.rank == 0:
        write_folder(folder, read_store(rank.store, "run", 1, False, False).tensors)
    dist.barrier()
    other = Trained(seed=3)
    checkpoint.load(weights := other.model.state_dict(), checkpoint_id=folder)
    other.model.load_state_dict(weights)
    rank.test.send(weights_sha256(other.full()))
    dist.destroy_process_group()
    rank.leave()


def test_a_model_that_fsdp_has_sharded(tmp_path: Path) -> None:
    """Saved by two ranks, it has the weights that both hold together; restored, it continues with the same bits; and
    torch.distributed.checkpoint loads its export into the shards of another model."""
    ranks = Ranks(tmp_path, SIZE, saves_and_loads)
    store = CheckpointStore(tmp_path / "checkpoints")
    for rank in range(SIZE):
        error, sha256 = ranks.hear(rank)
        assert error is None
        assert ranks.hear(rank), "the restored state is not the saved one"
        assert ranks.hear(rank), "a restored run takes another step than the undisturbed one"
        assert ranks.hear(rank) == sha256, "the export holds other weights"
    manifest = store.verify(1)
    assert len(manifest.sharding) == SIZE
    assert weights_sha256(weights_of(load(store.path(1), manifest))) == sha256
    assert ranks.leave() == [0] * SIZE
