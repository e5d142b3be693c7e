"""Checkpoints of sharded states: the bytes are those of the full tensors, whoever wrote them and whoever reads them.

One process pretends to be each rank in turn, see `tests.support.states`; the ranks that restore are threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from laststep.checkpoint import files, restore
from laststep.checkpoint.export import weights_of, weights_sha256
from laststep.checkpoint.files import CheckpointError, Stripe
from laststep.checkpoint.frozen import ChunkBuffers, FrozenState
from laststep.checkpoint.pack import Packed, aligned, load, map_tensors, tensors_of
from laststep.checkpoint.restore import shares
from laststep.checkpoint.shards import Like, shard_count
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointWriter
from laststep.loops.registered import live_state
from laststep.ranks.world import ShardPlace, shard_rows
from tests.checkpoint.test_restore import Rank, ThreadGroup, flip, together
from tests.checkpoint.test_writer import info_of, nothing, same
from tests.support.project import DEADLINE_S
from tests.support.states import is_cut, local, places, pretended_rank, sharded, sharded_state

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def state_of(step: int) -> dict[str, Any]:
    """A state like that of a training: rows that no number of ranks divides, fewer rows than ranks, none, scalars."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{rows}": torch.randn(rows, 7, generator=generator) for rows in (1, 2, 3, 8, 37, 0)}
    weights["half"] = torch.randn(11, 3, 5, generator=generator).bfloat16()
    weights["bias"] = torch.randn(10, generator=generator)
    weights["odd"] = torch.randn(13, generator=generator)  # not sharded
    images = torch.randn(4, 3, 5, 5, generator=generator).contiguous(memory_format=torch.channels_last)
    averages = {number: {"step": torch.tensor(3.0), "exp_avg": w * 2} for number, w in enumerate(weights.values())}
    return {
        "position": {"step": step, "samples": 8 * step},
        "model": {**weights, "images": images, "batches": torch.tensor(step)},
        "optimizer": {"state": averages, "param_groups": [{"lr": 0.1, "params": list(averages)}]},
    }


def save(store: CheckpointStore, state: dict[str, Any], shards: int, replicas: int = 1) -> None:
    """Commit a checkpoint that each rank has written its part of."""
    keys, size = dist.HashStore(), shards * replicas
    writers = []
    for rank, place in enumerate(places(shards, replicas)):
        writers.append(CheckpointWriter(store, keys, rank, size, CPU, place))
        with pretended_rank(place) as mesh:
            part = sharded_state(state, place, mesh) if shards > 1 else state
            writers[-1].start(info_of(state["position"]["step"]), part, nothing, 9, 0)
    for writer in writers:
        assert writer.wait(DEADLINE_S) and writer.error is None, writer.error
        writer.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    monkeypatch.setattr(files, "STRIPE_BYTES", 512)  # so that replicas share their shard
    monkeypatch.setattr(restore, "PIECE_BYTES", 1024)
    return CheckpointStore(tmp_path / "checkpoints")


SIZES = [(2, 1), (3, 1), (4, 1), (2, 2), (5, 1)]


@pytest.mark.parametrize(("shards", "replicas"), SIZES)
def test_one_reader_gets_the_full_state(shards: int, replicas: int, store: CheckpointStore) -> None:
    """`verify`, `export` and `evaluate` read alone: for them it makes no difference how the state was sharded."""
    state = state_of(5)
    save(store, state, shards, replicas)
    manifest = store.verify(5)
    assert len(manifest.sharding) == shards and manifest.world_size == shards * replicas
    found = load(store.path(5), manifest)
    assert same(found, state)
    assert weights_sha256(weights_of(found)) == weights_sha256(weights_of(state))
    part = load(store.path(5), manifest, lambda layout: layout.structure["model"])
    assert same(part, state["model"])


def test_replicas_share_the_work(store: CheckpointStore) -> None:
    """The nodes of a hybrid run hold the same shards: each writes some of the bytes, and none is written twice."""
    state = state_of(5)
    save(store, state, 2, 2)
    manifest = store.manifest(5)
    assert manifest.sharding == [2, 2]
    one = Packed(state).bytes
    assert one <= sum(manifest.files[name]["bytes"] for name in manifest.shards) < one + 4096


def test_replicated_checkpoints_stay_as_they_are(store: CheckpointStore) -> None:
    """Older versions read them, byte for byte."""
    save(store, state_of(5), 1, 2)
    text = (store.path(5) / "manifest.json").read_text()
    assert "sharding" not in text and json.loads(text)["format"] == 2


@pytest.mark.parametrize("saved", [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("now", [(1, 1), (1, 3), (2, 1), (4, 1), (2, 2)])
def test_any_sharding_to_any_other(saved: tuple[int, int], now: tuple[int, int], store: CheckpointStore) -> None:
    """A run that was sharded over four ranks continues on two, on one, and on four again."""
    state = state_of(5)
    save(store, state, *saved)
    held = [held_by(place, state) for place in places(*now)]
    lives = [live_at(place) for place in places(*now)]

    def restores(rank: Rank) -> tuple[Any, int]:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        live = lives[rank.group.world.rank]
        found = checkpoint.load(live, rank.advance)
        weight, filled = live["model"]["w37"], found["model"]["w37"]
        assert local(filled).data_ptr() == local(weight).data_ptr(), "no copy of the weights was made"
        return {"position": checkpoint.position, **found}, rank.progress

    restored = together(len(held), restores)
    for (found, _), expected in zip(restored, held):
        assert same(map_tensors(found, local), map_tensors(expected, local))
        average = found["optimizer"]["state"][4]["exp_avg"]
        assert type(average) is type(found["model"]["w37"]), "the average is sharded like its parameter"
    assert len({progress for _, progress in restored}) == 1, "all ranks that have loaded are level"


def held_by(place: ShardPlace, state: dict[str, Any]) -> dict[str, Any]:
    """What the rank at this place holds of a state."""
    if place.shards == 1:
        return state
    with pretended_rank(place) as mesh:
        found: dict[str, Any] = sharded_state(state, place, mesh)
        return found


def live_at(place: ShardPlace) -> dict[str, Any]:
    """What the rank at this place holds before it restores: weights of its own, and an optimiser without averages."""
    live = held_by(place, map_tensors(state_of(5), torch.zeros_like))
    cut = {number: Like(w) for number, w in enumerate(live["model"].values()) if shard_count(w)}
    live["optimizer"] = {"state": cut, "param_groups": []}
    return live


def frozen(store: CheckpointStore, place: ShardPlace, state: Any, **held: Any) -> FrozenState:
    """What the rank at this place saves after a fault."""
    buffer = torch.empty(300, dtype=torch.uint8)
    size = place.shards * place.replicas
    return FrozenState(store, info_of(5), state, size, nothing, ChunkBuffers(buffer), lambda: True, place, **held)


def copied(place: ShardPlace, state: dict[str, Any]) -> tuple[memoryview, Any]:
    """A copy of this place's shard in host memory, and the structure that belongs to it."""
    packed = Packed(held_by(place, state), place)
    copy = torch.empty(packed.bytes, dtype=torch.uint8)
    packed.copy(0, packed.bytes, copy)
    return copy.numpy().data, packed.structure


def test_survivors_of_a_hybrid_run(store: CheckpointStore) -> None:
    """A node is gone. Of each shard the replicas that are left share the work, and any of them can commit."""
    state = state_of(5)
    survivors = [frozen(store, place, held_by(place, state)) for place in places(2, 3) if place.replica != 1]
    parts = {}
    for shard in (0, 1):
        for replica in (0, 1):
            name = f"part {shard} {replica}"
            parts[name] = survivors[2 * replica + shard].write_part("tag", shard, Stripe(replica, 2), name, nothing)
    survivors[3].commit("tag", parts)
    manifest = store.verify(5)
    assert manifest.sharding == [2, 2] and manifest.world_size == 6
    assert same(load(store.path(5), manifest), state)


def test_copies_are_as_good_as_the_state(store: CheckpointStore) -> None:
    """A rank is gone, and another one is a step ahead: what is saved is their shards as copied into host memory."""
    state, ranks = state_of(5), places(3)
    own, (gone, _), (older, structure) = held_by(ranks[0], state), copied(ranks[1], state), copied(ranks[2], state)
    first = frozen(store, ranks[0], own)
    second = frozen(store, ranks[2], None, copies={1: gone, 2: older}, structure=structure)
    assert (second.bytes, second.bytes_of(1)) == (len(older), len(gone))
    parts = {"a": first.write_part("tag", 0, Stripe(0, 1), "a", nothing)}
    parts["b"] = second.write_part("tag", 1, Stripe(0, 1), "b", nothing)
    for number in range(4):  # one more than a file for each shard
        name = f"c{number}"
        parts[name] = second.write_part("tag", 2, Stripe(number, 4), name, nothing)
    second.commit("tag", parts)
    assert store.verify(5).sharding == [1, 1, 4]
    assert same(load(store.path(5), store.verify(5)), state)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_not_without_every_shard(lost: str, store: CheckpointStore) -> None:
    """A checkpoint without some of its bytes would be found damaged only by the next attempt."""
    state, ranks = state_of(5), places(2)
    survivors = [frozen(store, place, held_by(place, state)) for place in ranks]
    names = {"a": survivors[0].write_part("tag", 0, Stripe(0, 1), "a", nothing)}
    names["b"] = survivors[1].write_part("tag", 1, Stripe(0, 1), "b", nothing)
    del names[lost]
    with pytest.raises(CheckpointError, match="its parts are not the whole state"):
        survivors[0].commit("tag", names)
    assert store.steps() == []


@pytest.mark.parametrize("name", ["shard_0000-of-0003.bin", "shard_0002-of-0003.bin", "structure.pt"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_damage(damage: str, name: str, store: CheckpointStore) -> None:
    """One file of one rank is damaged: all ranks take the same older checkpoint, and change nothing before."""
    save(store, state_of(3), 3)
    save(store, state_of(5), 3)
    path = store.path(5) / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-64])
    else:
        flip(store, 5, name)
    lives = [live_at(place) for place in places(3)]

    def restores(rank: Rank) -> tuple[int, Any, list[str]]:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        found = checkpoint.load(lives[rank.group.world.rank], rank.advance)
        return checkpoint.manifest.step, found["model"], rank.warnings

    for (step, model, said), place in zip(together(3, restores), places(3)):
        assert step == 3 and same(map_tensors(model, local), map_tensors(held_by(place, state_of(3))["model"], local))
        assert len(said) == (place.shard == 0) and all(f"skipped step_000000005: {name}" in line for line in said)


@pytest.mark.parametrize(("now", "part"), [((4, 1), 0.0), ((2, 1), 0.3), ((8, 1), 1.0), ((2, 2), 1.0)])
def test_what_is_sent(
    now: tuple[int, int], part: float, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart after a fault reads each shard where it is needed, and sends only what every rank has whole: to send it
    all would take longer than to read it. On half as many ranks, little else is sent."""
    sent: list[int] = []
    real = ThreadGroup.start_broadcast

    def counted(self: ThreadGroup, tensor: Tensor, source: int) -> Callable[[], object]:
        sent.append(tensor.numel() if self.world.rank == source else 0)
        return real(self, tensor, source)

    state = state_of(5)
    save(store, state, 4)
    manifest = store.manifest(5)
    lives = [live_at(place) for place in places(*now)]
    monkeypatch.setattr(ThreadGroup, "start_broadcast", counted)

    def restores(rank: Rank) -> None:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        checkpoint.load(lives[rank.group.world.rank], rank.advance)

    together(len(lives), restores)
    if now == (4, 1):
        assert list(shares(manifest, 4).values()) == [0, 0, 1, 2, 3], "each rank reads its own shard"
    tensors = tensors_of({name: value for name, value in state.items() if name != "position"})
    whole = sum(aligned(tensor.nbytes) for tensor in tensors if not is_cut(tensor))
    cut = sum(aligned(tensor.nbytes) for tensor in tensors if is_cut(tensor))
    least = whole + manifest.files["structure.pt"]["bytes"]
    assert least <= sum(sent) <= least + part * cut


def test_an_optimiser_before_its_first_step() -> None:
    """Its averages are made while a checkpoint is loaded. A copy of the full ones would not fit into memory."""
    with pretended_rank(ShardPlace(1, 2, 0, 1)) as mesh:
        weight = torch.nn.Parameter(sharded(torch.randn(3, 4), ShardPlace(1, 2, 0, 1), mesh))
        scale = torch.nn.Parameter(torch.randn(3))
        optimizer = torch.optim.AdamW([{"params": [scale]}, {"params": [weight]}])
        live = live_state(optimizer)
        assert live["state"].keys() == {1} and live["state"][1].tensor is weight
        weight.grad, scale.grad = torch.zeros_like(weight), torch.zeros_like(scale)
        optimizer.step()
        live = live_state(optimizer)
        assert live["state"][1]["exp_avg"] is optimizer.state[weight]["exp_avg"]


def test_a_state_that_is_cut_otherwise(store: CheckpointStore) -> None:
    """Such a save would be of no use, and nobody would notice before the resume."""
    with pretended_rank(ShardPlace(0, 4, 0, 1)) as mesh:
        weight = sharded(torch.randn(8, 4), ShardPlace(0, 4, 0, 1), mesh)
        with pytest.raises(ValueError, match="a tensor is cut into 4 shards, the state into 2"):
            Packed([weight], ShardPlace(0, 2, 0, 2))
        columns = DTensor.from_local(torch.randn(8, 1), mesh, [Shard(1)], run_check=False)
        with pytest.raises(ValueError, match="only rows can be sharded"):
            Packed([columns], ShardPlace(0, 4, 0, 1))


@st.composite
def states(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of any dtype with random bits; those with rows will be sharded."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 9), max_size=3))
        count = int(torch.tensor(shape).prod()) * dtype.itemsize
        raw = torch.randint(2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        found.append(raw.view(dtype).reshape(shape))
    return found


def bytes_of_shard(state: list[Tensor], shard: int, shards: int) -> bytes:
    """The bytes of a shard as documented: its rows of each tensor, padded; shard 0 has the rest."""
    found = b""
    for tensor in state:
        begin, end = shard_rows(len(tensor), shard, shards) if tensor.dim() else (0, 0)
        rows = tensor[begin:end] if is_cut(tensor) else tensor if shard == 0 else tensor.new_empty(0)
        raw = bytes(rows.contiguous().reshape(-1).view(torch.uint8).tolist())
        found += raw + bytes(-len(raw) % 64)
    return found


COUNTS = st.tuples(st.integers(1, 6), st.integers(1, 2))


@settings(deadline=None, max_examples=40)
@given(states(), COUNTS, COUNTS, st.integers(1, 3))
def test_bytes_are_computed(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[Tensor],
    saved: tuple[int, int],
    now: tuple[int, int],
    pieces: int,
) -> None:
    """Where each byte lies follows from the shapes and the number of shards, however the files and pieces are cut."""
    state = {"position": {"step": 1}, "mine": tensors}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "STRIPE_BYTES", 128)
        patch.setattr(restore, "PIECE_BYTES", 64 * pieces)
        store = CheckpointStore(tmp_path_factory.mktemp("bytes"))
        save(store, state, *saved)
        manifest = store.verify(1)
        for shard, names in enumerate(manifest.shards_of_state):
            found = b"".join((store.path(1) / name).read_bytes() for name in names)
            assert found == bytes_of_shard(tensors, shard, saved[0])
        assert same(load(store.path(1), manifest), state)
        held = [held_by(place, state) for place in places(*now)]
        lives = [held_by(place, map_tensors(state, torch.zeros_like)) for place in places(*now)]

        def restores(rank: Rank) -> Any:
            checkpoint = rank.read(store)
            assert checkpoint is not None
            return checkpoint.load({"mine": lives[rank.group.world.rank]["mine"]}, rank.advance)["mine"]

        for found_tensors, expected in zip(together(len(held), restores), held):
            assert same(map_tensors(found_tensors, local), map_tensors(expected["mine"], local))


def test_a_disk_that_fails_on_one_node(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank cannot read of its own shard, rank 0 reads and sends: no step is lost."""
    save(store, state_of(5), 3)
    lives = [live_at(place) for place in places(3)]
    real, failed = os.preadv, list[int]()

    def fails_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if "shard_0001" in os.readlink(f"/proc/self/fd/{descriptor}") and not failed:
            failed.append(offset)
            raise OSError(116, "Stale file handle")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails_once)

    def restores(rank: Rank) -> Any:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        return checkpoint.load(lives[rank.group.world.rank], rank.advance)["model"]

    for model, place in zip(together(3, restores), places(3)):
        assert same(map_tensors(model, local), map_tensors(held_by(place, state_of(5))["model"], local))
    assert failed
