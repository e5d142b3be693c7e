"""What every training loop has: a position, a state, the agreed stop, metrics and saves."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laststep.checkpoint.manager import RETRY_LAST_S, CheckpointManager, Position
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.store import START_S, CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.checks import check_replicas
from laststep.config.config import Config
from laststep.loops.copies import Copies, open_link
from laststep.loops.readback import Measured, Readback
from laststep.loops.rescued import Rescued
from laststep.observe.progress import Progress, StartupTimer
from laststep.observe.tensorboard_writer import TensorBoard
from laststep.optim.build import SORTED
from laststep.ranks.device import changed_numerics, describe_numerics
from laststep.ranks.disk import Patience
from laststep.ranks.group import Group
from laststep.ranks.stop import Stop
from laststep.ranks.watchdog import Watchdog
from laststep.ranks.world import ShardPlace
from laststep.records.metrics import MetricsFile
from laststep.rundir import RunDir


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


class Loop(Rescued):
    """Trains. Every rank runs one, in step with the others. Between two updates the state is the same on every rank,
    and can be saved; see `Rescued` for when one of them dies."""

    def __init__(self, context: AttemptContext) -> None:
        self.config, self.group, self.stop, self.watch = context.config, context.group, context.stop, context.watch
        self.startup, run, world = context.phases, context.run, context.group.world
        super().__init__(self.group.device)
        self.rank, self.size = world.rank, world.size
        self.place = ShardPlace(0, 1, self.rank, self.size)
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
        # A GPU is given the next step before the values are collected: waiting for them at once would leave it idle.
        self.reads_one_step_late = self.group.device.type == "cuda"
        at_any_size = self.config.train.shares is not None
        sharding = self.config.train.sharding
        group = self.group
        numerics = describe_numerics(group.device, world, group.backend, at_any_size, sharding, group.nccl_graph)
        self.numerics = numerics | SORTED
        self._plan, self._yaml = run.plan, self.config.to_yaml()
        self.watch.follow(self.ring.passed)
        self._first_step = 1  # the first step of this attempt, from 1

    @abstractmethod
    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Load the checkpoint; None: start from the initial state."""

    @abstractmethod
    def _train(self) -> bool:
        """Train from the position on. True when the run is finished, False when the ranks agreed to stop."""

    @abstractmethod
    def _epoch(self) -> int:
        """The epoch of the last finished step, from 1."""

    @abstractmethod
    def _record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        """The fields of a finished step (from 0) in metrics.jsonl. Raises NotFinite."""

    def _derived(self, line: dict[str, Any]) -> dict[str, Any]:
        """Hook: a line of metrics.jsonl with what follows from its values."""
        return line

    def _sync_measured(self) -> None:
        """Hook: every rank calls this before it requests measured values, so it may run collectives."""

    def run(self) -> bool:
        """Train and save. True when the run is finished, False when the ranks agreed to stop."""
        # Trainer.__call__ turned the garbage collector off. Objects that exist now stay, so it never has to visit them.
        gc.freeze()
        gc.enable()
        finished = False
        try:
            finished = self._train()
        finally:
            if not finished:
                self.tensorboard.end()
        self._save_last()
        return finished

    def save(self) -> None:
        """Start a save of this position, see `CheckpointManager.start_save`. A collective."""
        self.flush()
        self.position.records = self.metrics.count
        self.saves.start_save(self.position, self._checkpoint_info(), self._checkpoint_state())
        self.progress.restart_clock()

    def flush(self) -> None:
        """Write all finished steps to metrics.jsonl; the CPU waits for the device. A collective. Raises NotFinite."""
        if self.readback.requested:
            self._collect_measured()
        self._request_measured()
        self._collect_measured()

    def _request_measured(self) -> None:
        self._sync_measured()
        self.readback.request(self.position.step)

    def _collect_measured(self) -> None:
        """Write the requested steps to metrics.jsonl. Raises NotFinite."""
        with self.ring.waiting():
            measured = self.readback.collect(self.position.step)
        with self.records_lock:
            self._write_steps(measured)
        self.saves.poll()
        self.progress.restart_clock()

    def _announce_length(self, total_steps: int, batch_size: int) -> None:
        """Publish the run's length: for the progress lines, and in the run folder for `launch.py status`."""
        self.progress.total_steps = total_steps
        if self.rank == 0:
            _write_plan(self._plan, total_steps, batch_size)

    def _take_position(self, checkpoint: SharedCheckpoint) -> None:
        """Take over the position of a checkpoint, and warn if its steps were computed in another way."""
        self._position = Position(**checkpoint.position)
        if changed := changed_numerics(checkpoint.manifest.numerics, self.numerics):
            self.progress.say(f"WARNING: {changed}")

    def _finish_restore(self) -> None:
        """The state is in place: cut the lines of metrics.jsonl beyond it, and allow rescues."""
        with self.ring.update():
            pass
        self.saves.saved = copy.copy(self.position)
        patience_s = min(START_S, self.config.launch.hang_timeout_s / 2)  # the other ranks wait
        self.metrics.begin(self.position.records, Patience(patience_s, self.progress.say))
        self._first_step = self.position.step + 1
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

    def _step_done(self, samples: int, ends_epoch: bool) -> None:
        """What follows each step."""
        step = self.position.step
        self.progress.count(samples)
        self.saves.due |= _is_due(step, self.config.checkpoint.every_steps)
        if self.readback.requested:
            self._collect_measured()
        if ends_epoch:
            self.flush()
        elif step % self.config.train.log_every == 0:
            self._request_measured()
            if not self.reads_one_step_late:
                self._collect_measured()
        if step == self._first_step:  # from now on the optimiser has all of its state
            self.saves.prepare(self._checkpoint_state())
            self.startup.done("first step")
            self.progress.say(f"first step after {self.startup}")
            self.tensorboard.start()

    def _end_epoch(self, record: dict[str, Any]) -> None:
        """End the epoch after the last finished step; `record` is its line of metrics.jsonl."""
        self.ring.synchronize()  # no step can be rescued from now on that does not have this line
        with self.records_lock:
            self._write_epoch(record)
        self.saves.due |= _is_due(record["epoch"], self.config.checkpoint.every_epochs)
        self.progress.print_epoch(record)
        self.progress.restart_clock()

    def _write_epoch(self, record: dict[str, Any]) -> None:
        """Write the epoch's line of metrics.jsonl. The caller holds `records_lock`."""
        self.position.end_epoch(record)
        self.metrics.append([record])

    def _checkpoint_info(self) -> CheckpointInfo:
        position = self.position
        current = position.step in (position.validated, position.measured)
        metrics = {name: value for name, value in position.metrics.items() if current and value is not None}
        return CheckpointInfo(position.step, self._epoch(), position.samples, metrics, self.numerics, self._yaml)

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"position": asdict(self.position), **self._state()}

    def _save_last(self) -> None:
        """Save at a stop or at the end of the run, and wait until the checkpoint is committed."""
        self.watch.enter("saving")
        self.saves.last = True
        while True:
            self.save()
            self.saves.wait()
            if self.saves.saved.same_place(self.position):
                return
            time.sleep(RETRY_LAST_S)

    def _write_steps(self, measured: list[Measured]) -> None:
        """Write the oldest pending steps to metrics.jsonl. The caller holds `records_lock`. Raises NotFinite."""
        rate, now = round(self.progress.throughput(), 1), time.time()
        record: dict[str, Any] = {}
        lines: list[dict[str, Any]] = []
        for each in measured:
            record = self._derived(
                {"step": each.step + 1, **self._record(each.step, each.values), "samples_per_s": rate, "time": now}
            )
            lines += self._with_validation(record)
            if self.copies is not None:
                self.copies.count(each.step + 1, self.position, self.metrics.count + len(lines))
        self.readback.remove(len(measured))
        if lines:
            self.metrics.append(lines)
            self.progress.print_step(record)

    def _with_validation(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Hook: the line of a step, and that of a validation within the step if there was one."""
        return [record]


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0


def _write_plan(path: Path, total_steps: int, batch_size: int) -> None:
    with contextlib.suppress(OSError):  # `status` then shows less
        path.write_text(json.dumps({"total_steps": total_steps, "batch_size": batch_size}) + "\n")


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
