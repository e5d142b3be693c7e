"""Tasks with several validation sets, hooks and a state of their own, which end their own ranks in the hook."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.task import EpochEnd
from tests.support.tasks import Signalled, await_agreement


class Hooked(Signalled):
    """Lowers its learning rate when the loss on the second validation set rises, counts, and draws.

    LASTSTEP_TEST_HOOK is "SIGKILL epoch 1 rank 0,1": the signal that these ranks send themselves at the end of the hook
    of that epoch, if this attempt is the run's first one (step_restarts and restarts do not matter here).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls -= config.train.sanity  # the warm-up validates a batch of each set
        self.steps, self.factor, self.best = 0, 1.0, float("inf")
        self.losses = torch.empty(0)
        self.signal, _, self.epoch, _, ranks = (os.environ.get("LASTSTEP_TEST_HOOK") or "SIGTERM epoch 0 rank ").split(
            " "
        )
        self.hit = str(detect_world().rank) in ranks.split(",")

    def datasets(self) -> tuple[Dataset[Any], Any]:
        train, val = super().datasets()
        return train, {"val": val, "test_few": Subset(val, range(3, 22))}

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        return super().step(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        measured = self.step(model, batch)
        return {"loss": measured["loss"], "noise": torch.rand(()), "accuracy": measured["accuracy"]}

    def schedule(self, step: int, total: int) -> float:
        return self.factor

    def on_epoch_end(self, run: EpochEnd) -> None:
        loss = run.metrics["test_few_loss"]
        assert loss is not None and not run.model.training
        self.losses = torch.cat([self.losses, torch.tensor([loss])])
        self.factor, self.best = self.factor * (0.5 if loss > self.best else 0.9), min(self.best, loss)
        run.log(factor=self.factor, drawn=random.random(), val_drawn=torch.rand(()))
        if self.hit and run.epoch == int(self.epoch):
            os.kill(os.getpid(), signal.Signals[self.signal])
            if self.signal != "SIGKILL":
                await_agreement()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "factor": self.factor, "best": self.best, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EndsEarly(Hooked):
    """The run ends with its second epoch."""

    def on_epoch_end(self, run: EpochEnd) -> None:
        if len(self.losses) == 1:
            run.end_run()
        super().on_epoch_end(run)


class Wrong(Hooked):
    """Does something in its hook, or in what a hook needs, that cannot be exact: args.what says what."""

    def validation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        measured = super().validation_step(model, batch)
        names = {"nothing": [], "noise": ["noise"]}.get(self.args.what, list(measured))
        return {name: measured[name] for name in names}

    def datasets(self) -> tuple[Dataset[Any], Any]:
        train, sets = super().datasets()
        other = {"dev": {"dev": sets["val"]}, "none": None, "no_sets": {}, "empty": {"val": Subset(sets["val"], [])}}
        return train, other.get(self.args.what, {"val": sets["val"]} if self.args.what == "noise" else sets)

    def state_dict(self) -> dict[str, Any]:
        rank = {"rank": detect_world().rank} if self.args.what == "state" else {}
        return {**super().state_dict(), **rank, **({"model": object()} if self.args.what == "object" else {})}

    def on_epoch_end(self, run: EpochEnd) -> None:
        if self.args.what == "noise":
            return
        super().on_epoch_end(run)
        if self.args.what == "weights":
            next(run.model.parameters()).data.mul_(2)
        elif self.args.what == "frozen":
            next(run.model.parameters()).requires_grad_(False)
        elif self.args.what == "log" and run.rank == 1:
            run.log(more=1)
        elif self.args.what == "taken":
            run.log(val_loss=1)
        elif self.args.what == "end" and run.rank == 1:
            run.end_run()


class HalfState(Signalled):
    """Could save its state, and not load it."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}
