"""What survives of a sharded state in host memory when a node is lost: whole, of one step, and with its metrics.

The ranks are objects in this process; their copies travel over real sockets, and end up in a real checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laststep.checkpoint.files import StateChanged, Stripe
from laststep.checkpoint.frozen import FrozenState
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.config import Config
from laststep.config.errors import CheckpointError, ConfigError
from laststep.loops import snapshot
from laststep.loops.engine import Engine, Loop, SavableCopy
from laststep.loops.learner import LateUpdate
from laststep.loops.measured import Measured, Readback
from laststep.loops.snapshot import Copies, open_link
from laststep.ranks.group import Group
from laststep.ranks.meeting import SealedStore
from laststep.ranks.seal import Seal
from laststep.ranks.world import Gathered, ShardPlace
from laststep.records.metrics import MetricsFile
from tests.support.project import DEADLINE_S
from tests.support.records import a_world
from tests.support.states import places, pretended_rank, sharded_state


def full_state(step: int) -> dict[str, Any]:
    """The state of a step, as no other."""
    drawn = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(10, 3, generator=drawn), "bias": torch.randn(6, generator=drawn), "lr": 0.5 * step}


FROZEN = torch.linspace(-1.0, 1.0, 7)


def tensors_of(step: int, place: ShardPlace, mesh: DeviceMesh) -> dict[str, Any]:
    """The same, as this rank holds it, and between its tensors a weight that is never trained: checkpoints have it in a
    file of its own, after all others."""
    weight, *others = sharded_state(full_state(step), place, mesh).items()
    return dict([weight, ("frozen", nn.Parameter(FROZEN.clone(), requires_grad=False)), *others])


class Pending:
    """Stands for the readback: the steps whose lines are not written yet, with what they measured."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add(self, step: int, measured: object) -> None:
        self.steps.append(step)

    @property
    def first_step(self) -> int:
        return self.steps[0] if self.steps else 0

    def read_now(self, until: int) -> list[Measured]:
        return [Measured(step, {"loss": float(step)}) for step in self.steps if step < until]

    def remove(self, count: int) -> None:
        del self.steps[:count]


class Rank(Engine):
    """A rank of a run whose every step sets the state to that of its number."""

    def __init__(self, cluster: Cluster, place: ShardPlace, every_steps: int) -> None:
        self._open_ring(torch.device("cpu"))  # the part of an engine that a rescue reads
        loop = SimpleNamespace(state=lambda: self.tensors, unchanged=lambda: True)  # a CPU does not run ahead
        self.loop = cast(Loop, loop)
        self.config = Config()
        self.cluster, self.place, self.size = cluster, place, place.shards
        self.store = CheckpointStore(cluster.folder / "checkpoints")
        self.metrics = MetricsFile(cluster.folder / "metrics.jsonl", writes=False)
        self.pending = Pending()
        self.readback = cast(Readback, self.pending)
        self.tensors: dict[str, Any] = {}
        self.copies = Copies(open_link(cluster.group(place.shard), place), place, torch.device("cpu"), every_steps, 5.0)
        self.restored = True
        with self.ring.update():
            pass

    def step(self) -> None:
        """One step; its line is written one step late."""
        with pretended_rank(self.place) as mesh:
            self.ring.begin_update()
            self.tensors = tensors_of(self.position.step + 1, self.place, mesh)
            self.end_update({}, samples=8)
        self._write_steps(self.pending.read_now(self.position.step - 1))

    def _checkpoint_info(self) -> CheckpointInfo:
        return CheckpointInfo(self.position.step, 1, self.position.samples, {})

    def _write_steps(self, measured: Sequence[Measured]) -> None:
        for one in measured:
            self.position.loss_sum += one.values["loss"]
            self.metrics.append([{"step": one.step + 1}])
            assert self.copies is not None
            self.copies.count(one.step + 1, self.position, self.metrics.count)
        self.readback.remove(len(measured))


class Late:
    """Stands for LateUpdate. Without values, the update fails."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.tried = rank, False

    def do(self, gathered: Gathered) -> tuple[Mapping[str, torch.Tensor], int] | None:
        self.tried = True
        with pretended_rank(self.rank.place) as mesh:
            self.rank.tensors = tensors_of(gathered.step, self.rank.place, mesh)
        if not gathered.values:
            raise RuntimeError("in the middle of the update")
        return {}, 8


class Cluster:
    """Two nodes of two ranks, with one store."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self.folder, self._closing, self._seal = folder, closing, Seal()
        self._server = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False)

    def group(self, rank: int, **world: Any) -> Group:
        place = {"nodes": 2, "local_size": 2, "local_rank": rank % 2, "node": rank // 2, **world}
        group = SimpleNamespace(world=a_world(rank, 4, **place), store=SealedStore(self._server, self._seal))
        return cast(Group, SimpleNamespace(**vars(group), seal=self._seal))

    def ranks(self, every_steps: int) -> list[Rank]:
        ranks = [Rank(self, place, every_steps) for place in places(4)]
        for rank in ranks:
            assert rank.copies is not None
            self._closing.callback(rank.copies.close)
        return ranks


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as closing:
        yield Cluster(tmp_path, closing)


def freeze(ranks: Sequence[Rank], live: bool = True) -> list[list[SavableCopy]]:
    """What each of these ranks can save of its copies. Without `live`, none can read what it trains with."""
    for rank in ranks:
        assert not live or rank.freeze(0.0)
    return [rank.freeze_copies(1.0) for rank in ranks]


def save(survivors: Sequence[Rank], step: int) -> dict[str, Any]:
    """The state that these ranks save at a step together: each shard by the first that holds it."""
    moment, parts = (step, 0, False, False), {}
    for shard in range(4):
        for rank in survivors:
            name = f"{shard}-by-{rank.place.shard}"
            try:
                with rank.frozen(moment) as frozen:
                    parts[name] = write(frozen, shard, name)
            except (StateChanged, AssertionError):  # it holds nothing there, or not this shard
                continue
            break
    with survivors[0].frozen(moment) as frozen:
        frozen.commit("test", parts)
    store = survivors[0].store
    return cast(dict[str, Any], load(store.path(step), store.verify(step)))


def write(frozen: FrozenState, shard: int, name: str) -> Any:
    return frozen.write_part("test", shard, Stripe(0, 1), name, lambda: None)


def assert_is(state: dict[str, Any], step: int) -> None:
    """Whether this is the whole state of a step, with the lines and the losses of exactly its steps."""
    expected, position = full_state(step), state["position"]
    assert torch.equal(state["weight"], expected["weight"]) and torch.equal(state["bias"], expected["bias"])
    assert torch.equal(state["frozen"], FROZEN)
    assert state["lr"] == expected["lr"] and position["step"] == step and position["samples"] == 8 * step
    assert position["records"] == step, "the lines of metrics.jsonl up to this step, and no other"
    assert position["loss_sum"] == sum(range(step))


@pytest.mark.parametrize("dead", [[0], [3], [0, 1], [2, 3]], ids=str)
def test_no_step_is_lost_with_copies_of_every_step(cluster: Cluster, dead: list[int]) -> None:
    """Any rank, any node, after any step: what it held is on the other node, to the bit."""
    ranks = cluster.ranks(every_steps=1)
    for _ in range(3):
        for rank in ranks:
            rank.step()
    survivors = [rank for rank in ranks if rank.place.shard not in dead]
    held = freeze(survivors)
    assert all({copy.moment[0] for copy in copies} == {2, 3} for copies in held)
    assert_is(save(survivors, 3), 3)


def test_a_copy_that_was_saved_in_another_order(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of some days did where a model has frozen weights. Each hash is right, so nothing else would keep a
    run from continuing with another model."""
    monkeypatch.setattr(snapshot, "is_wrapped", lambda structure: set(structure) == {"state", "sharded"})
    ranks = cluster.ranks(every_steps=1)
    for rank in ranks:
        rank.step()
    freeze(ranks)
    with pytest.raises(CheckpointError, match="its bytes are in another order than its structure says"):
        save(ranks, 1)


def test_survivors_that_have_moved_on(cluster: Cluster) -> None:
    """Rank 3 dies when the gradients of step 3 have reached the others, and before its own update. They fall back to
    step 2, of which each has its own copy."""
    ranks = cluster.ranks(every_steps=1)
    for number in range(3):
        for rank in ranks[: 4 if number < 2 else 3]:
            rank.step()
    freeze(ranks[:3])
    assert_is(save(ranks[:3], 2), 2)


def test_the_lost_rank_had_moved_on(cluster: Cluster) -> None:
    """Rank 3 alone has done step 3, and its copy has arrived, when it dies. The others could not do that step: its
    keeper must still have the copy of step 2, or the run would be back at its checkpoint."""
    ranks = cluster.ranks(every_steps=1)
    for number in range(3):
        for rank in ranks if number < 2 else ranks[3:]:
            rank.step()
    freeze(ranks[:3])
    assert_is(save(ranks[:3], 2), 2)


def test_copies_of_every_third_step(cluster: Cluster) -> None:
    """They hold the losses and the lines up to their own step, although the run has come further."""
    ranks = cluster.ranks(every_steps=3)
    for _ in range(8):
        for rank in ranks:
            rank.step()
    held = freeze(ranks[:2])
    assert [sorted(copy.moment[0] for copy in copies) for copies in held] == [[3, 3, 6, 6], [3, 3, 6, 6]]
    assert_is(save(ranks[:2], 6), 6)


def test_a_rank_that_cannot_read_its_device(cluster: Cluster) -> None:
    """After a CUDA error every call on the device repeats it. The copies, and the losses that go with them, are in
    host memory."""
    ranks = cluster.ranks(every_steps=1)
    for _ in range(3):
        for rank in ranks:
            rank.step()
    for rank in ranks[:2]:
        rank.readback.read_now = None  # type: ignore[method-assign,assignment]
    freeze(ranks[:2], live=False)
    assert_is(save(ranks[:2], 3), 3)


def test_one_behind_does_its_update_in_the_rescue(cluster: Cluster) -> None:
    """Its main thread comes back when the rescue has begun: it must not do the same update once more. What is saved has
    the line and the loss of that step."""
    ranks = cluster.ranks(every_steps=3)
    for number in range(5):
        for rank in ranks if number < 4 else ranks[1:]:
            rank.step()
    behind = ranks[0]
    behind.late_update = cast(LateUpdate, Late(behind))
    freeze(ranks)
    main = threading.Thread(target=behind.ring.begin_update, daemon=True)
    main.start()
    assert not behind.advance(Gathered(4, ("0x0p+0",))), "it has done that one"
    assert behind.advance(Gathered(5, ("0x0p+0",))) and behind.freeze(0.0)
    assert not behind.advance(Gathered(6, ("0x0p+0",))), "no rank has the gradients of that one"
    assert_is(save(ranks, 5), 5)
    assert main.is_alive(), "it waits for the end of the process"


def test_an_update_that_fails_in_the_rescue(cluster: Cluster) -> None:
    """What the rank trains with is neither the step before nor the next one: it is not saved. Its copies are whole."""
    ranks = cluster.ranks(every_steps=3)
    for _ in range(4):
        for rank in ranks:
            rank.step()
    behind = ranks[0]
    behind.late_update = cast(LateUpdate, Late(behind))
    freeze(ranks)
    with pytest.raises(RuntimeError, match="in the middle"):
        behind.advance(Gathered(5, ()))
    assert not behind.freeze(0.0) and not behind.advance(Gathered(5, ("0x0p+0",)))
    assert_is(save(ranks, 3), 3)


def test_a_frozen_copy_is_not_overwritten(cluster: Cluster) -> None:
    """The thread that trains may still run while the rescue writes: it must not begin another copy."""
    ranks = cluster.ranks(every_steps=1)
    for rank in ranks:
        rank.step()
    copies = ranks[0].copies
    assert copies is not None
    copies.freeze(lambda _: None)
    take = threading.Thread(target=copies.take, args=(ranks[0].position, None, {}, []), daemon=True)
    take.start()
    take.join(0.1)
    assert take.is_alive(), "it waits for the end of the process"


def test_a_keeper_that_does_not_answer(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on, and the log says that there are no copies."""
    ranks = cluster.ranks(every_steps=1)
    keeper = ranks[2].copies
    assert keeper is not None
    keeper.close()
    for _ in range(2):
        ranks[0].step()
    assert capfd.readouterr().out.count("rank 2 keeps no copies of this rank any more") == 1


@pytest.mark.parametrize(
    ("place", "world", "said"),
    [
        (ShardPlace(0, 1, 0, 4), {}, "use checkpoint.replicas=0"),
        (ShardPlace(0, 2, 0, 2), {}, "other ranks hold the same, so a rank that dies costs no step"),
        (ShardPlace(0, 4, 0, 1), {"hosts": ("a", "a", "a", "b")}, "each node must have as many ranks as the others"),
    ],
)
def test_wrong_input(cluster: Cluster, place: ShardPlace, world: dict[str, Any], said: str) -> None:
    """In one line, before the first step."""
    with pytest.raises(ConfigError, match=said):
        open_link(cluster.group(0, **world), place)
