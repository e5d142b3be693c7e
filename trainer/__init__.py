"""The checkpointable `Trainer` that launch.py submits, and Laststep's other public names. The code is in `laststep/`.

    launch.py     reads a configuration and makes a `Trainer(config)`
    submitit      pickles that Trainer, which holds nothing but its configuration, and calls it in each rank of the job
    the Trainer   finds the newest intact checkpoint of its run, trains from there, and returns the last metrics
    a signal      makes all ranks stop after the same step: they save it, record the end, and `Trainer.checkpoint()`
                  returns the same Trainer, which submitit submits again by requeueing the job
    a dead rank   is noticed within a second; the others save the last step that they have finished, and the ranks start
                  again in the allocation, on other nodes where a node is to blame

So the class itself is short, `laststep/trainer.py`. Read next `laststep/attempt/attempt.py`, how an attempt begins and
ends; `laststep/loops/task_loop.py`, its steps; `laststep/checkpoint/store.py`, what a checkpoint is. `docs/design.md`
answers where everything else is.

In a clone `from trainer import Trainer, Task, submit` gives the objects of `from laststep import ...`; the installed
package has only `laststep`, so that a `trainer` of your own is never hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import laststep
from laststep import __all__ as __all__

if TYPE_CHECKING:
    from laststep import Config, Run, Task, Trainer, load_weights, submit  # noqa: F401

_FOLDER_OF_LASTSTEP = True  # distinguishes this module from a user's `trainer`, see laststep.records.former_names


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}; Laststep's modules are in `laststep`")
    return getattr(laststep, name)
