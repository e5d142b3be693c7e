"""The end of a run, and moving it to a later step: `resume RUN train.epochs=20` or `train.max_steps=2000`."""

from __future__ import annotations

import math

from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.records.plan import read_plan
from laststep.rundir import RunDir

ENDS = ("train.epochs", "train.max_steps")  # the keys that say where a run ends


def check_later_end(run: RunDir, before: Train, after: Train) -> None:
    """Raise ConfigError unless the run ends later than it did."""
    plan = read_plan(run.plan)
    if plan is None:  # no attempt has begun to train
        if after.epochs < before.epochs or _limit(after) < _limit(before):
            raise ConfigError(f"{_given(before, after)}: a run can only end later than before, not earlier")
        return
    total = plan["total_steps"]
    if _ends_by_steps(before, total):
        # How many steps an epoch has is not known, so the epochs must be left alone, or raised.
        by_epochs = math.inf if after.epochs >= before.epochs else 0
    else:
        by_epochs = total // before.epochs * after.epochs
    if min(by_epochs, _limit(after)) <= total:
        given = _given(before, after) or f"--from {run.name}"
        raise ConfigError(
            f"{given}: {run.name} ends at step {total}, and can only end later; give e.g. {longer(before, total)}"
        )


def longer(train: Train, total: int | None) -> str:
    """The word that doubles the length of a run of `total` steps."""
    if _ends_by_steps(train, total):
        return f"train.max_steps={2 * int(_limit(train))}"
    return f"train.epochs={2 * train.epochs}"


def _ends_by_steps(train: Train, total: int | None) -> bool:
    return train.max_steps is not None and (total is None or total >= train.max_steps)


def _limit(train: Train) -> float:
    return math.inf if train.max_steps is None else train.max_steps


def _given(before: Train, after: Train) -> str:
    """The changed keys, as they are typed."""
    pairs = {"train.epochs": (before.epochs, after.epochs), "train.max_steps": (before.max_steps, after.max_steps)}
    return " ".join(f"{key}={'null' if new is None else new}" for key, (old, new) in pairs.items() if old != new)
