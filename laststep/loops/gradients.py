"""How the gradients of the ranks meet, and the loss with them, where each rank has the whole model.

`Gradients` is the face that a learner uses; `Replicated` is DistributedDataParallel behind it, and `Sharded` (in
sharded.py, which takes a second to import) is FSDP2. Besides: the check that gradients are finite, the rehearsal that
fixes DDP's buckets, and the recomputation of activations in the backward pass.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laststep import compat
from laststep.compat import tree_leaves, tree_map
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.data.order import preserved_generators
from laststep.loops.shares import AddsShares, ShareSum, shares_of
from laststep.ranks.group import Group, TreeHook, is_peer_loss
from laststep.ranks.world import Gathered


class Gradients(ABC):
    """The gradients of a model, and the loss. A step calls `backward` for each micro-batch, `meet`, and `measure`.

    All collectives are in the forward pass, in `backward` and in `meet`. The defaults are for a model that every rank
    has as a whole.
    """

    waits_in_forward = False  # whether a forward pass waits for the other ranks
    parallel: nn.Module  # the model as a training step calls it
    share_sum: AddsShares

    def adopt(self, optimizer: Optimizer, task: str) -> None:  # noqa: B027 (nothing to prepare)
        """Prepare the optimiser, which `task` has made. Raises ConfigError."""

    @property
    @abstractmethod
    def in_place(self) -> list[Tensor]:
        """What an update changes in its place."""

    def release(self, model: nn.Module) -> None:  # noqa: B027 (it has gathered nothing)
        """Free what a validation has gathered of `model`."""

    def state_of(self, model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
        """The model's state_dict. May be called by any thread, at any time after the warm-up."""
        return model.state_dict(keep_vars=keep_vars)

    @abstractmethod
    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch; `last`: of the step."""

    @abstractmethod
    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """The backward pass of `loss`, a scalar, which the scaler has `scaled`."""

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:  # noqa: B027 (DDP has summed all)
        """What is left to learn from the other ranks before the update of `step` (from 0). A rank that has this knows
        that the gradients of the step are complete on every rank."""

    def gathered(self, steps: int | None) -> Gathered | None:
        """What `meet` has learned in the last `steps` steps, or in all (None). None if no rank can use that: any rank
        that has done the update can save it for all."""
        return None

    def hold(self) -> Callable[[], None]:
        """Keep what `measure` will need for the step that has met. Returns what puts it back."""
        return lambda: None

    def take(self, gathered: Gathered) -> bool:
        """Take what another rank has learned in `meet`, in place of the thread that waits in it for good. False if this
        rank's gradients of that step are not complete."""
        return False

    @abstractmethod
    def measure(self, scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
        """The step's `loss` and `nonfinite`, and with optim.clip_norm the norm of the gradient, which this clips:
        scalars, see `Learner.update`. No collectives here. What the update changes must not change before this."""

    def marked(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimiser as a checkpoint holds it."""
        return optimizer

    def live(self, marked: dict[str, Any]) -> dict[str, Any]:
        """What the optimiser's part of a checkpoint can be loaded into."""
        return marked

    def local(self, marked: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimiser as the optimiser loads it."""
        return marked

    @abstractmethod
    def end_warm_up(self) -> None:
        """Drop the loss of the warm-up."""


class Replicated(Gradients):
    """The gradients of a model that every rank has, and the loss.

    A backward pass also makes the loss the gradient of a parameter, the loss tap: DDP averages it with the other
    gradients, so every rank knows the loss of every step without a further collective.
    """

    def __init__(self, model: nn.Module, group: Group, config: Config) -> None:
        """A collective."""
        self._clip_norm = config.optim.clip_norm
        self._loss_tap = nn.Parameter(torch.zeros((), device=group.device))
        self._parameters = list(model.parameters())
        self.summed = [self._loss_tap, *self._parameters]
        self.parallel = data_parallel(model, self._loss_tap, group, config.train)
        self._alone = self.parallel is model
        self._task, self._unused = config.task, None
        if config.train.find_unused_parameters and not self._alone:
            self._unused = UnusedParameters(self._parameters, group)  # sees a gradient before the sum takes it away
        self.share_sum: AddsShares = ShareSum(self.summed, len(shares_of(config.train, group.world)))
        # With several ranks it lies in a bucket, which the next all-reduce overwrites, as a CUDA graph does its memory.
        self._loss_stays = self._alone and not config.train.cuda_graphs
        in_buckets = not self._alone and lays_in_buckets(config.train, group.device)
        self._finite_check = FiniteCheck(self._loss_tap, self._parameters, in_buckets)

    @property
    def in_place(self) -> list[Tensor]:
        """The parameters."""
        return list(self._parameters)

    def reducing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """All micro-batches but the last keep their gradients on the rank."""
        if last or not isinstance(self.parallel, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.parallel.no_sync()

    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """The loss becomes the gradient of the loss tap. Raises ConfigError where DDP has not summed all gradients: the
        update would be made with those of this rank."""
        if isinstance(self.parallel, DistributedDataParallel):
            if self._unused is not None:
                self._unused.begin()
            compat.backward(scaled, self._loss_tap, loss)
            if self.parallel.require_backward_grad_sync:
                if self._unused is not None:
                    self._unused.complete()
                if (missing := compat.missing_gradients(self.parallel)) is not None:
                    raise ConfigError(unused(self.parallel, missing, self._task))
        else:  # the same, faster
            compat.backward(scaled)
            self._loss_tap.grad = loss if self._loss_tap.grad is None else self._loss_tap.grad + loss

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:
        """With train.find_unused_parameters, learn which parameters no rank has used."""
        if self._unused is not None:
            self._unused.meet()

    def measure(self, scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
        """Reads the loss from the loss tap."""
        measured: dict[str, Tensor] = {}
        if self._clip_norm is not None:
            scaler.unscale_(optimizer)
            measured["grad_norm"] = _clip(self._parameters, self._clip_norm).float()
        # Infinite gradients are part of fp16, and no fault: the scaler lowers its scale.
        nonfinite = self._finite_check.nonfinite(measured.get("grad_norm"), loss_alone=scaler.is_enabled())
        loss, self._loss_tap.grad = self._loss_tap.grad, None
        assert loss is not None
        return {"loss": loss if self._loss_stays else loss.clone(), "nonfinite": nonfinite, **measured}

    def end_warm_up(self) -> None:
        """The loss is in the loss tap."""
        self._loss_tap.grad = None
        if self._unused is not None:
            self._unused.used.clear()


def unused(ddp: nn.Module, missing: Sequence[int], task: str) -> str:
    """What to say of parameters without a gradient, by their numbers among those of `ddp` that are trained."""
    trained = [name for name, parameter in ddp.named_parameters() if parameter.requires_grad]
    names = [trained[number].removeprefix("module.model.") for number in missing if number < len(trained)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"task={task}: a step gave no gradient to {', '.join(names[:3]) + more or 'a parameter'}: with several ranks "
        "set train.find_unused_parameters=true, or freeze in model() what is never used"
    )


class UnusedParameters:
    """train.find_unused_parameters: gives DDP a gradient of zeros for each parameter that a step has not reached on
    this rank, and takes it away again if no rank has reached it.

    DDP sums a gradient once each parameter's has come. Where a rank has none for a parameter, zeros are right: the mean
    is over all samples. Where no rank has, the gradient is None, as it is on one rank: with zeros, weight decay and
    momentum would change a parameter that nothing uses.

    DDP's option of that name is not set. It takes from the graph of the last forward pass what a backward pass will not
    reach, so it knows neither the loss tap nor a model that is called twice, and passes gradients on before those of a
    rank's earlier shares are added. Here the order is: the backward pass, and then one more for what it has left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        self.used: set[nn.Parameter] = set()  # in this step, on this rank
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._group = group
        self._reached: set[nn.Parameter] = set()  # by the backward pass under way
        self._nodes = []  # autograd forgets them, with their hooks, unless they are kept
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._use)
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_hook(partial(self._reach, parameter))  # DDP counts a gradient that is not defined, too
            self._nodes.append(node)

    def begin(self) -> None:
        """A backward pass begins."""
        self._reached.clear()

    def complete(self) -> None:
        """The last backward pass of the step is done: give DDP the rest."""
        rest = [parameter for parameter in self._parameters if parameter not in self._reached]
        if rest:
            used = set(self.used)
            torch.autograd.backward(rest, [torch.zeros_like(parameter) for parameter in rest])
            self.used.clear()
            self.used |= used

    def meet(self) -> None:
        """Let no parameter have a gradient that no rank has used in this step. A collective. Where this rank has used
        all, it does not wait for the device."""
        used = [parameter in self.used for parameter in self._parameters]
        self.used.clear()
        counts = self._group.gather(torch.tensor(used, dtype=torch.uint8, device=self._group.device))
        if not all(used):
            for parameter, count in zip(self._parameters, torch.stack(counts).amax(0).tolist()):
                if not count:
                    parameter.grad = None

    def _use(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # autograd calls this without one, too
            self.used.add(parameter)

    def _reach(self, parameter: nn.Parameter, *_: Any) -> None:
        self._reached.add(parameter)


def data_parallel(model: nn.Module, loss_tap: nn.Parameter, group: Group, train: Train) -> nn.Module:
    """The model in DistributedDataParallel, which also sums the gradient of `loss_tap`; one rank: the model itself."""
    if group.world.size == 1:
        if not (train.shares and train.compile):
            return model
        group.connect_alone()  # torch compiles a model within DDP into other graphs: one for each bucket
    parallel = DistributedDataParallel(
        _WithLossTap(model, loss_tap),
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=lays_in_buckets(train, group.device),
        **compat.no_buffer_sync(),  # `Buffers` broadcasts them instead
    )
    if train.shares:
        TreeHook(group.world.size, group.device).register(parallel)
    return parallel


def lays_in_buckets(train: Train, device: torch.device) -> bool:
    """Whether DDP leaves the gradients in its buckets, which saves a copy. On a GPU the order of a sum over a gradient,
    such as its norm, depends on how its memory is aligned: with shares it stays where one rank has it, too."""
    return device.type != "cuda" or not train.shares


def _clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip the gradient to this norm; returns its norm before. One nonfinite gradient makes all nonfinite. An infinite
    limit leaves the gradient as it is."""
    if math.isinf(limit):
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return nn.utils.clip_grad_norm_(parameters, limit)


class _WithLossTap(nn.Module):
    """What DDP wraps: the model and the loss tap, see Replicated."""

    def __init__(self, model: nn.Module, loss_tap: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.loss_tap = loss_tap

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.model(*args, **kwargs)


ZEROS = 256


class FiniteCheck:
    """Checks the gradients of these parameters, and of `loss_tap`, whose gradient is the loss.

    `in_buckets` is True if DDP lays the gradients in its flat buckets. One large tensor is checked faster than many
    small ones.
    """

    def __init__(self, loss_tap: nn.Parameter, parameters: Sequence[nn.Parameter], in_buckets: bool) -> None:
        self._loss_tap = loss_tap
        self._parameters = [loss_tap, *parameters]
        # In other types the norm of finite gradients may be infinite: in fp16 itself, for fp64 as the fp32 that it is
        # logged as. In these it is so only where the gradient is beyond any use.
        self._one_type = len({p.dtype for p in self._parameters}) == 1
        self._norm_suffices = all(p.dtype in (torch.float32, torch.bfloat16) for p in parameters)
        self._in_buckets = in_buckets
        self._addresses: list[int] = []  # of the gradients that `_buckets` are made of
        self._buckets: list[Tensor] = []
        self._one = torch.ones((), device=loss_tap.device)
        self._zeros: Iterator[Tensor] = iter(())  # scalars made in advance, one for each of the next steps

    def nonfinite(self, norm: Tensor | None, loss_alone: bool) -> Tensor:
        """1.0 if the loss or a gradient holds an infinity or a NaN, else 0.0; a scalar on the device.

        `norm` is that of the whole gradient, in fp32, if it has been computed. `loss_alone` leaves out the gradient.
        """
        loss = self._loss_tap.grad
        assert loss is not None
        if loss_alone:
            checked = [loss]
        elif norm is not None and self._norm_suffices:
            checked = [loss, norm]
        else:
            checked = self._gradients()
        found = self._zero()
        for tensors in [checked] if self._one_type else _by_type(checked):
            compat.note_nonfinite(tensors, found, self._one)
        return found

    def _zero(self) -> Tensor:
        """A new scalar, in a quarter of the time of torch.zeros, and on a GPU without a kernel."""
        zero = next(self._zeros, None)
        if zero is None:
            self._zeros = iter(torch.zeros(ZEROS, device=self._one.device).unbind())
            zero = next(self._zeros)
        return zero

    def _gradients(self) -> list[Tensor]:
        """All gradients, those in buckets as whole buckets."""
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if not self._in_buckets:
            return gradients
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self._addresses:  # at the first step, and whenever DDP has made other buckets
            self._addresses, self._buckets = addresses, buckets_of(gradients)
        return self._buckets or gradients


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in {t.dtype: None for t in tensors}]


def buckets_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The memory in which these gradients lie, as flat tensors; an empty list if anything else lies there too."""
    storages = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
    buckets = [torch.empty(0, dtype=g.dtype, device=g.device).set_(g.untyped_storage()) for g in storages.values()]
    are_full = sum(bucket.numel() for bucket in buckets) == sum(gradient.numel() for gradient in gradients)
    return buckets if are_full else []


FAILED = (
    "the rehearsal failed: with three or more ranks, a custom loop's first batch goes through the model once more in "
    "advance, forward and backward, with the error above. If the model does not allow that, train.rehearsal=false "
    "leaves it out; the last bits of a resumed run may then differ"
)


def rehearse(module: nn.Module, ddp: DistributedDataParallel, device: torch.device) -> None:
    """Rehearse the model's first forward pass, so that DistributedDataParallel adds gradients in the same order in
    every attempt. `module` is `ddp` itself or wraps it, and is what the user calls.

    DDP changes the layout of its gradient buckets after its first backward pass, and with three ranks or more the order
    of a sum depends on the layout. A resumed run would take one step with the first layout that the undisturbed run
    took with the second. So in every attempt the first forward pass is preceded by one on the same batch, whose
    backward pass sends zeros. One and two ranks need none: a sum of two is the same in either order.
    """

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            hook.remove()
            try:
                _rehearse(module, ddp, device, args, kwargs)
            except Exception as error:
                if is_peer_loss(error):
                    raise
                raise RuntimeError(FAILED) from error

    hook = module.register_forward_pre_hook(before_forward, with_kwargs=True)


def rehearse_without_forward(ddp: DistributedDataParallel) -> None:
    """Fix the layout of the buckets now, without the model's own forward pass: for a framework whose model may not be
    called twice. The layout is that of parameters which are used in the order of their registration."""
    if dist.get_world_size() <= 2:
        return
    module, parameters = ddp.module, [each for each in ddp.parameters() if each.requires_grad]
    module.forward = lambda: sum(each.flatten()[:0].sum().float() for each in parameters)
    try:
        for _ in range(2):  # DDP changes the layout at the beginning of its second forward pass
            ddp().backward()
    finally:
        del module.forward
    for parameter in parameters:
        parameter.grad = None


def _rehearse(
    module: nn.Module, ddp: DistributedDataParallel, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A forward and a backward pass that change nothing but the layout of the buckets."""
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    syncs, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True  # off within no_sync()
    with preserved_generators(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        args, kwargs = tree_map(_copy, (args, kwargs))
        outputs = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            raise TypeError("found no tensor that requires a gradient in what the model returned")
        torch.autograd.backward(differentiable, [torch.zeros_like(output) for output in differentiable])
    ddp.require_backward_grad_sync = syncs
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers):
            buffer.copy_(before)
    for parameter, gradient in zip(module.parameters(), gradients):
        parameter.grad = gradient


def _copy(value: Any) -> Any:
    """A copy of a tensor, for the rehearsal to change and to receive its gradient; any other value unchanged."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # what else torch.nn has is too small, or a container


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of which a model has several of a kind, such as residual blocks and encoder layers."""
    kinds = Counter(
        type(m) for m in model.modules() if type(m) in LAYERS or not type(m).__module__.startswith("torch.nn.")
    )
    blocks = [m for m in model.modules() if kinds[type(m)] > 1]
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    return [block for block in blocks if id(block) not in inner]


def checkpoint_activations(model: nn.Module, compiled: bool) -> None:
    """Recompute the repeated blocks in the backward pass; a model without repeated blocks recomputes its children."""
    chosen = {id(m) for m in repeated_blocks(model) or model.children()}
    # torch.compile does its own recomputation, which does not repeat such side effects.
    contexts = None if compiled else lambda: _statistics_once(model)
    compat.checkpoint_activations(model, lambda m: id(m) in chosen, contexts)


def _statistics_once(model: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    """Contexts for the forward pass and for its recomputation, in which batch norm must not count the batch again."""

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        norms = [m for m in model.modules() if compat.is_batch_norm(m)]
        before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, batches) in zip(norms, before):
                norm.momentum, norm.num_batches_tracked = momentum, batches

    return contextlib.nullcontext(), recomputation()
