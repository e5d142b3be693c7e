"""The learner: what one step does to model, averaged model, optimiser and gradient scaler on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from laststep import compat
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data.loader import for_each_tensor
from laststep.data.order import Generators, nth_seed, seed_generators, seed_of
from laststep.loops.buffers import Buffers, Committed
from laststep.loops.gradients import make_gradients
from laststep.loops.held import HeldOptimizer, HeldState, addresses
from laststep.loops.model_setup import channels_last, check_gradients, prepare_model, report_cuda_graphs
from laststep.loops.rates import LearningRates
from laststep.loops.shares import shares_of
from laststep.optim.build import clear_gradients, fill_momentum, load_optimizer, loads_in_place, take_made
from laststep.optim.fast_step import FastStep
from laststep.ranks.group import Group
from laststep.ranks.world import shard_place
from laststep.task import Task

PRECISION = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """Everything that a step changes. `learn` and then `update` do one step."""

    def __init__(self, config: Config, task: Task, group: Group, total_steps: int) -> None:
        self.config = config
        self.task = task
        self.group = group
        self.device = group.device
        self.total_steps = total_steps
        self.names: list[str] = []  # of the values that the task measures, the loss first; known after warm_up
        self.own_work_done: Callable[[], None] = lambda: None  # called where a step may begin to wait for other ranks
        # If an update can be done again: this is called before the gradients of the next step replace its own.
        self.await_update: Callable[[], None] | None = None

        self._generators = Generators(task.draws, self.device, config.task)
        seed_generators(seed_of("model", config.seed), self.device)
        self.place = shard_place(config.train.sharding, group.world)
        self.model, self.average = prepare_model(task, config, group, self.place)
        check_gradients(self.model, config.task)
        self.shares = shares_of(config.train, group.world)
        self._seeds = [seed_of("steps", config.seed, share) for share in self.shares]
        # The ranks average gradients. In a loss with this weight that is the mean over the global batch, even when a
        # short last batch gives them unequal shares. With train.shares the gradients are added instead.
        self._weight = 1 if config.train.shares else group.world.size
        self.gradients = make_gradients(self.model, group, config, self.place)
        self.buffers = Buffers(self.model, group)
        self.optimizer, self.sorted = take_made(task.optimizer(self.model), self.model, config.task)
        self.gradients.adopt(self.optimizer, config.task)
        fill_momentum(self.optimizer)
        self._step = FastStep(self.optimizer)
        self.rates = LearningRates(task, self.optimizer, total_steps)
        self._rates_now: list[float] = []  # of the step under way
        self.dtype = PRECISION[config.train.precision]
        # The range of fp16 is so small that gradients vanish unless the loss is scaled up (Micikevicius et al. 2018).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

    def learn(self, step: int, micro_batches: Collection[tuple[Any, int]], samples: int) -> None:
        """Forward and backward passes of one step, on pairs of a batch and how many of its samples count; `samples` is
        their sum over all ranks. Each of this rank's shares has as many micro-batches.

        All collectives of the step happen here. Nothing that a checkpoint holds changes here: `update` does that.
        """
        in_order, per_share = iter(micro_batches), len(micro_batches) // len(self.shares)
        waits_in_forward, share_sum = self.gradients.waits_in_forward, self.gradients.share_sum
        for share, seed in enumerate(self._seeds):
            of_share = list(islice(in_order, per_share))  # first, as loading may draw random numbers
            self._generators.seed(nth_seed(seed, step))
            if share == 0:
                self._rates_now = self.rates.at(step)
            else:
                self.buffers.rewind()
            for number, (batch, count) in enumerate(of_share, 1):
                ends_share = number == per_share
                last = ends_share and share == len(self._seeds) - 1
                if waits_in_forward and share == 0 and number == 1:
                    self.own_work_done()
                with self.gradients.reducing(last):
                    loss = self._forward(self.gradients.parallel, batch)["loss"]
                    if last and not waits_in_forward:
                        self.own_work_done()
                    weight = count * self._weight / samples
                    if ends_share:
                        share_sum.end_share(share)
                    self._backward(loss if weight == 1 else loss * weight)
                    share_sum.end_backward()
        self._generators.check()
        if self.await_update is not None:
            self.await_update()
        self.buffers.broadcast()
        self.gradients.meet(step, self.scaler, self.optimizer)

    def update(self) -> dict[str, Tensor]:
        """The update of the step. No collectives here: a rank that gets this far finishes even if a peer dies.

        Returns scalars on the device: `loss`, the mean over the global batch; `nonfinite`, 1 if that loss or the
        gradient was not finite, else 0; with optim.clip_norm also `grad_norm`, the norm of the gradient before it was
        clipped. With train.nonfinite=skip, a step whose `nonfinite` is 1 has changed nothing.
        """
        for param_group, lr in zip(self.optimizer.param_groups, self._rates_now):
            param_group["lr"] = lr
        measured = self.gradients.measure(self.scaler, self.optimizer)
        nonfinite = measured["nonfinite"]
        skips = self.config.train.nonfinite == "skip"
        if not (skips and self._skip(nonfinite)):
            self.scaler.step(self.optimizer) if self.scaler.is_enabled() else self._step()
        self.scaler.update()
        clear_gradients(self.optimizer)
        self.buffers.commit(nonfinite if skips else None)
        if self.average is not None:
            self.average.update_parameters(self.model)
        return measured

    @torch.no_grad()
    def evaluate(self, step: int, position: int, batch: Any, count: int, share: int = 0) -> Tensor:
        """The values that `names` lists, summed over the `count` samples that one of this rank's shares has of a
        validation batch; float64, in the order of `names`."""
        if not count and not self.gradients.waits_in_forward:
            return torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        self._generators.seed(seed_of("validate", self.config.seed, step, position, self.shares[share]))
        measured = self._forward(self.validated, batch)
        values = torch.stack([measured[name].double() for name in self.names])
        return values * count if count else torch.zeros_like(values)

    @property
    def validated(self) -> nn.Module:
        """The model that validation measures: the average if there is one."""
        return self.model if self.average is None else self.average

    def train(self, on: bool) -> None:
        """Switch between training and validation."""
        for model in (self.gradients.parallel, self.validated):
            model.train(on)
            if on:
                self.gradients.release(model)

    def warm_up(self, batch: Any) -> None:
        """A throwaway forward and backward pass, in every attempt, before the state is restored.

        DDP changes the layout of its gradient buckets after its first backward pass, and with three ranks or more the
        order of a sum depends on the layout. Without the warm-up, a resumed run would take one step with the first
        layout that the undisturbed run took with the second. It also compiles the model and finds the names of the
        task's metrics. Only the buffers change, and are put back. Raises ConfigError when the task returns no loss.
        """
        self._generators.seed(0)
        self.train(True)
        for _ in range(2 if self.config.train.cuda_graphs else 1):  # torch records the second pass
            names = set(output := self._forward(self.gradients.parallel, batch))
            if "loss" not in names:
                raise ConfigError(f"task={self.config.task}: step() must return a dict with a 'loss', not {[*output]}")
            self._backward(output["loss"])
            clear_gradients(self.optimizer)
            self.gradients.end_warm_up()
            self.buffers.commit()
        self.names = ["loss", *sorted(names - {"loss"})]
        report_cuda_graphs(self.config.train, self.group)

    def state_dict(self) -> dict[str, Any]:
        """The state as the last `update` left it, even if a forward pass has run since. The same on every rank. Holds
        references: copy it to keep it beyond the next step."""
        return self._state_dict(self.buffers.committed, self.optimizer.state_dict())

    def hold(self, on_host: Callable[[Tensor], bool]) -> HeldState:
        """What the host holds of the state now, see `HeldState`; the CPU itself changes the tensors that `on_host`
        names."""
        return HeldLearner(self, on_host)

    def _state_dict(self, buffers: Committed, optimizer: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.buffers.in_state_dict(self.gradients.state_of(self.model, keep_vars=True), buffers),
            "average": None if self.average is None else self.gradients.state_of(self.average),
            "optimizer": self.gradients.marked(optimizer),
            "scaler": self.scaler.state_dict(),
        }

    def live_state(self) -> dict[str, Any]:
        """The state that a checkpoint can be loaded into, without a copy of it."""
        live = self.state_dict()
        optimizer = live.pop("optimizer")
        return {**live, "optimizer": self.gradients.live(optimizer)} if loads_in_place(self.optimizer) else live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.buffers.snapshot()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        load_optimizer(self.optimizer, self.gradients.local(state["optimizer"]))
        self.scaler.load_state_dict(state["scaler"])

    def _forward(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        batch = self.task.on_device(batch)
        if self.config.train.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # however often the Task calls the model: all of it is one pass
        if self.config.train.channels_last:
            batch = for_each_tensor(channels_last, batch)
        if self.dtype is torch.float32:
            measured = self.task.step(model, batch)
        else:
            with torch.autocast(self.device.type, self.dtype):
                measured = self.task.step(model, batch)
        self._generators.check()
        return measured

    def _backward(self, loss: Tensor) -> None:
        self.gradients.backward(self.scaler.scale(loss), loss.detach().float())

    def _skip(self, nonfinite: Tensor) -> bool:
        """Whether to leave this step out here and now. A fused optimiser does it by itself: it reads the flag on the
        device, as it does for the scaler, and the CPU does not wait. For any other, the CPU waits."""
        if self.scaler.is_enabled():
            return False
        if compat.reads_found_inf(self.optimizer):
            self.optimizer.found_inf = nonfinite  # type: ignore[attr-defined]
            return False
        return bool(nonfinite)


class HeldLearner:
    """A learner's state. Weights, average and scaler change on the device alone, each in its place."""

    def __init__(self, learner: Learner, on_host: Callable[[Tensor], bool]) -> None:
        self._learner = learner
        self._buffers = learner.buffers.committed
        self._optimizer = HeldOptimizer(learner.optimizer, on_host)
        self._addresses = addresses(learner.gradients.in_place)
        self._inputs = _Inputs(learner) if learner.await_update is not None else None

    @property
    def state(self) -> dict[str, Any]:
        """See HeldState."""
        return self._learner._state_dict(self._buffers, self._optimizer.state_dict())

    def unchanged(self) -> bool:
        """See HeldState."""
        return self._addresses == addresses(self._learner.gradients.in_place)

    def put_back(self) -> bool:
        """Give the host back what it held right before an update, so that `update` can do it once more. False if it
        cannot: then nothing has changed."""
        if self._inputs is None or self._buffers.elsewhere:  # which the host has changed
            return False
        if not self._optimizer.can_put_back() or not self.unchanged():
            return False
        self._optimizer.put_back()
        self._learner.buffers.committed = self._buffers
        self._inputs.put_back()
        return True


class _Inputs:
    """What the update of a step needs besides the state, as the host has it right before."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._rates, self._received = learner._rates_now, learner.buffers.received
        self._average_is_empty = learner.average is not None and learner.average.is_empty
        self._put_back_gradients = learner.gradients.hold()

    def put_back(self) -> None:
        learner = self._learner
        learner._rates_now, learner.buffers.received = self._rates, self._received
        if learner.average is not None:
            learner.average.is_empty = self._average_is_empty
        self._put_back_gradients()
