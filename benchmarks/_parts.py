"""The time that this rank's main thread spends in each part of a training step, taken where a part begins and ends.

Samples would be wrong here. A sampling thread sees the main thread only where that one releases the interpreter's lock:
nearly always in a kernel of torch. A signal's handler runs late, often in the next part, and costs more.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._turns import mapped

FOLDER = "LASTSTEP_BENCHMARK_PARTS"  # in the environment of every rank: where to write, if this is wanted
FREEZE_S = 0.5  # a longer time is that of a freeze, and belongs to no part
NAMES_AT = 200  # the step at which all threads of a rank have started
# The functions that make up each part. Time belongs to the innermost; what is in none of them is the rest.
PARTS = {
    "loading the batch": ("benchmarks.overhead:_batches", "laststep.data.loader:MemoryBatches.__iter__"),
    "forward": ("benchmarks.overhead:loss_of", "laststep.loops.learner:Learner._forward"),
    "backward, with the all-reduce": ("torch:Tensor.backward", "laststep.loops.learner:Learner._backward"),
    "update": (
        *("torch.optim:SGD.step", "torch.optim:SGD.zero_grad"),
        *("laststep.compat:step", "laststep.loops.learner:clear_gradients"),
    ),
    "whether the gradient is finite": ("laststep.loops.gradients:Replicated.measure",),
    "readback and metrics lines": ("laststep.loops.engine:Engine.step_done",),
    "saves": ("laststep.loops.engine:Engine.save",),
    "ring": tuple(
        f"laststep.loops.snapshot:Ring.{name}" for name in ("begin_work", "end_work", "begin_update", "end_update")
    ),
    "order": ("laststep.data.loader:TrainBatchKeys.counts", "laststep.data.order:Order.count"),
    "random seeds": ("laststep.loops.learner:seed_generators",),
    "learning rate": ("laststep.loops.learner:LearningRates.at",),
    "model's buffers": ("laststep.loops.snapshot:Buffers.broadcast", "laststep.loops.snapshot:Buffers.commit"),
}
REST = "everything else"
ALL = (*PARTS, REST)


def measure_parts(ours: bool, note: Callable[[], None]) -> Callable[[], None]:
    """From now on, add up the seconds of each part, in a file, for the process that started this rank. `ours`: in
    Laststep, otherwise in the bare loop. Returns what is to be called at each step in place of `note`."""
    folder, rank = Path(os.environ[FOLDER]), os.environ.get("RANK", "0")
    path = folder / f"seconds{rank}"
    path.write_bytes(bytes(8 * len(ALL)))
    switch = new_switch(mapped(path))
    for number, functions in enumerate(PARTS.values()):
        for function in functions:
            if function.startswith("laststep.") == ours:
                replace(function, number, switch)
    left = NAMES_AT

    def at_step() -> None:
        nonlocal left
        note()
        left -= 1
        if left == 0:
            names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
            (folder / f"threads{rank}").write_text(json.dumps({"pid": os.getpid(), "names": names}))

    return at_step


def new_switch(seconds: memoryview[float]) -> Callable[[int], int]:
    """A function that begins a part, by number, and returns the part until then."""
    clock, part, since = time.perf_counter, len(PARTS), time.perf_counter()

    def switch(new: int) -> int:
        nonlocal part, since
        before, now = part, clock()
        if now - since < FREEZE_S:
            seconds[before] += now - since
        part, since = new, now
        return before

    return switch


def replace(function: str, number: int, switch: Callable[[int], int]) -> None:
    """Have a function, MODULE:NAME or MODULE:CLASS.NAME, count for this part."""
    module, _, path = function.partition(":")
    # The bare loop is a script, and that module its own.
    owner = importlib.import_module("__main__" if module == "benchmarks.overhead" else module)
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, owner)
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = switch(number)
        try:
            return original(*args, **kwargs)
        finally:
            switch(before)

    @functools.wraps(original)
    def iterate(*args: Any) -> Iterator[Any]:
        before = switch(number)
        for item in original(*args):
            switch(before)
            yield item
            before = switch(number)
        switch(before)

    setattr(owner, name, iterate if name in ("_batches", "__iter__") else call)
