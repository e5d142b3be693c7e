"""The probe: what `prove` adds to a loop. It notes the bits of each step, and strikes a rank in a planned place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laststep.checkpoint.shards import is_distributed
from laststep.loops.digests import digest, digests, leaves_of
from laststep.loops.loop import AttemptContext
from laststep.loops.variables import Variables
from laststep.ranks.stop import Stop
from laststep.records.probes import ProbedStep, ProbeFile, ProbePlan, Strike, Variable


class Probe:
    """Follows one loop. It changes nothing of what the loop computes."""

    def __init__(self, context: AttemptContext, plan: ProbePlan, state: Callable[[], Any]) -> None:
        """`state` returns what a checkpoint would hold now."""
        world = context.group.world
        self.variables = Variables()
        self._plan, self._state = plan, state
        self._rank, self._attempt = world.rank, world.number or 0
        self._stop: Stop = context.stop
        self._file = ProbeFile(context.run, world.rank)
        self._begun: ProbedStep | None = None  # the step under way
        self._validated = 0  # batches since the last step

    def watch(self, registered: Any) -> None:
        """Note the inputs of this model, and the updates of this optimiser."""
        self.variables.leave_out(registered)
        if isinstance(registered, nn.Module):
            registered.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        elif isinstance(registered, Optimizer):
            registered.register_step_post_hook(self._note_update)

    def begin_step(self, step: int, epoch: int, step_of_epoch: int, batch: Any, variables: dict[str, Variable]) -> None:
        """A step has its batch, and the user's code these variables; all numbers count from 1."""
        self._begun = {
            "attempt": self._attempt,
            "step": step,
            "epoch": epoch,
            "batch": digest(batch),
            "inputs": [],
            "updates": 0,
            "state": {},
            "rows": [],
            "variables": variables,
        }
        self._validated = 0
        strike = self._plan.strike
        if strike is not None and (strike.step, strike.batch) == (step, None):
            self._strike(strike)
        elif self._plan.ends_in(step, epoch, step_of_epoch):
            self._strike(Strike(signal.SIGTERM.name, 0, step))

    def note_share(self, batch: Any) -> None:
        """The step under way has this part of its batch."""
        if self._begun is not None:
            self._begun["batch"] = digest((self._begun["batch"], batch))

    def end_step(self) -> None:
        """The step is done."""
        if self._begun is not None:
            state = self._state()
            self._begun["state"] = digests(state)
            self._begun["rows"] = [name for name, leaf in leaves_of(state) if is_distributed(leaf)]
            self._file.write(self._begun)
            self._begun = None

    def begin_validation_batch(self, after: int) -> None:
        """A batch of the validation after this step begins."""
        self._validated += 1
        self._file.write({"attempt": self._attempt, "after": after, "validation_batch": self._validated})
        strike = self._plan.strike
        if strike is not None and (strike.step, strike.batch) == (after, self._validated):
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        """Send the signal, on its rank. All ranks follow the same plan, so all hold here until they agree to stop."""
        number = signal.Signals[strike.signal]
        if strike.rank == self._rank:
            os.kill(os.getpid(), number)
        if number != signal.SIGKILL:
            self._stop.await_agreement()

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # the model is compiled: leave this out of it
            return
        if self._begun is not None and module.training and torch.is_grad_enabled():
            found, inputs = digest((args, kwargs)), self._begun["inputs"]
            if inputs[-1:] != [found]:  # in the first step of an attempt the rehearsal runs the same batch before it
                inputs.append(found)

    def _note_update(self, *_: Any) -> None:
        if self._begun is not None:
            self._begun["updates"] += 1
