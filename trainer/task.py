"""Task: what to train. The model, the data sets, and the loss and metrics of one batch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trainer.config.config import Config
from trainer.config.errors import ConfigError

READY_MADE = {"classification": "trainer.tasks.classification.Classification"}


class Task:
    """Subclass this to train something of your own, and name it in the configuration: `task: my_module.MyTask`.

    Everything random in it may use Python's, NumPy's and torch's global generators: they are seeded from (seed, step,
    rank) before a step and from (seed, epoch, sample index) before a sample, so a resumed run draws the same numbers.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(self) -> None:
        """Download or unpack the data. Called on one rank of each node, one after another, before `datasets`."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the validation set; each has `__len__` and `__getitem__`."""
        raise NotImplementedError(f"{type(self).__name__} must define datasets()")

    def model(self) -> nn.Module:
        """The model, on the CPU, freshly initialised. Called after `datasets`."""
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The batch's mean "loss" to minimise and any metrics, each a scalar tensor that is a mean over its samples.

        `model` must be called (not a part of it), so that gradients are averaged over the ranks. Training and
        validation both come here; `model.training` tells which.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def on_device(self, batch: Any) -> Any:
        """What is left to do to a batch on the device, before `step`: nothing by default."""
        return batch

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples. By default torch's own way."""
        return default_collate(list(samples))


def find_task(config: Config) -> type[Task] | Callable[[Any], Any]:
    """What `config.task` names: a Task, or a function that trains by itself. Raises ConfigError for anything else."""
    path = READY_MADE.get(config.task, config.task)
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"task={config.task}: cannot be imported: {error}") from error
    if inspect.isclass(found):
        if not issubclass(found, Task):
            raise ConfigError(f"task={config.task}: is not a subclass of trainer.Task")
        return found
    if not inspect.isfunction(found):
        raise ConfigError(f"task={config.task}: is neither a subclass of trainer.Task nor a function")
    try:
        inspect.signature(found).bind(None)
    except TypeError:
        raise ConfigError(f"task={config.task}: must take one argument, the run: def {name}(run)") from None
    return found
