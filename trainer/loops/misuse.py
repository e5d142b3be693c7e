"""What to write instead, where a custom training loop is used in a way that could not be resumed."""

from __future__ import annotations

from typing import Any

from trainer.data.loader import StepLoader, StepNumbers

NEEDED = (
    "write run.restore(model=model, optimizer=optimizer, ...) before the loop, and `for batch in run.steps(loader):` "
    "as the loop, with a loader of run.loader(dataset, batch_size)"
)
TWICE = (
    "run.steps(...) twice in an epoch: put `for epoch in run.epochs(n):` around one loop over run.steps(...), and draw "
    "from a second loader with `more = run.batches(loader)` before that loop and `next(more)` in it"
)
UPDATE_TOO_EARLY = f"an optimizer's step() before run.restore(...); {NEEDED}"
UPDATE_BEFORE_STEPS = (
    "WARNING: an optimizer's step() before the loop over run.steps(...): such updates are repeated in each attempt, "
    "and undone when it resumes"
)


def of_registration(unaveraged: list[str], size: int) -> str:
    """Of these optimizers, on `size` ranks."""
    return (
        f"run.restore({unaveraged[0]}=...): updates parameters of no registered DistributedDataParallel, so nothing "
        f"averages their gradients over the {size} ranks. Register the DistributedDataParallel itself, not the module "
        "inside it; or, if the loop averages them, set run.averages_gradients = True before run.restore(...)"
    )


def of_steps(loader: object, registered: bool) -> str | None:
    """Of run.steps(...) with this loader; None if it is right. `registered`: after run.restore(...)."""
    if not registered:
        return (
            "call run.restore(model=model, optimizer=optimizer, ...) before run.steps(...): it registers what a "
            "checkpoint holds"
        )
    if not isinstance(loader, (StepLoader, StepNumbers)):
        return (
            f"run.steps(...) takes what run.loader(...) gave, not a {type(loader).__name__}: write `loader = "
            "run.loader(dataset, batch_size)`, or run.steps(count=N) for a loop that draws its own batches"
        )
    return None


def of_return(result: Any, registered: bool, trained: bool) -> str | None:
    """Of the function's return with this result; None if it is right."""
    if not registered:
        return f"returned without run.restore(...); {NEEDED}"
    if not trained:
        return f"returned without a step of run.steps(...); {NEEDED}"
    if not isinstance(result, (dict, type(None))):
        return "must return a dict of numbers, or nothing"
    return None


def of_state(step: int, difference: str) -> str:
    """Of registered state that differs between ranks after this step."""
    return (
        f"the registered state differs between ranks at step {step}: {difference}. Every rank must register the same "
        "values: average or broadcast them over the ranks first, or leave out what is one rank's own"
    )
