"""Tasks that tests train: small, with everything random in it, and stopped at an exact place."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.checkpoint.store import CheckpointStore
from trainer.config.config import Config
from trainer.data import image_files
from trainer.loops.learner import Learner
from trainer.loops.loop import Loop
from trainer.observe import progress, tensorboard
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.world import watchdog
from trainer.world.launchers import detect_world


def await_agreement() -> None:
    """Until the ranks have agreed on where to stop."""
    for agreement in [thread for thread in threading.enumerate() if thread.name == "stop"]:
        agreement.join(timeout=60)
        assert not agreement.is_alive(), "the ranks did not agree on a stop within 60 s"


def read_one_step_late() -> None:
    """What a step measured comes a step later, as on a GPU."""
    begin = Loop.__init__

    def begin_late(self: Loop, *words: Any, **more: Any) -> None:
        begin(self, *words, **more)
        self.reads_one_step_late = True

    Loop.__init__ = begin_late  # type: ignore[method-assign]


def note_decoding() -> None:
    """A byte in LASTSTEP_TEST_NOTES for each image that is decoded."""
    decode = image_files.decode

    def noted(content: bytes, least: int) -> Any:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "ab", buffering=0) as notes:
            notes.write(b".")
        return decode(content, least)

    image_files.decode = noted


def share_nothing() -> None:
    """As of a container each: no rank finds what another one has on the disk."""
    opened = os.open

    def alone(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if os.fsdecode(path).endswith("/decoded") and not flags & os.O_CREAT:
            raise FileNotFoundError(path)
        return opened(path, flags, *more, **others)

    os.open = alone


class Signalled(Classification):
    """Signals itself in the middle of one unit of work, and holds that until the ranks have agreed on where to stop.

    LASTSTEP_TEST_SIGNAL is "SIGTERM step 5 rank 1" or "SIGUSR2 validation 2 rank 0": in that step, or in that batch of
    the attempt's first validation, both counted from 1 in this attempt. A stop is so forced to one exact place.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.warm = False  # the first call is the warm-up's, which does not count
        self.done = {"step": 0, "validation": 0}
        name, self.unit, place, _, ranks = (os.environ.get("LASTSTEP_TEST_SIGNAL") or "SIGTERM never 0 rank 0").split()
        self.number = signal.Signals[name]
        self.place = int(place)
        self.here = str(detect_world().rank) in ranks.split(",")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.warm and self.here:
            unit = "step" if model.training else "validation"
            self.done[unit] += 1
            if unit == self.unit and self.done[unit] == (self.place - 1) * self.per_unit(unit) + 1:
                os.kill(os.getpid(), self.number)
                await_agreement()
        self.warm = True
        return super().step(model, batch)

    def per_unit(self, unit: str) -> int:
        """Calls of `step` per unit of work."""
        return self.config.train.accumulate if unit == "step" else 1


class SignalledElsewhere(Classification):
    """Rank 1 signals itself where no step is under way: LASTSTEP_TEST_WHERE is "preparing", "warming-up", "restoring",
    "saving" (a save's files are written, and are not committed before the ranks have agreed to stop), "ending" (the
    last save), or "everywhere" (every signal there is, to both ranks and to their loader workers)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rank = detect_world().rank
        self.where = os.environ.get("LASTSTEP_TEST_WHERE", "nowhere")
        self.steps = -1
        if self.where == "restoring" and self.rank == 1:
            self.before(Loop, "_finish_restore")
        if self.where == "ending" and self.rank == 1:
            self.before(Loop, "_save_last")
        if self.where == "saving" and self.rank == 0:
            self.before(CheckpointStore, "commit", agree=True)

    def before(self, owner: Any, name: str, agree: bool = False) -> None:
        """Signal before a method runs for the first time."""
        method = getattr(owner, name)

        def signalled(*words: Any, **more: Any) -> Any:
            setattr(owner, name, method)
            os.kill(os.getpid(), signal.SIGTERM)
            if agree:
                await_agreement()
            return method(*words, **more)

        setattr(owner, name, signalled)

    def prepare(self) -> None:
        if self.where == "preparing" and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.where == "warming-up" and self.rank == 1 and self.steps == -1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.steps += 1
        if self.where == "everywhere" and self.steps == 3:
            for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
                for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
                    os.kill(process.pid or 0, number)
        return super().step(model, batch)


class Poisoned(Classification):
    """The loss of the 5th step of the run is not a number, on rank 1 alone: a bad sample."""

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        if model.training and detect_world().rank == 1 and self.poisoned():
            output["loss"] = output["loss"] * float("nan")
        return output

    def poisoned(self) -> bool:
        """Whether this is that step. The warm-up's call comes first."""
        self.calls = getattr(self, "calls", -1) + 1
        return self.calls == 5


class PoisonedAndKilled(Poisoned):
    """And rank 0 dies in the step after that, before anyone has looked at a loss."""

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        self.steps = getattr(self, "steps", -1) + model.training
        if detect_world().rank == 0 and self.steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return output


class Slow(Classification):
    """Rank 1 takes its time for every step: LASTSTEP_TEST_SLOW is how long, and how often the watchdog looks, in s."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pause_s, watchdog.SLOW_WINDOW_S = map(float, os.environ["LASTSTEP_TEST_SLOW"].split())

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if detect_world().rank == 1:
            time.sleep(self.pause_s)
        return super().step(model, batch)


class SlowData(Classification):
    """Each sample takes its time, and the rank asks often what that costs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        progress.WINDOW_S = 0.2

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        training, validation = super().datasets()
        return Delayed(training), validation


class Delayed(Dataset[Any]):
    """A data set on a slow disk."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return self.dataset[index]


class Prepared(Classification):
    """Writes down who prepares the data and who opens it, in the order of time."""

    def note(self, what: str) -> None:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "a") as notes:
            notes.write(f"{what} {detect_world().rank}\n")

    def prepare(self) -> None:
        self.note("begins")
        time.sleep(0.2)  # longer than any rank takes to come here: ranks that did not wait would be seen
        self.note("ends")

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        self.note("opens")
        return super().datasets()


class Linear(Classification):
    """Without batch norm and dropout, so that how a batch is shared out among the ranks makes no difference at all."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(self.channels * self.image_size**2, self.classes or 0))


class _Numbered(Dataset[Any]):
    """Tells with each sample its index, and a random draw, which tells the epoch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        draw = random.random()
        return (*self.dataset[index], index, draw)


class Recorded(Signalled):
    """Every rank notes in the file LASTSTEP_TEST_NOTES what its steps have learned from: a line of JSON for each."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        learn = Learner.learn

        def noted(learner: Learner, step: int, micro_batches: Sequence[tuple[Any, int]], samples: int) -> None:
            learn(learner, step, micro_batches, samples)
            learned = [
                sample
                for (
                    *_,
                    indices,
                    draws,
                ), count in micro_batches  # one that counts for nothing holds samples all the same
                for sample in zip(indices.tolist()[:count], draws.tolist())
            ]
            with open(os.environ["LASTSTEP_TEST_NOTES"], "a") as notes:
                notes.write(json.dumps({"step": step, "rank": detect_world().rank, "samples": learned}) + "\n")

        Learner.learn = noted  # type: ignore[method-assign, assignment]

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        train, val = super().datasets()
        return _Numbered(train), _Numbered(val)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        *batch, _, _ = batch
        return super().step(model, batch)


class RecordedLinear(Linear, Recorded):
    """Both."""


class FullDisk(Classification):
    """The disk takes no file of over 100 kB once these steps are done: LASTSTEP_TEST_FULL is "4 7" for 4, 5 and 6."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.full = range(*map(int, os.environ["LASTSTEP_TEST_FULL"].split()))

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        limit = 100_000 if self.steps in self.full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return super().step(model, batch)


class Faulty(Classification):
    """Something befalls some ranks in the middle of one step of the attempt, counted from 1.

    LASTSTEP_TEST_FAULT is "kill step 5 rank 1,2", or "halt" (SIGSTOP), "sleep" (stuck in user code), "spin" (stuck
    with the interpreter's lock held), "raise" (an error of its own), "worker" (its loader worker is killed),
    "gpu-memory" (the error of a GPU that has none left), "memory" (a limit on its own).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.kind, _, place, _, ranks = os.environ.get("LASTSTEP_TEST_FAULT", "none step 0 rank 0").split()
        self.place = (int(place) - 1) * config.train.accumulate + 1
        self.here = str(detect_world().rank) in ranks.split(",")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        output = super().step(model, batch)  # batch norm has counted this step's samples by now
        if self.here and model.training and self.steps == self.place:
            self.befall()
        return output

    def befall(self) -> None:
        """What the name says."""
        print(f"fault: {self.kind}", flush=True)
        if self.kind in ("kill", "halt"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif self.kind == "sleep":
            threading.Event().wait(600)
        elif self.kind == "spin":
            re.match(r"(a+)+$", "a" * 60 + "b")  # takes longer than the universe is old
        elif self.kind == "worker":
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)
        elif self.kind == "raise":
            raise ValueError("a bad sample")
        elif self.kind == "gpu-memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")  # as a GPU's allocator
        elif self.kind == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**20, resource.RLIM_INFINITY))
            try:
                torch.empty(2**30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Drawn(Faulty):
    """Like Faulty, or "stop" (SIGTERM); and the curves are written at once, as in an attempt that lasts. What befalls
    a rank waits for that."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        tensorboard.EVERY_S = 0.01

    def befall(self) -> None:
        self.await_curves()
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
            await_agreement()
        else:
            super().befall()

    def await_curves(self) -> None:
        """Until the newest event file ends with the newest point."""
        from trainer.observe.events import Points

        run = Trainer(self.config).run
        *_, newest = Points(run.metrics, self.config.train.log_every)
        deadline = time.monotonic() + 60
        while not any(path.read_bytes().endswith(newest.record()) for path in run.tensorboard.glob("*")):
            assert time.monotonic() < deadline, "the curves were not written within 60 s"
            time.sleep(0.01)


class Broken(Classification):
    """Fails in the first step of rank 1, of every attempt: a bug."""

    fails_at = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.fails = detect_world().rank == 1

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if self.fails and self.steps == self.fails_at:
            raise ValueError("a bad sample")
        return super().step(model, batch)


class FailsOnce(Broken):
    """Fails in the 80th step of a job's first attempt, as of a bug that shows once in a million steps."""

    fails_at = 80

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fails = self.fails and detect_world().restart == 0


class Unprepared(Classification):
    """Rank 1 cannot read the data."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        if detect_world().rank == 1:
            raise FileNotFoundError("train/0001.jpg")
        return super().datasets()


class DiesInTheSave(Signalled):
    """Like Signalled; and the ranks that LASTSTEP_TEST_DIES names are killed when the save of the stop begins."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if str(detect_world().rank) in os.environ["LASTSTEP_TEST_DIES"].split(","):
            Loop._save_last = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


class Held(Classification):
    """Each rank waits in one step, for ever or until it may go on: LASTSTEP_TEST_HOLD is "5 FOLDER" for the 5th step of
    the attempt. A rank that waits makes the file FOLDER/RANK; the test makes FOLDER/go.

    With "5 FOLDER torn" the step is done on some ranks only: rank 0 waits with its gradients, before it changes the
    weights, and the others in the next step.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.rank = detect_world().rank
        place, folder, *torn = os.environ.get("LASTSTEP_TEST_HOLD", "0 nowhere").split()
        self.place = int(place)
        self.folder = Path(folder)
        if torn and self.rank == 0:
            self.after_the_gradients_of(self.place - 1)
            self.place = 0
        elif torn:
            self.place += 1

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if model.training and self.place and self.steps == self.place:
            self.hold()
        return super().step(model, batch)

    def hold(self) -> None:
        """Say so, and wait."""
        (self.folder / str(self.rank)).touch()
        deadline = time.monotonic() + 600
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def after_the_gradients_of(self, step: int) -> None:
        """Hold there."""
        learn = Learner.learn

        def held(learner: Learner, number: int, micro_batches: Sequence[tuple[Any, int]], samples: int) -> None:
            learn(learner, number, micro_batches, samples)
            if number == step:
                self.hold()

        Learner.learn = held  # type: ignore[assignment, method-assign]


class AwaitsStop(Classification):
    """Holds each rank in its eighth step of an attempt until the ranks have agreed to stop: whatever sends a signal
    from outside, however slowly, finds the run there."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if model.training and self.steps == 8:
            sys.stdout.write("holds in its step 8\n")  # in one piece, where ranks share a terminal
            sys.stdout.flush()
            await_agreement()
        return super().step(model, batch)


class KilledOnce(Classification):
    """Rank 1 is killed in its fifth step, unless torchrun has started it again by then."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.dies = detect_world().rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if self.dies and self.steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(model, batch)
