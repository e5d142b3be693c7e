"""Seeds the global generators that a task draws from, and sees to it that it draws from no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import numpy
import torch

from laststep.compat import generators
from laststep.config.errors import ConfigError
from laststep.data.order import gpu_generator

_SEED: dict[str, Callable[[int], object]] = {
    "random": random.seed,
    "numpy": lambda seed: numpy.random.seed(seed & 0xFFFFFFFF),
}


class Generators:
    """The global generators of torch, and of the modules that a task names in `Task.draws`.

    `seed` seeds them as `seed_generators` does. The other modules' must not move until `check`: whatever is drawn from
    them would be another number after a resume.
    """

    def __init__(self, named: Collection[str], device: torch.device, task: str) -> None:
        """`named` are the draws of `task`. Raises ConfigError for a name that is unknown."""
        if isinstance(named, str) or not _SEED.keys() >= set(named):
            raise ConfigError(f"task={task}: draws={named!r}: must be a tuple with some of 'random' and 'numpy'")
        self._task = task
        marks = {"random": generators.python_mark(), "numpy": generators.numpy_mark()}
        self._watched = {name: mark for name, mark in marks.items() if name not in named and mark is not None}
        self._seeded = [seed for name, seed in _SEED.items() if name not in self._watched]
        self._of_torch = [torch.default_generator]
        if device.type == "cuda":
            self._of_torch.append(gpu_generator(device))
        self._marks = self._marks_now()

    def seed(self, seed: int) -> None:
        """Seed the generators of torch and of the modules named."""
        for seed_one in self._seeded:
            seed_one(seed)
        for generator in self._of_torch:
            generator.manual_seed(seed)
        self._marks = self._marks_now()

    def check(self) -> None:
        """Raise ConfigError if another generator has moved since `seed`."""
        if self._marks != self._marks_now():
            moved = [name for (name, mark), before in zip(self._watched.items(), self._marks) if mark() != before]
            raise ConfigError(
                f"task={self._task}: it draws from the global generator of {' and '.join(moved)}, which its draws "
                f"leaves out; add {', '.join(map(repr, moved))} there, or a resumed run would draw other numbers"
            )

    def _marks_now(self) -> list[object]:
        return [mark() for mark in self._watched.values()]
