"""What any loop of one attempt has: a position, a whole state, the agreed stop, metrics and saves."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manager import RETRY_LAST_S, CheckpointManager
from trainer.checkpoint.pack import load
from trainer.checkpoint.position import Position
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.writer import CheckpointInfo, save_alone
from trainer.config.config import Config
from trainer.observe.progress import Progress
from trainer.observe.startup import StartupTimer
from trainer.observe.tensorboard import TensorBoard
from trainer.records.metrics import MetricsFile
from trainer.records.plan import Plan
from trainer.rundir import RunDir
from trainer.world.device import LastUpdate, changed_numerics, describe_numerics, start_copy_to_host
from trainer.world.group import Group
from trainer.world.stop import Stop
from trainer.world.watchdog import Watchdog

WORD_S = 1.0  # how often rank 0 says whether it is time for a save


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and train.nonfinite says that the run is to fail of it."""


@dataclass(frozen=True)
class AttemptContext:
    """What an attempt gives to its loop."""

    config: Config
    run: RunDir
    group: Group
    stop: Stop
    watch: Watchdog
    phases: StartupTimer
    closing: contextlib.ExitStack  # is closed when no rank works or saves any more


class Loop(ABC):
    """Trains. Every rank runs one, in step with the others.

    Between two updates the state is whole, and the same on every rank. `whole` is held while it changes: who takes it
    and keeps it, in another thread, has the state of the last whole step for good.
    """

    def __init__(self, means: AttemptContext) -> None:
        self.config, self.group, self.watch, self.phases = means.config, means.group, means.watch, means.phases
        run, world, watch = means.run, means.group.world, means.watch
        self.rank, self.size = world.rank, world.size
        self.stop = means.stop
        self.store = CheckpointStore(run.checkpoints)
        self.metrics = MetricsFile(run.metrics, writes=self.rank == 0)
        self.progress = Progress(prints=self.rank == 0)
        self.tensorboard = TensorBoard(run, self.config.train.log_every, writes=self.rank == 0)
        stopping = lambda: self.stop.signal is not None  # noqa: E731
        self.saves = CheckpointManager(
            self.config.checkpoint, run, self.store, self.group, self.metrics, self.progress, watch, stopping
        )
        means.closing.callback(self.saves.close)
        self.numerics = describe_numerics(self.group.device)
        self.position = Position()
        self.whole = threading.Lock()
        self.last_update = LastUpdate(self.group.device)
        self.restored = False
        # What finished steps measured and is not yet in metrics.jsonl, by step (from 0): scalars on the device.
        self.pending: list[tuple[int, Mapping[str, Tensor]]] = []
        # For so many of them, and whether for rank 0's word too, see `_ask`.
        self._asked: tuple[int, bool, Callable[[], list[float]]] | None = None
        self._next_word = 0  # step from which on that is asked for
        # A step later a GPU has it, and is at work on that step: to wait at once would be to let it run dry.
        self.reads_one_step_late = self.group.device.type == "cuda"
        self._first = 1  # step to be done by this attempt
        self._plan = run.plan

    @abstractmethod
    def restore(self, step: int | None) -> None:
        """Put in the checkpoint of `step`, or the initial state when there is none."""

    @abstractmethod
    def _train(self) -> bool:
        """Train from the position on. True when the run is finished, False when the ranks agreed to stop."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds, besides the position: references, the same on every rank."""

    @abstractmethod
    def _epoch(self) -> int:
        """The epoch, from 1, that the last finished step belongs to."""

    @abstractmethod
    def _record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        """What metrics.jsonl shall say of a finished step (from 0). Raises NotFinite."""

    def run(self) -> bool:
        """Train and save. True when the run is finished, False when the ranks agreed to stop."""
        # See Trainer.__call__. What there is by now is there to stay, and is never walked over again.
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
        """Begin to save this position, see `CheckpointManager.start_save`. All ranks call it together."""
        self.flush()
        self.position.records = self.metrics.count
        self.saves.start_save(self.position, self._about(), self._saved())
        self.progress.restart_clock()

    def freeze(self, timeout_s: float) -> bool:
        """Keep the state as it is from now on, and enter the steps that it has in the metrics. For another thread than
        the one that trains. False when there is no whole state."""
        if not (self.whole.acquire(timeout=timeout_s) and self.restored):
            return False
        try:
            with self.last_update.beside():
                self._enter(len(self.pending), torch.cat(self._measured()).tolist() if self.pending else [])
        except (NotFinite, TimeoutError):
            return False
        return True

    def save_alone(self, tag: str) -> None:
        """Save a frozen state without the other ranks. Raises CheckpointError."""
        self.position.records = self.metrics.count
        with self.last_update.beside():
            save_alone(self.store, self._about(), self._saved(), self.size, self.metrics.rewrite_tail, tag)

    def flush(self) -> None:
        """Enter all finished steps in metrics.jsonl; here the CPU waits for the device. Raises NotFinite."""
        if self._asked is not None:
            self._hear()
        self._ask()
        self._hear()

    def _ask(self) -> None:
        """Have the device send what the steps so far have measured; until then it stays there, and a step waits for
        nothing. About once a second it sends rank 0's word too, since the ranks' clocks differ: in how many steps the
        next is to be asked for, 0 when a save is due. A collective."""
        sent = self._measured()
        if asks := self.position.step >= self._next_word:
            left_s = self.saves.due_in_s()
            steps = 0 if left_s <= 0 else max(1, min(left_s, WORD_S) // self.progress.step_s())
            word = torch.full((1,), steps, dtype=torch.float64, device=self.group.device)
            self.group.broadcast([word])
            sent.append(word)
        self._asked = len(self.pending), asks, start_copy_to_host(torch.cat(sent)) if sent else list

    def _hear(self) -> None:
        """Enter in metrics.jsonl what was asked for. Raises NotFinite."""
        assert self._asked is not None
        (count, asks, answer), self._asked = self._asked, None
        values = answer()
        if asks:
            self.saves.due |= values[-1] == 0
            self._next_word = self.position.step + int(values[-1])
        with self.whole:
            self._enter(count, values)
        self.saves.poll()
        self.progress.restart_clock()

    def _planned(self, total_steps: int, batch_size: int) -> None:
        """It is known how long the run is; `launch.py status` wants to know it too."""
        self.progress.total_steps = total_steps
        if self.rank == 0:
            plan: Plan = {"total_steps": total_steps, "batch_size": batch_size}
            with contextlib.suppress(OSError):  # who asks for the run's status will see less
                self._plan.write_text(json.dumps(plan) + "\n")

    def _load(self, step: int) -> dict[str, Any]:
        """The state in the checkpoint of `step`, whose position becomes that of the loop."""
        manifest = self.store.manifest(step)
        state = load(self.store.path(step), manifest)
        self.position = Position(**state.pop("position"))
        if changed := changed_numerics(manifest.numerics, self.numerics):
            self.progress.say(f"WARNING: {changed}")
        return state

    def _begin(self) -> None:
        """The state is put in: what metrics.jsonl has beyond it goes."""
        self.saves.saved = copy.copy(self.position)
        self.metrics.rewind(self.position.records)
        self._first = self.position.step + 1
        self.restored = True
        self.phases.done("restore")

    def _step_done(self, samples: int, ends_epoch: bool) -> None:
        """What comes after each step, once `whole` is free."""
        step = self.position.step
        self.progress.count(samples)
        every = self.config.checkpoint.every_steps
        self.saves.due |= every is not None and step % every == 0
        if self._asked is not None:
            self._hear()
        if ends_epoch:
            self.flush()
        elif step % self.config.train.log_every == 0:
            self._ask()
            if not self.reads_one_step_late:
                self._hear()
        if step == self._first:
            self.phases.done("first step")
            self.progress.say(f"first step after {self.phases}")
            self.tensorboard.start()

    def _end_epoch(self, record: dict[str, Any]) -> None:
        """An epoch ends after the last finished step; `record` is its line of metrics.jsonl."""
        with self.whole:
            self._enter_epoch(record)
        every = self.config.checkpoint.every_epochs
        self.saves.due |= every is not None and record["epoch"] % every == 0
        self.progress.print_epoch(record)
        self.progress.restart_clock()

    def _enter_epoch(self, record: dict[str, Any]) -> None:
        self.position.end_epoch(record)
        self.metrics.append([record])

    def _about(self) -> CheckpointInfo:
        position = self.position
        measured = {name: value for name, value in position.metrics.items() if value is not None}
        current = position.validated == position.step
        return CheckpointInfo(
            position.step, self._epoch(), position.samples, measured if current else {}, self.numerics
        )

    def _saved(self) -> dict[str, Any]:
        return {"position": asdict(self.position), **self._state()}

    def _save_last(self) -> None:
        """The save at a stop or at the end, which the ranks wait for."""
        self.watch.enter("saving")
        self.saves.last = True
        self.save()
        self.saves.wait()
        while not self.saves.saved.same_place(self.position):
            time.sleep(RETRY_LAST_S)
            self.save()
            self.saves.wait()

    def _measured(self) -> list[Tensor]:
        """In one tensor of one dimension, if there is any."""
        measured = [tensor for _, measured in self.pending for tensor in measured.values()]
        return [torch.stack(measured).double()] if measured else []

    def _enter(self, count: int, values: Iterable[float]) -> None:
        """Enter the first `count` pending steps, given what they measured, in metrics.jsonl."""
        rate, now, each = round(self.progress.throughput(), 1), time.time(), iter(values)
        records = [
            {
                "step": step + 1,
                **self._record(step, {k: next(each) for k in measured}),
                "samples_per_s": rate,
                "time": now,
            }
            for step, measured in self.pending[:count]
        ]
        del self.pending[:count]
        if records:
            self.metrics.append(records)
            self.progress.print_step(records[-1])


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
