"""Tasks in which something goes wrong: a rank dies or sticks, a loss is not finite, the disk is full."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.loops.engine import Engine
from laststep.ranks.launchers import detect_world
from laststep.rundir import RunDir
from laststep.tasks.classification import Classification
from tests.support.waiting import wait_until


def shares_per_rank(config: Config) -> int:
    """How many shares of each batch this rank computes, one after another."""
    size = detect_world().size
    return (config.train.shares or size) // size


def warm_ups(config: Config) -> int:
    """How many calls of `step` come before the first step of an attempt."""
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


class Broken(Classification):
    """Rank 1 fails in the first step of every attempt, as of a bug."""

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
