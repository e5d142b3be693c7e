"""Which state can be saved at this moment, while training moves on.

* `Ring`: the newest state that is whole in the device's memory, and what the host held of it.
* `OptimizerSnapshot`, `HostSnapshot`: the host's part of a state, to be read later.
* `Buffers`: the model's buffers, the same on every rank after every step, as the last step left them.
* `Copies`: copies of shards in host memory, on this node and another.

While a GPU's step j waits for a dead rank's gradients, the CPU has queued the update of step j behind that collective,
and perhaps step j+1 as well. The device's memory holds exactly step j-1, but everything on the host has moved on. So
each update of the state has a slot: an event before it, an event after it, and the host's part of the state that it
left. A state is whole while the device has passed the end of its update, and not the beginning of the next one.

Three slots are enough: an update is queued only when the one before the last has ended on the device. That also bounds
how far the CPU runs ahead, to two steps. It does not keep the device's own queue from filling: CUDA takes about 1,024
kernels in advance, and a step of a large model launches thousands. The thread that trains then waits in the middle of a
launch, and the driver answers no other thread. So the device itself writes into host memory how far it is, and other
threads go through `DeviceQueue`: `look` at the marks, `read` its memory, `launch` on it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep import compat
from laststep.checkpoint.manager import Position
from laststep.checkpoint.memory import HostMemory, reusable_buffer
from laststep.checkpoint.pack import Packed, is_fixed, is_wrapped, map_tensors
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.errors import ConfigError
from laststep.loops.measured import Measured
from laststep.ranks.device import DeviceQueue, is_due_to_capture
from laststep.ranks.fault import DeviceSilent
from laststep.ranks.group import Group
from laststep.ranks.process import run_time
from laststep.ranks.replicas import Copy, ReplicaLink, keeper_of
from laststep.ranks.world import Moment, ShardPlace
from laststep.say import say

SLOTS = 3
DEVICE_S = 5.0  # how long a device may take to end an update that is queued
POLL_S = 0.002

Held = TypeVar("Held")


class _Slot(Generic[Held]):
    """One update of the state. The events count only where their flag is set: an event is recorded again and again."""

    def __init__(self, queue: DeviceQueue) -> None:
        # Around this rank's own work before the update: loading, and the passes that wait for no other rank.
        self.work_begin, self.work_end = queue.event(asked=False), queue.event()
        self.begin, self.end = queue.event(waited=False), queue.event()
        self.worked = self.counted = self.begun = self.ended = False
        self.held: Held | None = None  # None: nothing has been queued since, what the host holds is this state


class Ring(Generic[Held]):
    """The last updates of one rank's state. The thread that trains begins and ends them; any other thread may look."""

    def __init__(self, queue: DeviceQueue, hold: Callable[[], Held]) -> None:
        """`hold` returns what the host holds of the state, before the next update changes it."""
        self.busy_s = 0.0  # of the device's time, spent on this rank's own work
        self._queue = queue
        self._hold = hold
        self._slots = [_Slot[Held](queue) for _ in range(SLOTS)]
        self._newest = -1  # the number of the newest update that has begun, counted from 0, the restored state's
        self._passed = 0
        # Held for two assignments only. Between the two calls of an update no lock is held: the thread that trains may
        # wait there for the device, and so for a dead rank, in C.
        self._lock = threading.Lock()
        self._frozen = False
        self._chosen = -1
        self._waits = False  # whether the thread that trains waits for the device
        self._stopped = False  # whether it waits for the end of the process
        self._redone = False

    # In the thread that trains

    def begin_work(self) -> None:
        """The step begins with this rank's own work."""
        slot = self._slot(self._newest + 1)
        slot.worked = False
        slot.work_begin.record()

    def end_work(self) -> None:
        """From here on the step may wait for other ranks."""
        slot = self._slot(self._newest + 1)
        slot.work_end.record()
        slot.worked, slot.counted = True, False
        self._count(slot)

    def begin_update(self) -> None:
        """The state changes from here on. Once the ring is frozen this does not return."""
        number = self._newest + 1
        slot = self._slot(number)
        if number > 1:
            self._await_end(self._slot(number - 2))
        if number and self._queue.runs_ahead:
            self._slot(number - 1).held = self._hold()
        slot.begun, slot.ended, slot.held = False, False, None
        slot.begin.record()
        with self._lock:
            frozen = self._frozen
            if not frozen:
                slot.begun, self._newest = True, number
        if frozen:
            self._stop()  # nothing of this update is queued

    def end_update(self) -> None:
        """The state is whole again, once the device is here."""
        slot = self._slot(self._newest)
        slot.end.record()
        slot.ended = True
        self._queue.note_memory()

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The state changes in this block."""
        self.begin_update()
        yield
        self.end_update()

    def await_newest(self) -> None:
        """Wait until the device has done the newest update, and let go of what the host held of the state before it.
        Once the ring is frozen this does not return."""
        if self._newest >= 0:
            with self.waiting():
                self._await_end(self._slot(self._newest))
            # A rescue may have done that update itself, and now the device has done it again. No rank may do an update
            # with what followed from that. None can without what this rank gathers at the end of the step under way.
            if self._frozen:
                self._stop()
            if self._newest:
                self._slot(self._newest - 1).held = None

    def _stop(self) -> None:
        self._stopped = True
        threading.Event().wait()  # the process ends

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the thread that trains only waits for the device. Once the ring is frozen, it goes no further
        than to its next wait, for the ring, the records or the copies."""
        self._waits = True
        yield  # a thread that has failed does not train on, and counts as one that waits
        self._waits = False

    def _await_end(self, slot: _Slot[Held]) -> None:
        slot.end.synchronize()
        self._count(slot)
        slot.worked = False

    def _count(self, slot: _Slot[Held]) -> None:
        """Count the own work of a step once the device has done it, on a CPU at once."""
        if slot.worked and not slot.counted and slot.work_end.query():
            self.busy_s += slot.work_begin.elapsed_time(slot.work_end) / 1000
            slot.counted = True

    # In any thread

    def passed(self) -> int:
        """How far the device has come, as far as it says: grows with the own work and with the update of each step.
        Raises RuntimeError when the device has failed."""
        newest = self._newest

        def look() -> int:
            ends = (n + 1 for n in self._numbers(newest) if self._slot(n).ended and self._slot(n).end.query())
            ended = next(ends, 0)
            works = (n + 1 for n in (newest + 1, newest) if self._slot(n).worked and self._slot(n).work_end.query())
            return ended + max(next(works, 0), ended)

        try:
            self._passed = max(self._passed, self._queue.look(look))  # the ring may have moved on meanwhile
        except DeviceSilent:
            pass  # it may answer later
        except RuntimeError as error:
            if not is_due_to_capture(error):
                raise
        return self._passed

    def freeze(self, timeout_s: float) -> bool:
        """Let no further update begin, and choose the newest whole state. False when there is none.

        Waits up to `timeout_s` for the thread that trains to end an update that the device has begun, and at least
        `DEVICE_S` for the device to do what is queued of it. Call it again when the state is not whole any more.
        Raises DeviceSilent.
        """
        with self._lock:
            self._frozen = True
        if self._redone:
            return self.is_whole()
        began = run_time()
        while self._newest >= 0:
            number, has_ended = self._queue.look(self._look)
            if has_ended:
                self._chosen = number
                return True
            # None has begun: the device went on between two queries, and the thread that trains has taken its slot.
            on_host = number >= 0 and not self._slot(number).ended
            if run_time() - began >= (timeout_s if on_host else max(timeout_s, DEVICE_S)):
                break
            time.sleep(POLL_S)
        return False

    @property
    def held(self) -> Held | None:
        """What the host held of the chosen state; None: what it holds now."""
        return None if self._redone or self._chosen == self._newest else self._slot(self._chosen).held

    def await_thread(self, timeout_s: float) -> bool:
        """Wait until the thread that trains waits too, for as long as the chosen state is whole. Call after `freeze`.
        False if it has not come to that."""
        deadline = run_time() + timeout_s
        while not (waits := self._stopped or (self._waits and self._newest > self._chosen)):
            if run_time() > deadline:
                break
            time.sleep(POLL_S)
        return waits

    def redo(self) -> bool:
        """Another thread has done the update after the chosen state itself, and the host holds what that has left: from
        now on this is the chosen state. False if the device has begun to do the same."""
        self._redone = self.is_whole()
        return self._redone

    def is_whole(self) -> bool:
        """Whether the device has not begun to change the chosen state: all that has been read until now is of it.
        Raises DeviceSilent."""
        return self._chosen == self._newest or not self._queue.look(self._slot(self._chosen + 1).begin.query)

    def _look(self) -> tuple[int, bool]:
        """The newest update that the device has begun, -1 if none, and whether it has ended. Anything after it is only
        queued."""
        begun = (n for n in self._numbers(self._newest) if self._slot(n).begun and self._slot(n).begin.query())
        number = next(begun, -1)
        return number, number >= 0 and self._slot(number).ended and self._slot(number).end.query()

    def _numbers(self, newest: int) -> range:
        return range(newest, max(newest - SLOTS, -1), -1)

    def _slot(self, number: int) -> _Slot[Held]:
        return self._slots[number % SLOTS]


class HostSnapshot(Protocol):
    """What the host holds of a state. The contents of tensors on the device are not copied."""

    @property
    def state(self) -> dict[str, Any]:
        """The state: references."""

    def unchanged(self) -> bool:
        """Whether these are still the tensors of that state."""


@dataclass(frozen=True)
class StepSnapshot:
    """What the host held of a step's state before the next update."""

    position: Position
    state: HostSnapshot


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors are in memory. An update that gives one other memory leaves the old memory to anything else."""
    return [tensor.data_ptr() for tensor in tensors]


class OptimizerSnapshot:
    """An optimiser's state: its rates, its counters, and which tensors it uses. Adam's `step` may be on the CPU: then
    it is copied."""

    def __init__(self, optimizer: Optimizer, on_host: Callable[[Tensor], bool]) -> None:
        def hold(value: Any) -> Any:
            return map_tensors(value, lambda tensor: tensor.clone() if on_host(tensor) else tensor)

        self._optimizer, self._on_host = optimizer, on_host
        self._whole: dict[str, Any] | None = None
        if type(optimizer).state_dict is not Optimizer.state_dict:
            self._whole = hold(optimizer.state_dict())
            return
        self._groups = [
            {name: value if name == "params" else hold(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._state = {
            key: {n: v if isinstance(v, Tensor) and not on_host(v) else hold(v) for n, v in values.items()}
            if isinstance(values, dict)
            else hold(values)
            for key, values in optimizer.state.items()
        }

    def can_put_back(self) -> bool:
        """Whether `put_back` is possible: the optimiser has the same tensors as then, and has made no others."""
        live = self._optimizer.state
        if self._whole is not None or self._state.keys() != live.keys():
            return False
        return all(
            isinstance(values, dict)
            and values.keys() == live[key].keys()
            and all(self._is_same(live[key][name], value) for name, value in values.items())
            for key, values in self._state.items()
        )

    def _is_same(self, live: Any, held: Any) -> bool:
        return not isinstance(live, Tensor) or live is held or self._on_host(live)

    def put_back(self) -> None:
        """Give the optimiser back what the CPU has changed since."""
        for group, held in zip(self._optimizer.param_groups, self._groups):
            group.update({name: value for name, value in held.items() if name != "params"})
        for key, values in self._state.items():
            for name, value in values.items():
                live = self._optimizer.state[key][name]
                if not isinstance(live, Tensor):
                    self._optimizer.state[key][name] = value
                elif live is not value:
                    live.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser's own state_dict() returned, or would have returned, when this was made."""
        if self._whole is not None:
            return self._whole
        numbers: dict[int, int] = {}
        groups = []
        for group in self._groups:
            named = {name: value for name, value in group.items() if name != "params"}
            named["params"] = [numbers.setdefault(id(parameter), len(numbers)) for parameter in group["params"]]
            groups.append(named)
        state = {numbers.get(id(key), key): values for key, values in self._state.items()}
        return {"state": state, "param_groups": groups}


COPY_SHARE = 0.05  # of the time of the steps that own copies alone may take
MOST_COPIED = 1 << 30  # bytes of a state that are copied without a word
ARRIVES_S = 1.0  # how long a rescue waits for a copy that is on its way from a sender that lives


@dataclass
class OwnCopy:
    """This rank's shard, as it was after a step."""

    position: Position  # complete once the lines of its steps are `counted`
    info: CheckpointInfo
    measured: Sequence[Measured]  # by the steps whose lines were not written then
    counted: bool
    buffer: Tensor
    packed: Any  # the structure of the state

    @property
    def structure(self) -> Any:
        """The structure of the state, with its position."""
        position = {"position": asdict(self.position)}
        if is_wrapped(self.packed):
            return {**self.packed, "state": {**self.packed["state"], **position}}
        return {**self.packed, **position}

    @property
    def data(self) -> memoryview:
        """The bytes of the shard."""
        return self.buffer.numpy().data


class Copies:
    """Copies of shards in host memory: this rank's own, and those that a rank on another node, its sender, has sent.

    At the end of every N-th step each rank copies its shard, and a thread sends the copy to its keeper while the next
    steps are done. Before the step at whose end the next copy is taken, the keeper must have the last one. So at any
    moment there is a copied step of which every shard survives the loss of a node: the last, or while that is on its
    way the one before. Some ranks may be a step ahead of others, so each has its own last two copies, and those of its
    sender. With N = 1 no rank begins a step before its copy of the last one is complete, so that no step is lost.

    A keeper that does not answer costs a warning and the copies, never the training.

    Without a link there are only own copies, for a loop whose step makes several updates. If a rank dies between two of
    them, the weights of the others are a mixture of two steps, and the copy is the step before. Copies take at most
    COPY_SHARE of the training's time, so ranks may take them after different steps; one copy is enough.

    `copied_s` and `waited_s` are how long training has stood still for them.
    """

    def __init__(
        self, link: ReplicaLink | None, place: ShardPlace, device: torch.device, every_steps: int, patience_s: float
    ) -> None:
        self.copied_s = self.waited_s = 0.0  # how long training has stood still
        # Without a link: the first step after which a copy is due, and since which step, and when, steps are timed.
        self._next_step = 0
        self._paced_from: tuple[int, float] | None = None
        self._link, self._place, self._device = link, place, device
        self._every_steps, self._patience_s = every_steps, patience_s
        self._lock = threading.Lock()  # guards the fields below
        self._own: list[OwnCopy] = []  # complete ones, at most two, the older first
        self._frozen = False
        self._warned = False
        self._least_s = math.inf  # that a copy has taken

    # In the thread that trains

    def is_due(self, step: int) -> bool:
        """Whether a copy is taken at the end of this step."""
        return step >= self._next_step if self._link is None else step % self._every_steps == 0

    def pace(self, step: int) -> None:
        """Without a link: the copy after `step` is taken. Decide when the next one is due."""
        began, began_at = self._paced_from = self._paced_from or (step, time.perf_counter())
        steps = 1
        if step > began:
            step_s = (time.perf_counter() - began_at) / (step - began)
            steps = max(1, math.ceil(self._least_s / (COPY_SHARE * step_s)))
        self._next_step = step + steps

    def take(self, position: Position, info: CheckpointInfo, state: Any, measured: Sequence[Measured]) -> None:
        """Copy this rank's shard of the state, and start to send it. Does not return once the copies are frozen.

        `measured` has what the steps measured whose lines are not written yet.
        """
        began = time.perf_counter()
        with self._lock:
            frozen = self._frozen
            spare = None if frozen or len(self._own) < 2 else self._own.pop(0).buffer
        if frozen:
            threading.Event().wait()  # the process ends
        packed = Packed(state, self._place)
        if spare is None or len(spare) != packed.bytes:
            spare = reusable_buffer(packed.bytes, self._device)
        packed.copy(0, packed.bytes, spare)
        copy = OwnCopy(position, info, measured, False, spare, packed.structure)
        with self._lock:
            self._own.append(copy)
        if self._link is not None:
            self._link.send(Copy(position.moment, copy.data))
        took_s = time.perf_counter() - began
        self._least_s = min(self._least_s, took_s)
        self.copied_s += took_s

    def complete(self) -> None:
        """Wait until the keeper has the last copy. If it does not answer, training continues without copies there."""
        if self._link is None:
            return
        began = time.perf_counter()
        if not self._link.wait(self._patience_s):
            self._link.give_up(f"it has not answered for {self._patience_s:.0f} s")
        self.waited_s += time.perf_counter() - began
        if self._link.error is not None and not self._warned:
            self._warned = True
            say(
                f"WARNING: rank {self._link.keeper} keeps no copies of this rank any more: {self._link.error}; if this "
                "rank is lost, the run is back at its newest checkpoint"
            )

    # In any thread

    def count(self, step: int, position: Position, records: int) -> None:
        """`position` counts the lines of all steps up to this one; metrics.jsonl then has `records` lines."""
        with self._lock:
            for copy in self._own:
                if copy.position.step == step and not copy.counted:
                    its = copy.position
                    its.loss_sum, its.loss_samples, its.skipped = (
                        position.loss_sum,
                        position.loss_samples,
                        position.skipped,
                    )
                    its.records, copy.counted = records, True

    def freeze(self, write: Callable[[Sequence[Measured]], None]) -> None:
        """Change no copy any more. `write` writes the lines of the steps that the newest copy needs."""
        with self._lock:
            self._frozen = True
            uncounted = [copy.measured for copy in self._own if not copy.counted]
        if self._link is not None:
            self._link.freeze(ARRIVES_S)
        if uncounted:
            write(uncounted[-1])

    def own(self) -> list[OwnCopy]:
        """This rank's own copies that can be saved."""
        with self._lock:
            return [copy for copy in self._own if copy.counted]

    def own_at(self, moment: Moment) -> OwnCopy | None:
        """The own copy at this place."""
        return next((copy for copy in self.own() if copy.position.moment == moment), None)

    def at(self, moment: Moment) -> dict[int, memoryview]:
        """The copies at this place by their shard. Call after `freeze`."""
        kept = [(self.kept_shard, copy.data) for copy in self.kept() if copy.moment == moment]
        own = self.own_at(moment)
        return dict(kept if own is None else [*kept, (self._place.shard, own.data)])

    def kept(self) -> list[Copy]:
        """The last two copies of the sender. Call after `freeze`."""
        return [] if self._link is None else self._link.freeze(0.0)

    @property
    def kept_shard(self) -> int:
        """The shard of which copies are kept here."""
        return 0 if self._link is None else self._link.sender % self._place.shards

    def close(self) -> None:
        """Send and keep nothing any more."""
        if self._link is not None:
            self._link.close()


def open_link(group: Group, place: ShardPlace) -> ReplicaLink:
    """This rank's link to its keeper and its sender. Raises ConfigError where no other node can keep its shard."""
    world = group.world
    if place.shards == 1 or place.replicas > 1:
        raise ConfigError(
            "checkpoint.replicas=1: copies are for a state that is cut over all ranks (train.sharding=full, or in a "
            "custom loop a mesh of all ranks); here other ranks hold the same, so a rank that dies costs no step: use "
            "checkpoint.replicas=0"
        )
    if world.hosts[keeper_of(world.rank, world)] == world.hosts[world.rank] and len(set(world.hosts)) > 1:
        raise ConfigError(
            "checkpoint.replicas=1: each node must have as many ranks as the others; these are on "
            f"{', '.join(world.hosts)}"
        )
    return ReplicaLink(world, group.store, group.seal, lambda count: HostMemory(count).tensor.numpy().data)


@dataclass(frozen=True)
class Committed:
    """The buffers of one finished step. Each commit makes a new one, and changes no earlier one."""

    row: Tensor  # the bytes of those on the device
    elsewhere: list[Tensor]


class Buffers:
    """Batch norm's statistics and the like. A forward pass changes them in place, on each rank from its own samples.

    By default DDP broadcasts rank 0's buffers before the next forward pass. Then the last step's buffers would be lost
    with rank 0 if it died. Here they are broadcast at the end of the step instead, at the same cost, and a copy is
    committed, because the next forward pass changes the live ones. So at any moment each rank alone holds the complete
    state of the last finished step.

    The order of calls: a forward pass, `broadcast`, `commit`. With `train.shares` a step may have several forward
    passes that each begin with the same buffers; the first one's are broadcast. Between two of them: `rewind`.
    """

    def __init__(self, model: nn.Module, group: Group, *more: Tensor) -> None:
        """The buffers of `model`, and `more` tensors to treat like buffers."""
        dense = [buffer for buffer in (*model.buffers(), *more) if is_dense(buffer)]
        self._memory = BufferMemory(model, dense)
        # Such as the counter of torch's AveragedModel, on the CPU. NCCL could not send it; it is the same on all ranks.
        self._elsewhere = [buffer for buffer in dense if buffer.device.type != group.device.type]
        dense = [buffer for buffer in dense if buffer.device.type == group.device.type]
        # Large elements first, so that each lies at a multiple of its size in a row of bytes.
        self._live = sorted(dense, key=lambda b: -b.element_size())
        kept = {id(tensor) for tensor in more}
        self._more = [number for number, buffer in enumerate(self._live) if id(buffer) in kept]
        self._bytes = [bytes_of(buffer) for buffer in self._live]
        self._sizes = [len(part) for part in self._bytes]
        self._layouts = [(buffer.dtype, buffer.size(), buffer.stride()) for buffer in self._live]
        self._group = group
        self.received = self._gather()  # by the last `broadcast`; the next one makes a new tensor
        self._captured = False  # since the last `broadcast`
        self.snapshot()

    def snapshot(self) -> None:
        """Commit the live buffers as they are. No collective."""
        self.committed = self.copy()

    def copy(self) -> Committed:
        """A copy of the live buffers, which is not committed."""
        self._memory.bring_back()
        return Committed(self._gather(), [buffer.clone() for buffer in self._elsewhere])

    def broadcast(self) -> None:
        """Receive rank 0's buffers, to be committed by `commit`. A collective."""
        if self._live:
            if self._captured and self._more:
                received = self.received.split(self._sizes)
                compat.copy_each([received[n] for n in self._more], [self._bytes[n] for n in self._more])
            self.capture()
            self._captured = False
            self._group.broadcast([self.received])

    def capture(self) -> None:
        """What is in the live buffers now will be broadcast, unless that has been said since the last `broadcast`. This
        does not hold for the tensors that are only treated like buffers."""
        if self._live and not self._captured:
            self._memory.bring_back()
            self.received, self._captured = self._gather(), True

    def rewind(self, start: Committed | None = None) -> None:
        """Put the buffers `start` back into the live ones, None: the committed ones; what was there at the first call
        will be broadcast."""
        self.capture()
        self._memory.bring_back()
        start = start or self.committed
        if self._live:
            parts = list(start.row.split(self._sizes))
            for number in self._more:
                parts[number] = self._bytes[number]
            compat.copy_each(self._bytes, parts)
        for live, copied in zip(self._elsewhere, start.elsewhere):
            live.copy_(copied)

    def commit(self, nonfinite: Tensor | None = None) -> None:
        """Commit the buffers that `broadcast` received, and copy them into the live ones.

        Where `nonfinite` (a scalar on the device) is not 0, the last committed ones stay instead. Before any
        `broadcast` this restores the live buffers to how they were at the start.
        """
        self._memory.bring_back()
        if self._live:
            row = self.received
            if nonfinite is not None:
                row = torch.where(nonfinite == 0, row, self.committed.row)
            self.committed = Committed(row, [buffer.clone() for buffer in self._elsewhere])
            compat.copy_each(self._bytes, row.split(self._sizes))

    def in_state_dict(self, state: dict[str, Any], committed: Committed, prefix: str = "") -> dict[str, Any]:
        """A model's `state_dict(keep_vars=True)` with these committed buffers in place of the live ones, detached;
        fixed parameters remain parameters, so that `Packed` knows them. That model is at `prefix` in the one that was
        given at first. By name, since a step that is under way may have put another tensor in a buffer's place."""
        parts = [
            part.view(dtype).as_strided(size, stride)
            for part, (dtype, size, stride) in zip(committed.row.split(self._sizes), self._layouts)
        ]
        live = (*self._live, *self._elsewhere)
        values = {id(buffer): value for buffer, value in zip(live, (*parts, *committed.elsewhere))}
        named = {path: values[id(buffer)] for path, buffer in self._memory.named}
        found = {name: named.get(prefix + name, values.get(id(value), value)) for name, value in state.items()}
        return {name: value if is_fixed(value) else value.detach() for name, value in found.items()}

    def _gather(self) -> Tensor:
        return torch.cat(self._bytes) if self._bytes else torch.empty(0, dtype=torch.uint8)


def bytes_of(dense: Tensor) -> Tensor:
    """A view of the bytes of a tensor that has no gaps and overlaps, in memory order."""
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements are in memory without gaps and overlaps. If not, it is an expanded constant, to
    which nothing writes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _BufferSlot(NamedTuple):
    """One buffer of one module."""

    module_buffers: dict[str, Tensor | None]  # the module's, by name
    name: str
    path: str  # the name in the whole model
    buffer: Tensor
    memory: Tensor  # the same memory, whatever becomes of the buffer
    address: int

    @property
    def now(self) -> Tensor | None:
        """What the module has there."""
        return self.module_buffers[self.name] if self.name in self.module_buffers else None  # noqa: SIM401 (TorchScript has no get)


class BufferMemory:
    """The buffers of a model that a checkpoint holds, whose addresses and sizes other code caches.

    A forward pass may put another tensor in the place of a buffer, as `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`
    does.
    """

    def __init__(self, model: nn.Module, buffers: Collection[Tensor]) -> None:
        """`buffers` are those to look after."""
        known = {id(buffer) for buffer in buffers}
        self._slots: list[_BufferSlot] = []
        for path, module in model.named_modules():
            named = compat.buffers_of(module)
            for name in compat.saved_buffers(module):
                buffer = named[name]
                if buffer is not None and id(buffer) in known:
                    whole = f"{path}.{name}" if path else name
                    self._slots.append(_BufferSlot(named, name, whole, buffer, buffer.detach(), buffer.data_ptr()))
        counts = Counter(id(slot.buffer) for slot in self._slots)
        self._shared = {buffer for buffer, count in counts.items() if count > 1}

    def bring_back(self) -> None:
        """Copy what has taken a buffer's place to where the buffer was, and put the buffer back. Raises ConfigError if
        it is of another size."""
        replaced = [
            (slot, now)
            for slot in self._slots
            if (now := slot.now) is not slot.buffer or now.data_ptr() != slot.address or now.shape != slot.memory.shape
        ]
        if replaced:
            self._bring_back([(slot, now) for slot, now in replaced if not _is_moved(slot, now)])

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The name in the whole model of each buffer, and that buffer."""
        return [(slot.path, slot.buffer) for slot in self._slots]

    @torch.no_grad()
    def _bring_back(self, replaced: list[tuple[_BufferSlot, Tensor | None]]) -> None:
        values = []
        for slot, now in replaced:
            if now is None or now.shape != slot.memory.shape:
                became = "None" if now is None else f"of shape {tuple(now.shape)}"
                raise ConfigError(
                    f"the model's buffer {slot.path} was of shape {tuple(slot.memory.shape)}, and a step has made it "
                    f"{became}, which no checkpoint can follow; give it its final shape before training"
                )
            if id(slot.buffer) in self._shared:
                raise ConfigError(
                    f"the model's buffer {slot.path} is one tensor with another buffer, and a step has replaced it; "
                    "change it in place (copy_), or give each its own"
                )
            values.append(now.clone())  # one buffer may have taken the tensor of another
        for (slot, _), value in zip(replaced, values):
            slot.memory.copy_(value)
            slot.module_buffers[slot.name] = slot.buffer
            if slot.buffer.data_ptr() != slot.address:
                slot.buffer.data = slot.memory


def _is_moved(slot: _BufferSlot, now: Tensor | None) -> bool:
    """Whether the whole model is elsewhere, as Lightning moves it to the CPU at its end: no step did that."""
    return now is not None and now.device != slot.memory.device
