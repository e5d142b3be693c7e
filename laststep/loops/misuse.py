"""What to write instead, where a custom training loop is used in a way that could not be resumed."""

from __future__ import annotations

from typing import Any

from laststep.data.loader import StepLoader, StepNumbers

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
# With train.shares:
NOT_IN_SHARES = (
    "with train.shares a batch of run.steps(...) comes in shares: write `for batch in run.shares(batch):` around the "
    "forward and backward pass, and optimizer.step() after this loop"
)
NOT_THE_BATCH = (
    "run.shares(batch) takes the batch that this iteration of run.steps(...) gave, once: make all forward and backward "
    "passes of a share in one loop over run.shares(batch)"
)
BACKWARD_OUTSIDE = (
    "a backward pass outside of run.shares(batch): with train.shares the gradients of a registered "
    "DistributedDataParallel are summed over the shares, and are of no use elsewhere"
)
SUMMED_TWICE = (
    "a backward pass after the one that sums the gradients over the ranks: put all forward and backward passes of a "
    "share but the last into `with model.no_sync():`"
)
EVERY_PARAMETER = (
    "DistributedDataParallel(find_unused_parameters=True) or (static_graph=True): with train.shares every parameter "
    "must receive a gradient in every share; leave these options out"
)
BUCKET_VIEW = (
    "DistributedDataParallel(gradient_as_bucket_view=True): with train.shares on a GPU a gradient's place in memory "
    "must not depend on DDP's buckets; leave this option out"
)
ALL_RANKS = "DistributedDataParallel(process_group=...): train.shares sums over all ranks; leave this option out"
OTHER_HOOK = (
    "a registered DistributedDataParallel has a communication hook of its own; train.shares sums the gradients by "
    "another one, so leave out register_comm_hook(...)"
)
OWN_SUMS = (
    "train.shares needs a registered DistributedDataParallel, which sums the gradients; leave out "
    "run.averages_gradients and run.checkpoint(...), or this key"
)

SHARDED = "train.shares cannot be combined with a sharded model (fully_shard) yet; remove this key"


def of_registration(unaveraged: list[str], size: int) -> str:
    """Of these optimizers, on `size` ranks."""
    return (
        f"run.restore({unaveraged[0]}=...): updates parameters of no registered DistributedDataParallel, so nothing "
        f"averages their gradients over the {size} ranks. Register the DistributedDataParallel itself, not the module "
        "inside it, or make the optimizer after fully_shard; or, if the loop averages them, set run.averages_gradients "
        "= True before run.restore(...)"
    )


def of_registration_in_shares(unsummed: list[str]) -> str:
    """Of these optimizers, with train.shares."""
    return (
        f"run.restore({unsummed[0]}=...): updates parameters of no registered DistributedDataParallel, which sums the "
        "gradients with train.shares, on one rank too. Wrap the model at any number of ranks, and register the "
        "DistributedDataParallel itself, not the module inside it"
    )


def of_shares(step: int, computed: int | None, here: int) -> str:
    """Of an update in this step (from 0) after `computed` of the rank's `here` shares; None: run.shares(...) was not
    called."""
    if computed is None:
        return f"step {step + 1} has computed none of its shares: {NOT_IN_SHARES}"
    return (
        f"step {step + 1} would end after {computed} of this rank's {here} shares: let the loop over run.shares(batch) "
        "run to its end, and call optimizer.step() after it"
    )


def of_gradients(step: int) -> str:
    """Of gradients that are there before the shares of this step (from 0)."""
    return (
        f"step {step + 1} has gradients before its shares: call optimizer.zero_grad() after optimizer.step() or before "
        "run.shares(batch), and make each backward pass in that loop"
    )


def not_summed(step: int) -> str:
    """Of the last share of this step (from 0)."""
    return (
        f"step {step + 1} has not summed all gradients over the ranks: call the registered DistributedDataParallel "
        "itself, use all its parameters in each share, and put all but the last forward and backward pass of a share "
        "into `with model.no_sync():`"
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


def of_batches(loader: object, per_step: int, shares: int | None) -> str | None:
    """Of run.batches(...) with this loader, in a run with train.shares=`shares`; None if it is right."""
    if not isinstance(loader, StepLoader):
        return f"run.batches(...) takes what run.loader(...) gave, not a {type(loader).__name__}"
    if shares is not None and per_step > 1:
        return f"run.batches(..., per_step={per_step}): with train.shares each share has one batch; leave this out"
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
