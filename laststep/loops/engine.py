"""The engine of a training loop: position, saves, metrics, the agreed stop, and what a rescue reads.

Every rank has one, in step with the others. It knows when a step is done and what follows from that, and nothing of
what a step computes. `TaskLoop` and `CustomLoop` have an engine, and each is the `Loop` that its engine drives:

    attempt -- restore, run ------------>  Engine  -- restore, train ---------------------->  Loop
                                             |
    loop ---- begin_update, end_update ----->|  the state changes in between         -- hold -->  Loop
         ---- step_done -------------------->|  read the metrics back    -- before_request, record, lines -->
         ---- end_epoch -------------------->|  the line of the epoch              -- epoch_written -->
         ---- save, save_last -------------->|  a checkpoint                 -- before_save, state, epoch -->
                                             |
                                             |-- ring      which state is whole on the device (snapshot.py)
                                             |-- readback  values on their way to metrics.jsonl (measured.py)
                                             |-- saves     the checkpoints under way (checkpoint/manager.py)
                                             |-- copies    of the shard on another node, with checkpoint.replicas
                                             |-- probe     what `prove` notes of each step, else None (probe.py)
                                             |
    rescue -- freeze, frozen, advance ------>|  in another thread, while the one that trains is stuck
                                                    -- state, unchanged -->  Loop

Between two updates the state is the same on every rank, and can be saved. `ring` knows the newest state that the device
has as a whole. Besides, the engine holds `records_lock` while it writes lines of metrics.jsonl or ends an epoch, never
while it waits for the device or for another rank.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laststep.checkpoint.files import StateChanged
from laststep.checkpoint.frozen import ChunkBuffers, FrozenState
from laststep.checkpoint.manager import RETRY_LAST_S, CheckpointManager, Position
from laststep.checkpoint.pack import Packed
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.store import START_S, CheckpointStore
from laststep.checkpoint.writer import WRITE_BYTES, CheckpointInfo
from laststep.config.checks import check_replicas
from laststep.config.config import Config
from laststep.config.errors import ConfigError, NotFinite
from laststep.config.keep import Anchors
from laststep.config.reads import GivenKeys
from laststep.loops import digest
from laststep.loops.digest import StateDigest
from laststep.loops.measured import Measured, Readback
from laststep.loops.snapshot import MOST_COPIED, Copies, HostSnapshot, Ring, StepSnapshot, open_link
from laststep.optim.build import SORTED
from laststep.ranks.beside import signpost
from laststep.ranks.device import changed_numerics, describe_numerics, open_queue
from laststep.ranks.disk import Patience
from laststep.ranks.group import Group
from laststep.ranks.stop import Stop
from laststep.ranks.watchdog import Watchdog
from laststep.ranks.world import Gathered, Moment, ShardPlace
from laststep.records.metrics import DIGEST, MetricsFile
from laststep.records.probes import ProbePlan
from laststep.records.progress import Progress, StartupTimer
from laststep.records.tensorboard_writer import TensorBoard
from laststep.rundir import RunDir
from laststep.say import say

if TYPE_CHECKING:
    from laststep.loops.learner import LateUpdate
    from laststep.loops.probe import Probe


@dataclass(frozen=True)
class SavableCopy:
    """A shard of the state in host memory."""

    moment: Moment
    shard: int
    bytes: int
    own: bool  # this rank's own shard, with what else a checkpoint needs to know


@dataclass(frozen=True)
class AttemptContext:
    """What an attempt hands to its loop."""

    config: Config
    run: RunDir
    store: CheckpointStore
    group: Group
    stop: Stop
    watch: Watchdog
    phases: StartupTimer
    closing: contextlib.ExitStack  # closed once no rank trains or saves any more
    probe_plan: ProbePlan | None = None  # of `prove`


class Loop(ABC):
    """What an engine drives: the half of a training loop that knows what is trained, and in which order."""

    engine: Engine

    @abstractmethod
    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Load the checkpoint; None: start from the initial state."""

    @abstractmethod
    def train(self) -> bool:
        """Train from the position on. True when the run is finished, False when the ranks agreed to stop."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the position: references, the same on every rank."""

    @abstractmethod
    def digested(self) -> dict[str, Any]:
        """The part of `state` that a digest covers, without a wait for the device. Gradient scalers have no tensor, and
        are left out."""

    @abstractmethod
    def hold(self) -> HostSnapshot:
        """Snapshot of the host's part of `state`. The contents of tensors on the device are not copied."""

    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the last finished step, from 1."""

    @abstractmethod
    def record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        """The fields of a finished step (from 0) in metrics.jsonl. Raises NotFinite."""

    def lines(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl for a finished step: its own, to which this may add, and others of that moment."""
        return [line]

    def unchanged(self) -> bool:
        """Whether `state` still is the state of the last step. Asked by a rescue, in another thread."""
        return True

    def before_request(self) -> None:  # noqa: B027 (most loops need nothing there)
        """Called on every rank before measured values are requested, so it may run collectives."""

    def before_save(self) -> None:  # noqa: B027 (most loops need nothing there)
        """Called on every rank before a save, so it may run collectives. Raises ConfigError."""

    def epoch_written(self) -> None:  # noqa: B027 (most loops need nothing there)
        """The line of the epoch is in metrics.jsonl. The engine holds `records_lock`."""


class Engine:
    """Runs one rank's loop. See the picture at the top."""

    def __init__(self, context: AttemptContext, loop: Loop) -> None:
        self.loop = loop
        self.config, self.group, self.stop, self.watch = context.config, context.group, context.stop, context.watch
        self.startup, run, world = context.phases, context.run, context.group.world
        self._open_ring(self.group.device)
        self.rank, self.size = world.rank, world.size
        if self.rank == 0 and (spot := self.queue.blind_spot):
            say(f"WARNING: if a rank dies or hangs, the steps since the last save may be lost: {spot}")
        self.place = ShardPlace(0, 1, self.rank, self.size)  # which shard of the state this rank holds
        self.store = context.store
        self.metrics = MetricsFile(run.metrics, writes=self.rank == 0)
        self.progress = Progress(prints=self.rank == 0)
        self.tensorboard = TensorBoard(run, self.config.train.log_every, writes=self.rank == 0)
        stopping = lambda: self.stop.signal is not None  # noqa: E731
        self.saves = CheckpointManager(
            self.config.checkpoint, run, self.store, self.group, self.metrics, self.progress, self.watch, stopping
        )
        self._closing = context.closing
        self._closing.callback(self.saves.close)
        self._closing.callback(self.queue.close)
        self.readback = Readback(self.group, self.saves, self.progress)
        self._digest = StateDigest(self.group.device)
        # A GPU is given the next step before the values are collected: waiting for them at once would leave it idle.
        self._anchor_every = Anchors.parse(self.config.checkpoint.anchors).every
        self.reads_one_step_late = self.group.device.type == "cuda"
        at_any_size = self.config.train.shares is not None
        sharding = self.config.train.sharding
        group = self.group
        numerics = describe_numerics(group.device, world, group.backend, at_any_size, sharding, group.nccl_graph)
        self.numerics = numerics | SORTED
        self._plan, self._yaml = run.plan, self.config.to_yaml()
        self.watch.follow(self.ring.passed)
        self.first_step = 1  # the first step of this attempt, from 1
        self.probe: Probe | None = None
        if context.probe_plan is not None:
            from laststep.loops.probe import Probe

            self.probe = Probe(context.probe_plan, context.run, world, context.stop)

    def _open_ring(self, device: torch.device) -> None:
        """What a rescue reads."""
        self.queue = open_queue(device)
        self.ring = Ring(self.queue, lambda: StepSnapshot(copy.copy(self._position), self.loop.hold()))
        self.records_lock = threading.Lock()
        self._records_locked = False  # by a rescue
        self._position = Position()
        self._frozen: Position | None = None
        self._frozen_live = False  # whether what this rank trains with is whole, and frozen
        self._torn = False  # whether a rescue has begun an update of it that it has not ended
        self.late_update: LateUpdate | None = None  # where a rescue may do one
        self.copies: Copies | None = None  # with checkpoint.replicas, or where a step makes several updates
        self._decided_on_copies = False
        self._chunks = ChunkBuffers(self.queue.host_buffer(WRITE_BYTES))
        self.restored = False  # whether there is a state worth saving
        self.rescuable = True  # whether a rank alone has all of the state

    # The attempt

    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Load the checkpoint; None: start from the initial state."""
        if checkpoint is not None:
            self.saves.writer.links.note(checkpoint.manifest.step, checkpoint.manifest.files)
        self.loop.restore(checkpoint)

    def run(self) -> bool:
        """Train and save. True when the run is finished, False when the ranks agreed to stop."""
        # Trainer.__call__ turned the garbage collector off. Objects that exist now stay, so it never has to visit them.
        gc.freeze()
        gc.enable()
        finished = False
        try:
            finished = self.loop.train()
        finally:
            if not finished:
                self.tensorboard.end()
        self.save_last()
        return finished

    # The loop, as it restores

    def announce_length(self, total_steps: int, batch_size: int, samples: int | None = None) -> None:
        """Publish the run's length: for the progress lines, and in the run folder for `launch.py status`. `samples`: in
        the training set, where the configuration alone says in which order they are used."""
        self.progress.total_steps = total_steps
        if self.rank == 0:
            plan = {"total_steps": total_steps, "batch_size": batch_size}
            plan |= {} if samples is None else {"samples": samples}
            with contextlib.suppress(OSError):  # `status` then shows less
                self._plan.write_text(json.dumps(plan) + "\n")

    def hold_shard(self, place: ShardPlace) -> None:
        """From now on this rank holds, and saves, this shard of the state."""
        self.place = place
        self.saves.writer.place = place

    def take_position(self, position: Position) -> None:
        """Resume at this position."""
        self._position = position

    def compare_numerics(self, checkpoint: SharedCheckpoint) -> None:
        """Warn if the steps of a checkpoint were computed in another way."""
        if changed := changed_numerics(checkpoint.manifest.numerics, self.numerics):
            self.progress.say(f"WARNING: {changed}")

    def finish_restore(self) -> None:
        """The state is in place: cut the lines of metrics.jsonl beyond it, and allow rescues."""
        with self.ring.update():
            pass
        self.saves.saved = copy.copy(self.position)
        patience_s = min(START_S, self.config.launch.hang_timeout_s / 2)  # the other ranks wait
        self.metrics.begin(self.position.records, Patience(patience_s, self.progress.say))
        self.first_step = self.position.step + 1
        self._open_copies()
        self.restored = True
        self.startup.done("restore")

    def _open_copies(self) -> None:
        """With checkpoint.replicas: keep copies of the shards on other nodes from now on. Raises ConfigError."""
        settings, world = self.config.checkpoint, self.group.world
        check_replicas(settings.replicas, world.nodes)
        if settings.replicas:
            link = open_link(self.group, self.place)
            patience_s = self.config.launch.hang_timeout_s / 2
            self.copies = Copies(link, self.place, self.group.device, settings.replica_every_steps, patience_s)
            self._closing.callback(self.copies.close)

    def keep_own_copies(self) -> None:
        """The loop's steps make several updates each: keep copies of the last steps, if a rescue may need them, see
        `Copies`. Call it before `end_update`."""
        if self.copies is not None or self._decided_on_copies or self.size == 1 or self.place.shards > 1:
            return
        self._decided_on_copies = True
        if not self.rescuable:
            return
        size = Packed(self._checkpoint_state(), self.place).bytes
        if size <= MOST_COPIED:
            self.copies = Copies(None, self.place, self.group.device, 1, 0.0)
        elif self.rank == 0:
            say(
                "WARNING: a step of this loop makes several updates, and a state of "
                f"{size / 1e9:.1f} GB is too large to copy after each step: if a rank dies between two updates, the "
                "steps since the last save are lost"
            )

    def check_given(self, given: GivenKeys, among: Collection[str] = ("",)) -> None:
        """Raise ConfigError on every rank for a key, in the sections `among`, that the user has set and that rank 0 has
        not read: it reads what the others do, and what it logs. A collective."""
        if problem := self.group.broadcast_bytes(str(given.problem(among) or "").encode()).decode():
            self.spoil()  # no rescue saves what has hardly begun
            raise ConfigError(problem)

    # The loop, in each step

    @property
    def position(self) -> Position:
        """How far the run has come: up to what is queued on the device; once it is frozen, that of the frozen state."""
        return self._frozen or self._position

    def begin_update(self) -> None:
        """The state changes from here on. In a rescue this does not return."""
        self.ring.begin_update()

    def end_update(
        self,
        measured: Mapping[str, Tensor],
        samples: int,
        batches: int = 0,
        modes: str | None = None,
        streams: dict[str, Any] | None = None,
    ) -> None:
        """The step is done, as far as the CPU is concerned: count it. `measured` are scalars on the device; `batches`,
        `modes` and `streams` are for the position of a custom loop."""
        if modes is not None:
            self._position.modes = modes
        if streams is not None:
            self._position.streams = streams
        if _is_due(self._position.step + 1, self.config.train.digest_every):
            measured = {**measured, **self._digest_of_state()}
        self._count_step(measured, samples, batches)
        self.ring.end_update()
        if self.copies is not None:
            self._copy(self.copies)

    def step_done(self, samples: int, ends_epoch: bool) -> None:
        """What follows each step."""
        step = self.position.step
        self.progress.count(samples)
        if self.place.shards > 1 and _is_due(step, self.config.train.digest_every):
            self.readback.add_to_last(digest.as_scalars(self._digest.over_shards(self.group, self.place)))
        self.saves.due |= _is_due(step, self.config.checkpoint.every_steps) or _is_due(step, self._anchor_every)
        if self.readback.requested:
            self._collect_measured()
        if ends_epoch:
            self.flush()
        elif step % self.config.train.log_every == 0:
            self._request_measured()
            if not self.reads_one_step_late:
                self._collect_measured()
        if step == self.first_step:  # from now on the optimiser has all of its state
            self.saves.writer.prepare(self._checkpoint_state())
            self.startup.done("first step")
            self.progress.say(f"first step after {self.startup}")
            self.tensorboard.start()
        if self.probe is not None:
            self.probe.end_step(self.loop.state())

    def end_epoch(self, record: dict[str, Any]) -> None:
        """End the epoch after the last finished step; `record` is its line of metrics.jsonl."""
        self.queue.synchronize()  # no step can be rescued from now on that does not have this line
        with self.records_lock:
            earlier = self.position.metrics if self.position.measured == self.position.step else {}
            self.position.end_epoch(record)
            self.metrics.append([record], self.progress.of_epoch(record))
            self.position.metrics = {**earlier, **record}
            self.loop.epoch_written()
        self.saves.due |= _is_due(record["epoch"], self.config.checkpoint.every_epochs)
        self.progress.restart_clock()

    def save(self) -> None:
        """Start a save of this position, see `CheckpointManager.start_save`. A collective."""
        with signpost.doing("saving"):
            self.loop.before_save()
            self.flush()
            self.position.records = self.metrics.count
            self.saves.start_save(self.position, self._checkpoint_info(), self._checkpoint_state())
        self.progress.restart_clock()

    def save_last(self) -> None:
        """Save at a stop or at the end of the run, and wait until the checkpoint is committed."""
        self.watch.enter("saving")
        self.saves.last = True
        while True:
            self.save()
            self.saves.wait()
            if self.saves.saved.same_moment(self.position):
                return
            time.sleep(RETRY_LAST_S)

    def flush(self) -> None:
        """Write all finished steps to metrics.jsonl; the CPU waits for the device. A collective. Raises NotFinite."""
        if self.readback.requested:
            self._collect_measured()
        self._request_measured()
        self._collect_measured()

    def spoil(self) -> None:
        """The state is not worth a checkpoint from now on, on any rank."""
        self.restored = False

    def _count_step(self, measured: Mapping[str, Tensor], samples: int, batches: int = 0) -> None:
        position = self._position
        self.readback.add(position.step, measured)
        position.step += 1
        position.batches += batches
        position.samples += samples

    def _digest_of_state(self) -> dict[str, Tensor]:
        """The digest of the state that a step has left, where this rank alone knows it: that of shards is added up in
        `step_done`, since no rank may wait for another here."""
        found = self._digest.of(self.loop.digested(), self.place)
        return {} if found is None or self.place.shards > 1 else digest.as_scalars(found)

    def _copy(self, copies: Copies) -> None:
        """After an update: take a copy, or make sure of the last one, if either is due."""
        step = self._position.step
        if copies.is_due(step):
            with self.ring.waiting():
                state = {"position": asdict(self._position), **self.loop.state()}
                measured = self.readback.read_now(step)
            copies.take(copy.copy(self._position), self._checkpoint_info(), state, measured)
            copies.pace(step)
        if copies.is_due(step + 1):
            copies.complete()

    def _request_measured(self) -> None:
        self.loop.before_request()
        self.readback.request(self.position.step)

    def _collect_measured(self) -> None:
        """Write the requested steps to metrics.jsonl. Raises NotFinite."""
        with self.ring.waiting():
            measured = self.readback.collect(self.position.step)
        with self.records_lock:
            self._write_steps(measured)
        self.saves.poll()
        self.progress.restart_clock()

    def _write_steps(self, measured: list[Measured]) -> None:
        """Write the oldest pending steps to metrics.jsonl. The caller holds `records_lock`. Raises NotFinite."""
        rate, now = round(self.progress.throughput(), 1), time.time()
        record: dict[str, Any] = {}
        lines: list[dict[str, Any]] = []
        for each in measured:
            digest_of_step, values = digest.take(each.values)
            fields = self.loop.record(each.step, values)
            if digest_of_step is not None:
                fields[DIGEST] = digest_of_step
            record = {"step": each.step + 1, **fields, "samples_per_s": rate, "time": now}
            lines += self.loop.lines(record)
            if self.copies is not None:
                self.copies.count(each.step + 1, self.position, self.metrics.count + len(lines))
        self.readback.remove(len(measured))
        if lines:
            self.metrics.append(lines, self.progress.of_step(record))

    def _checkpoint_info(self) -> CheckpointInfo:
        position = self.position
        current = position.step in (position.validated, position.measured)
        metrics = {name: value for name, value in position.metrics.items() if current and value is not None}
        return CheckpointInfo(position.step, self.loop.epoch(), position.samples, metrics, self.numerics, self._yaml)

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"position": asdict(self.position), **self.loop.state()}

    # A rescue, in another thread

    def freeze(self, timeout_s: float) -> bool:
        """Let the state change no more, and write the steps of the newest whole one to the metrics: from now on
        `position` is its. For threads other than the one that trains. False when no state is whole.

        A GPU may still do what is queued, if the rank that it waits for comes back. Then another state is whole, and
        this is called again. Raises DeviceSilent when the device does not answer.
        """
        self._frozen_live = False
        self._frozen_live = self.restored and not self._torn and self._freeze(timeout_s)
        return self._frozen_live

    def advance(self, gathered: Gathered) -> bool:
        """Do the update that the frozen state lacks to be that of `gathered.step`, at most once; see LateUpdate. Call
        `freeze` again. False if nothing has changed."""
        late = self.late_update
        if late is None or late.tried or not self._frozen_live or self.position.step != gathered.step - 1:
            return False
        held = self.ring.held
        self._frozen_live, self._torn = False, True
        done = late.do(gathered)
        if done is not None:
            if held is not None:
                self._position = held.position
                self.readback.forget(held.position.step)
            self._count_step(*done)
        self._torn = False
        return done is not None

    @property
    def can_advance(self) -> bool:
        """Whether `advance` may do an update."""
        return self.late_update is not None and not self.late_update.tried

    @property
    def has_lost_state(self) -> bool:
        """Whether what this rank trains with is no whole state. After `freeze`."""
        return not self._frozen_live

    @property
    def steps_done(self) -> int:
        """How many steps this rank has done, as far as it knows without its device."""
        return self.readback.first_step if self.queue.runs_ahead else self._position.step

    @property
    def gathered(self) -> Gathered | None:
        """What all ranks have gathered last, as far as this one knows, for those that wait for it. After `freeze`."""
        if self.late_update is None or (self.queue.runs_ahead and not self._frozen_live):
            return None
        return self.late_update.gathered(self.position.step)

    def freeze_copies(self, timeout_s: float) -> list[SavableCopy]:
        """Let the copies in host memory change no more. Call after `freeze`. Returns what can be saved of them."""
        copies = self.copies
        if copies is None or not self.restored:
            return []

        def write(measured: Sequence[Measured]) -> None:  # of a rank that cannot read them from its device any more
            if self._lock_records(timeout_s):
                with contextlib.suppress(NotFinite):
                    self._write_steps([one for one in measured if one.step >= self.readback.first_step])

        copies.freeze(write)
        return self._held_copies(copies)

    @contextlib.contextmanager
    def frozen(self, moment: Moment | None = None) -> Iterator[FrozenState]:
        """The state that `freeze` has frozen, or what copies hold at a place, to be saved by a thread other than the
        one that trains. Raises StateChanged if this rank holds nothing there, and DeviceSilent."""
        own = self.copies.own_at(moment) if self.copies and moment else None
        copies = self.copies.at(moment) if self.copies and moment else {}
        live = own is None and self._frozen_live and moment in (None, self.position.moment)
        if not live and not copies:
            raise StateChanged
        if live:
            self.position.records = self.metrics.count

        def hold() -> FrozenState:
            return FrozenState(
                store=self.store,
                info=own.info if own else self._checkpoint_info(),
                state=self._frozen_state() if live else None,
                world_size=self.size,
                before_commit=self.metrics.rewrite_tail,
                buffers=self._chunks,
                is_whole=self.ring.is_whole if live else lambda: True,
                place=self.place,
                copies=copies,
                structure=own.structure if own else None,
                read=self.queue.read,
            )

        yield self.queue.read(hold) if live else hold()

    def _freeze(self, timeout_s: float) -> bool:
        if not self.ring.freeze(timeout_s):
            return False
        if not self._lock_records(timeout_s):
            return False
        while True:
            self._frozen = self._whole_position()
            measured, unchanged = self.queue.read(partial(self._measured_before, self._frozen.step))
            if self.ring.is_whole():
                break
            if not self.ring.freeze(timeout_s):
                return False
        try:
            self._write_steps(measured)
        except NotFinite:
            return False
        return unchanged

    def _measured_before(self, step: int) -> tuple[list[Measured], bool]:
        """What the steps before this one measured, and whether the chosen state is still what it was."""
        return self.readback.read_now(step), self._unchanged()

    def _held_copies(self, copies: Copies) -> list[SavableCopy]:
        """What can be saved of the frozen copies: nothing after a step that was not finite."""
        if not self.restored:
            return []
        return [
            *(SavableCopy(copy.position.moment, self.place.shard, len(copy.data), True) for copy in copies.own()),
            *(SavableCopy(copy.moment, copies.kept_shard, len(copy.data), False) for copy in copies.kept()),
        ]

    def _lock_records(self, timeout_s: float) -> bool:
        """Let the thread that trains write no more lines; once, for good."""
        self._records_locked = self._records_locked or self.records_lock.acquire(timeout=timeout_s)
        return self._records_locked

    def _unchanged(self) -> bool:
        """Whether the chosen state is still what it was, except for what changes within updates."""
        held = self.ring.held
        if not self.rescuable:  # of no interest: nobody can save it
            return True
        return self.loop.unchanged() if held is None else held.state.unchanged()

    def _whole_position(self) -> Position:
        """A copy of the position of the state that the ring has chosen."""
        held, now = self.ring.held, self.position
        position = copy.copy(self._position if held is None else held.position)
        # These follow the lines written so far, and lines are written only of steps that the device has finished.
        position.loss_sum, position.loss_samples, position.skipped = now.loss_sum, now.loss_samples, now.skipped
        return position

    def _frozen_state(self) -> dict[str, Any]:
        held = self.ring.held
        return {"position": asdict(self.position), **(self.loop.state() if held is None else held.state.state)}


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
