"""The two loops as `prove` runs them: each with a probe, for which no other run pays anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any

from laststep.loops.custom_loop import CustomLoop
from laststep.loops.custom_steps import Phase
from laststep.loops.loop import AttemptContext
from laststep.loops.probe import Probe
from laststep.loops.run import called_with_run
from laststep.loops.task_loop import TaskLoop
from laststep.records.probes import ProbePlan
from laststep.task import Task


def make_probed_loop(
    task: type[Task] | Callable[..., Any], context: AttemptContext, plan: ProbePlan
) -> TaskLoop | CustomLoop:
    """The loop around a Task or a function, with a probe that follows `plan`."""
    if isinstance(task, type):
        return ProbedTaskLoop(task, context, plan)
    return ProbedCustomLoop(called_with_run(task, context.config), context, plan)


class ProbedTaskLoop(TaskLoop):
    """The loop around a Task, with a probe."""

    def __init__(self, task: type[Task], context: AttemptContext, plan: ProbePlan) -> None:
        super().__init__(task, context)
        self.probe = Probe(context, plan, self._state)
        self.probe.variables.leave_out(self.learner.model)
        if not self.config.train.compile:  # the probe would be compiled too
            self.probe.watch(self.learner.gradients.parallel)
        self.probe.watch(self.learner.optimizer)

    def _step(self, batches: Iterator[Any]) -> None:
        step = self.position.step
        micro_batches = list(islice(batches, self.micro_batches))
        of_epoch = step % self.order.steps_per_epoch
        variables = self.probe.variables.of_object("self", self.task)
        self.probe.begin_step(step + 1, self.order.epoch(step) + 1, of_epoch + 1, micro_batches, variables)
        super()._step(iter(micro_batches))

    def _step_done(self, samples: int, ends_epoch: bool) -> None:
        super()._step_done(samples, ends_epoch)
        self.probe.end_step()

    def _begin_validation_batch(self) -> bool:
        begins = super()._begin_validation_batch()
        if begins:
            self.probe.begin_validation_batch(self.position.step)
        return begins


class ProbedCustomLoop(CustomLoop):
    """The loop around a user's function, with a probe."""

    def __init__(self, function: Callable[[CustomLoop], Any], context: AttemptContext, plan: ProbePlan) -> None:
        super().__init__(function, context)
        self.probe = Probe(context, plan, self._state)

    def register(self, objects: Mapping[str, Any], *words: Any, **more: Any) -> None:
        """Watch the registered objects, too: the optimisers in their wrappers."""
        super().register(objects, *words, **more)
        registered = self._held.registered
        assert registered is not None
        for each in objects.values():
            self.probe.variables.leave_out(each)
        for watched in (*registered.modules, *registered.optimizers):
            self.probe.watch(watched)

    def steps(self, *words: Any, **more: Any) -> Iterator[Any]:
        """The batches of the steps, each of which the probe follows."""
        with closing(super().steps(*words, **more)) as batches:  # type: ignore[type-var]
            for batch in batches:
                position, variables = self.position, self.probe.variables.of_callers()
                self.probe.begin_step(position.step + 1, position.epoch + 1, position.batches + 1, batch, variables)
                yield batch

    def share_batches(self, batch: Any) -> Iterator[Any]:
        """The shares of a batch, which the probe follows too."""
        for share in super().share_batches(batch):
            if self.shares.total:
                self.probe.note_share(share)
            yield share

    def validation(self, *words: Any, **more: Any) -> Iterator[Any]:
        """The batches of a validation, each of which the probe follows."""
        with closing(super().validation(*words, **more)) as batches:  # type: ignore[type-var]
            for batch in batches:
                if self.phase not in (Phase.SETUP, Phase.READY):  # one before the first step follows no step
                    self.probe.begin_validation_batch(self.position.step)
                yield batch

    def _step_done(self, samples: int, ends_epoch: bool) -> None:
        super()._step_done(samples, ends_epoch)
        self.probe.end_step()
