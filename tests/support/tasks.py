"""Tasks that tests train, by the names that configurations give them: stopped at an exact place, slow, faulty, killed,
or with a transformer in layers that are sharded one by one.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer
from torch.utils.data import Dataset

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.data import datasets
from laststep.loops.engine import Engine
from laststep.loops.learner import Learner
from laststep.ranks import watchdog
from laststep.ranks.group import Group
from laststep.ranks.launchers import detect_world
from laststep.records import progress, tensorboard_writer
from laststep.records.metrics import MetricsFile, read_lines
from laststep.rundir import RunDir
from laststep.tasks.classification import Classification
from laststep.trainer import Trainer
from tests.support.project import DEADLINE_S, wait_until

__all__ = [
    "AwaitsStop",
    "Broken",
    "Delayed",
    "DiesInTheSave",
    "Drawn",
    "FailsOnce",
    "Faulty",
    "FullDisk",
    "Held",
    "HoldsTheLock",
    "KilledOnce",
    "Linear",
    "ManyShapes",
    "OwnOptimizer",
    "PartsLate",
    "Poisoned",
    "PoisonedAndKilled",
    "Prepared",
    "Recorded",
    "RecordedLinear",
    "RecordedUnhurried",
    "Signalled",
    "SignalledElsewhere",
    "SignalledTransformer",
    "Slow",
    "SlowData",
    "SmallSignalled",
    "Tokens",
    "Unhurried",
    "Unprepared",
    "await_agreement",
    "in_any_order",
    "note_decoding",
    "read_one_step_late",
    "share_nothing",
]


def await_agreement() -> None:
    """Wait until the ranks have agreed where to stop."""
    for agreement in [thread for thread in threading.enumerate() if thread.name == "stop"]:
        agreement.join(timeout=DEADLINE_S)
        assert not agreement.is_alive(), f"the ranks did not agree on a stop within {DEADLINE_S:.0f} s"


def read_one_step_late() -> None:
    """Let a step's measurements arrive one step later, as on a GPU."""
    begin = Engine.__init__

    def begin_late(self: Engine, *words: Any, **more: Any) -> None:
        begin(self, *words, **more)
        self.reads_one_step_late = True

    Engine.__init__ = begin_late  # type: ignore[method-assign]


def in_any_order(parameters: Iterable[Tensor]) -> list[Tensor]:
    """In another order in each process, as the elements of a set of objects or of strings are."""
    return random.SystemRandom().sample(listed := list(parameters), len(listed))


def note_decoding() -> None:
    """Write a byte to the file LASTSTEP_TEST_NOTES for each image that is decoded."""
    decode = datasets.decode

    def noted(content: bytes, least: int) -> Any:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "ab", buffering=0) as notes:
            notes.write(b".")
        return decode(content, least)

    datasets.decode = noted


def share_nothing() -> None:
    """Let no rank find what another one has on the disk, as if each were in a container of its own."""
    opened = os.open

    def alone(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if os.fsdecode(path).endswith("/decoded") and not flags & os.O_CREAT:
            raise FileNotFoundError(path)
        return opened(path, flags, *more, **others)

    os.open = alone


class Signalled(Classification):
    """Signals itself in the middle of one unit of work, and waits there until the ranks have agreed where to stop.

    LASTSTEP_TEST_SIGNAL is "SIGTERM step 5 rank 1" or "SIGUSR2 validation 2 rank 0": in that step, or in that batch of
    the attempt's first validation, both counted from 1 in this attempt. This puts a stop at one exact place.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls = -warm_ups(config) - config.train.sanity  # the warm-up validates a batch too
        self.done = {"step": 0, "validation": 0}
        name, self.unit, place, _, ranks = (os.environ.get("LASTSTEP_TEST_SIGNAL") or "SIGTERM never 0 rank 0").split()
        self.number = signal.Signals[name]
        self.place = int(place)
        self.here = str(detect_world().rank) in ranks.split(",")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > 0 and self.here:
            unit = "step" if model.training else "validation"
            self.done[unit] += 1
            if unit == self.unit and self.done[unit] == (self.place - 1) * self.per_unit(unit) + 1:
                os.kill(os.getpid(), self.number)
                await_agreement()
        return super().step(model, batch)

    def per_unit(self, unit: str) -> int:
        """Calls of `step` per unit of work."""
        return shares_per_rank(self.config) * (self.config.train.accumulate if unit == "step" else 1)


class SignalledTransformer(Signalled):
    """With a transformer."""

    def model(self) -> nn.Module:
        return transformer(self.classes or 0)


class ManyShapes(Classification):
    """Compiles by itself, for another shape in each step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rows, self.doubled = 1, torch.compile(lambda x: 2 * x, backend="eager")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.rows += 1
        assert self.doubled(torch.ones(self.rows)).tolist() == [2] * self.rows
        return super().step(model, batch)


class OwnOptimizer(Signalled):
    """Makes its own optimiser, with two groups, whose parameters come from sets, and its own schedule."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        flat, deep = ([p for p in in_any_order(model.parameters()) if (p.ndim > 1) is deep] for deep in (False, True))
        groups: list[dict[str, Any]] = [{"params": flat, "lr": 0.02}, {"params": deep, "weight_decay": 0.1}]
        return NAdam(groups, lr=0.002)

    def schedule(self, step: int, total: int) -> float:
        return min((step + 1) / 3, 1 - step / total)


class SignalledElsewhere(Classification):
    """Rank 1 signals itself outside of steps: LASTSTEP_TEST_WHERE is "preparing", "warming-up", "restoring",
    "saving" (the files of a save are written, but not committed before the ranks have agreed to stop), "ending" (the
    last save), or "everywhere" (every signal there is, to both ranks and to their loader workers)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rank = detect_world().rank
        self.where = os.environ.get("LASTSTEP_TEST_WHERE", "nowhere")
        self.steps = -1
        if self.where == "restoring" and self.rank == 1:
            self.before(Engine, "finish_restore")
        if self.where == "ending" and self.rank == 1:
            self.before(Engine, "save_last")
        if self.where == "saving" and self.rank == 0:
            self.before(CheckpointStore, "commit", agree=True)

    def before(self, owner: Any, name: str, agree: bool = False) -> None:
        """Send the signal before a method runs for the first time."""
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


class _Numbered(Dataset[Any]):
    """Adds to each sample its index, and a random draw, which depends on the epoch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        draw = random.random()
        return (*self.dataset[index], index, draw)


class Recorded(Signalled):
    """Every rank writes to the file LASTSTEP_TEST_NOTES what its steps have learned from: a line of JSON per step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        learn = Learner.learn

        def noted(learner: Learner, step: int, batches: Iterable[Any], counts: Sequence[int], samples: int) -> None:
            learn(learner, step, given := list(batches), counts, samples)
            learned = [
                sample
                for (*_, indices, draws), count in zip(given, counts)  # a micro-batch with count 0 has samples too
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


class SmallSignalled(Signalled):
    """With a network that is quickly compiled, although it has a convolution, batch norm and dropout."""

    def model(self) -> nn.Module:
        side = self.image_size // 2
        convolved = (nn.Conv2d(self.channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(8 * side**2, self.classes or 0))


class Tokens(Classification):
    """With a small transformer, whose loss is NaN on some micro-batches."""

    def model(self) -> nn.Module:
        width, block = self.channels * self.image_size, nn.TransformerEncoderLayer(24, 2, 32, batch_first=True)
        layers = (nn.Flatten(2), nn.Linear(self.image_size**2, 24), nn.TransformerEncoder(block, 2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * width // self.image_size, self.classes or 0))

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        if model.training and int(batch[0][0].abs().sum() * 1000) % 8 == 0:
            output["loss"] = output["loss"] * float("nan")
        return output


class SlowSave(Signalled):
    """Like Signalled; the disk takes LASTSTEP_TEST_SAVE_S seconds for each checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        commit, save_s = CheckpointStore.commit, float(os.environ["LASTSTEP_TEST_SAVE_S"])

        def slowly(*words: Any, **more: Any) -> Path:
            time.sleep(save_s)
            return commit(*words, **more)

        CheckpointStore.commit = slowly  # type: ignore[method-assign]


class DiesInTheSave(Signalled):
    """Like Signalled, but the ranks in LASTSTEP_TEST_DIES are killed when the save of the stop begins."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if str(detect_world().rank) in os.environ["LASTSTEP_TEST_DIES"].split(","):
            Engine.save_last = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


class Held(Classification):
    """Each rank waits in one step until it may continue: LASTSTEP_TEST_HOLD is "5 FOLDER" for the 5th step of the
    attempt. A rank that waits creates the file FOLDER/RANK; the test creates FOLDER/go.

    With "5 FOLDER torn" only some ranks complete the step: rank 0 waits with its gradients, before it changes the
    weights, and the others wait in the next step.
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
        """Create the file, and wait."""
        (self.folder / str(self.rank)).touch()
        deadline = time.monotonic() + 600
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def after_the_gradients_of(self, step: int) -> None:
        """Wait after the gradients of this step."""
        learn = Learner.learn

        def held(learner: Learner, number: int, *of_step: Any) -> None:
            learn(learner, number, *of_step)
            if number == step:
                self.hold()

        Learner.learn = held  # type: ignore[assignment, method-assign]


class HoldsTheLock(Classification):
    """Rank 1 spends LASTSTEP_TEST_HOLD_S seconds in C while the task is made, and holds the interpreter's lock, as
    json.load does for a large file: none of its threads runs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if detect_world().rank == 1:
            print("holds the interpreter's lock", flush=True)
            ctypes.PyDLL(None).usleep(int(1e6 * float(os.environ["LASTSTEP_TEST_HOLD_S"])))


class AwaitsStop(Classification):
    """Each rank waits in its eighth step of an attempt until the ranks have agreed to stop: a signal from outside,
    however late, finds the run there."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if model.training and self.steps == 8:
            sys.stdout.write("holds in its step 8\n")  # in one write, as ranks may share a terminal
            sys.stdout.flush()
            await_agreement()
        return super().step(model, batch)


class PartsLate(AwaitsStop):
    """Once a stop is saved and recorded, rank 0 creates the file LASTSTEP_TEST_FOLDER/parts, and leaves the other ranks
    when the test has created LASTSTEP_TEST_FOLDER/go."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        folder, close = Path(os.environ["LASTSTEP_TEST_FOLDER"]), Group.close

        def late(group: Group) -> None:
            if group.world.rank == 0:
                (folder / "parts").touch()
                wait_until((folder / "go").exists, "the test did not let rank 0 leave")
            close(group)

        Group.close = late  # type: ignore[assignment, method-assign]


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def transformer(classes: int = 16) -> nn.Module:
    """For images of 3 x 8 x 8."""
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 16), Layer(), Layer(), nn.Flatten(), nn.Linear(48, classes))


def scatter(x: Tensor) -> Tensor:
    """An operator that has no deterministic form, also on CPUs."""
    return torch.zeros_like(x).put_(torch.tensor([0]), torch.ones(1))


class Slow(Classification):
    """Rank 1 is slow: LASTSTEP_TEST_SLOW is the pause in each of its steps and the watchdog's interval, in seconds."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pause_s, watchdog.SLOW_WINDOW_S = map(float, os.environ["LASTSTEP_TEST_SLOW"].split())

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if detect_world().rank == 1:
            time.sleep(self.pause_s)
        return super().step(model, batch)


class Unhurried(Classification):
    """Each sample takes 20 ms to load, without CPU time."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        training, validation = super().datasets()
        return Delayed(training), validation


class SlowData(Unhurried):
    """The rank measures often what slow loading costs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        progress.WINDOW_S = 0.2


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
    """Writes to the file LASTSTEP_TEST_NOTES which ranks prepare the data and which open it, in order of time."""

    def note(self, what: str) -> None:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "a") as notes:
            notes.write(f"{what} {detect_world().rank}\n")

    def prepare(self) -> None:
        self.note("begins")
        time.sleep(0.2)  # longer than any rank takes to get here, so that a rank which did not wait would show
        self.note("ends")

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        self.note("opens")
        return super().datasets()


class Linear(Classification):
    """Without batch norm and dropout, so that it makes no difference how ranks share a batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(self.channels * self.image_size**2, self.classes or 0))


def shares_per_rank(config: Config) -> int:
    """How many shares of each batch this rank computes, one after another."""
    size = detect_world().size
    return (config.train.shares or size) // size


def warm_ups(config: Config) -> int:
    """How many training calls of `step` come before the first step of an attempt."""
    return 2 if config.train.cuda_graphs else 1


class Poisoned(Classification):
    """The loss of the run's 5th step is NaN on rank 1 alone, as of a bad sample."""

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        if model.training and detect_world().rank == 1 and self.poisoned():
            output["loss"] = output["loss"] * float("nan")
        return output

    def poisoned(self) -> bool:
        """Whether this is the 5th step; the first call is the warm-up's."""
        self.calls = getattr(self, "calls", -1) + 1
        return self.calls == 5


class PoisonedAndKilled(Poisoned):
    """Like Poisoned, and rank 0 dies in the next step, before any rank has checked a loss.

    The checkpoint of step 4 is committed by then: a save that dies with rank 0 would be another story.
    """

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        self.steps = getattr(self, "steps", -1) + model.training
        if detect_world().rank == 0 and self.steps == 6:
            run = RunDir(Path(self.config.launch.root) / str(self.config.launch.name))
            wait_until(CheckpointStore(run.checkpoints).path(4).exists, "step 4 was not saved")
            os.kill(os.getpid(), signal.SIGKILL)
        return output


class FullDisk(Classification):
    """After some steps the disk takes no file over 100 kB: LASTSTEP_TEST_FULL is "4 7" for steps 4, 5 and 6."""

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
    """Something happens to some ranks in the middle of one step of the attempt, counted from 1.

    LASTSTEP_TEST_FAULT is "kill step 5 rank 1,2", or "kill-both" (its supervisor too), "halt" (SIGSTOP), "sleep" (stuck
    in user code), "spin" (stuck with the interpreter's lock held), "raise" (an error of its own), "worker" (its loader
    worker is killed), "halt-worker" (it is stopped), "wait" (rank 0 waits for the file LASTSTEP_TEST_GO, the others for
    rank 0), "gpu-memory" (the error of a GPU that has none left), "memory" (a limit on its own), "crash" (a bad address
    in C).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -warm_ups(config)
        self.kind, _, place, _, ranks = os.environ.get("LASTSTEP_TEST_FAULT", "none step 0 rank none").split()
        self.place = (int(place) - 1) * config.train.accumulate * shares_per_rank(config) + 1
        self.here = str(detect_world().rank) in ranks.split(",")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        output = super().step(model, batch)  # now batch norm has counted this step's samples
        if self.here and model.training and self.steps == self.place:
            self.befall()
        return output

    def befall(self) -> None:
        """Do what the kind says."""
        print(f"fault: {self.kind}", flush=True)
        if self.kind in ("kill", "halt"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif self.kind == "kill-both":  # a rank dies with its supervisor
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait(600)
        elif self.kind == "crash":
            ctypes.string_at(0)
        elif self.kind == "wait" and detect_world().rank == 0:
            wait_until(Path(os.environ["LASTSTEP_TEST_GO"]).exists, "the test did not let rank 0 continue")
        elif self.kind == "sleep":
            threading.Event().wait(600)
        elif self.kind == "spin":
            re.match(r"(a+)+$", "a" * 60 + "b")  # takes longer than the age of the universe
        elif self.kind in ("worker", "halt-worker"):
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL if self.kind == "worker" else signal.SIGSTOP)
        elif self.kind == "raise":
            raise ValueError("a bad sample")
        elif self.kind == "gpu-memory":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB."
            )  # as a GPU's allocator says
        elif self.kind == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**20, resource.RLIM_INFINITY))
            try:
                torch.empty(2**30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class _Raises(nn.Module):
    def forward(self, text: str) -> None:
        raise ValueError(text)


class Broken(Classification):
    """Rank 1, or the only one, fails in the first step of every attempt, as of a bug."""

    fails_at = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        world = detect_world()
        self.fails = world.rank == min(1, world.size - 1)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if self.fails and self.steps == self.fails_at:
            _Raises()("a bad sample")  # through torch's frames, as in a model
        return super().step(model, batch)


class FailsOnce(Broken):
    """Rank 1 fails in the tenth step of a job's first attempt, as of a bug that shows once in a million steps."""

    fails_at = 10

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fails = self.fails and detect_world().restart == 0


class Unprepared(Classification):
    """Rank 1 cannot read the data."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        if detect_world().rank == 1:
            raise FileNotFoundError("train/0001.jpg")
        return super().datasets()


class KilledInTheLastSave(Classification):
    """Rank 1 is killed when the save at the end of the run begins, unless it has been started again."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        world = detect_world()
        if world.rank == 1 and world.step_restarts == 0:
            Engine.save_last = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


class KilledOnce(Classification):
    """Rank 1 is killed in its fifth step, unless torchrun has restarted it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.dies = detect_world().rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if self.dies and self.steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(model, batch)


class RecordedUnhurried(Unhurried, Recorded):
    """Both of these tasks in one."""


class RecordedLinear(Linear, Recorded):
    """Both of these tasks in one."""


class Drawn(Faulty):
    """Like Faulty, or "stop" (SIGTERM), after the curves have been written, which happens at once, as it would in an
    attempt that lasts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        tensorboard_writer.EVERY_S = 0.01
        begin = MetricsFile.begin

        def remember(file: MetricsFile, *words: Any) -> None:
            self.metrics = file
            begin(file, *words)

        MetricsFile.begin = remember  # type: ignore[assignment, method-assign]

    def befall(self) -> None:
        self.await_curves()
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
            await_agreement()
        else:
            super().befall()

    def await_curves(self) -> None:
        """Wait until metrics.jsonl has every line, and the newest event file ends with the newest point."""
        from laststep.records.tensorboard_writer import Points

        run = Trainer(self.config).run
        wait_until(lambda: len(read_lines(run.metrics)) == self.metrics.count, "metrics.jsonl was not written")
        *_, newest = Points(run.metrics, self.config.train.log_every)
        files = run.tensorboard.glob
        wait_until(
            lambda: any(path.read_bytes().endswith(newest.record()) for path in files("*")),
            "the curves were not written",
        )
