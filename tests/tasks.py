"""Tasks that tests train: small, with everything random in it, and stopped at an exact place."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.config import Config
from trainer.loop import Loop
from trainer.tasks.classification import Classification
from trainer.world.detect import World


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
        self.here = str(World.detect().rank) in ranks.split(",")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.warm and self.here:
            unit = "step" if model.training else "validation"
            self.done[unit] += 1
            if unit == self.unit and self.done[unit] == (self.place - 1) * self.per_unit(unit) + 1:
                os.kill(os.getpid(), self.number)
                for agreement in [t for t in threading.enumerate() if t.name == "stop"]:
                    agreement.join(timeout=60)
                    assert not agreement.is_alive(), "the ranks did not agree on a stop within 60 s"
        self.warm = True
        return super().step(model, batch)

    def per_unit(self, unit: str) -> int:
        """Calls of `step` per unit of work."""
        return self.config.train.accumulate if unit == "step" else 1


class Prepared(Classification):
    """Writes down who prepares the data and who opens it, in the order of time."""

    def note(self, what: str) -> None:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "a") as notes:
            notes.write(f"{what} {World.detect().rank}\n")

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


class Broken(Classification):
    """Fails in the 3rd step of rank 1, as a bad sample or a bug that shows in one rank would."""

    steps = -1

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += 1
        if self.steps == 3 and World.detect().rank == 1:
            raise ValueError("a bad sample")
        return super().step(model, batch)


class FailsOnce(Classification):
    """Rank 1 fails in the 80th step of a job's first attempt, as of a bug that shows once in a million steps."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = -1  # the first call is the warm-up's
        self.fails = World.detect().rank == 1 and World.detect().restart == 0

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if self.fails and self.steps == 80:
            raise ValueError("a bad sample")
        return super().step(model, batch)


class DiesAtTheEnd(Signalled):
    """Like Signalled; and rank 1 is killed once it has no more to do with the stop, while rank 0 still saves."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        save = Loop.save

        def killed_instead(loop: Loop, must: bool = False) -> None:
            if must:
                loop.flush()  # the last thing that all ranks do together
                os.kill(os.getpid(), signal.SIGKILL)
            save(loop, must)

        if World.detect().rank == 1:
            Loop.save = killed_instead  # type: ignore[method-assign, assignment]
