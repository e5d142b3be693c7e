"""The step of torch's fused SGD, Adam and AdamW without the Python around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.compat import kernels

_KERNELS: dict[type[Optimizer], Callable[..., None]] = {
    torch.optim.SGD: kernels.fused_sgd,
    torch.optim.Adam: kernels.fused_adam,
    torch.optim.AdamW: kernels.fused_adam,
}


class FastStep:
    """Does what `optimizer.step()` does, bit for bit.

    torch looks for hooks, sorts the tensors by device and type, and checks each of them anew in every step. For a small
    model that takes ten times as long as the kernel. Here the kernel gets the lists of the step before, unless anything
    about the optimiser has changed since: then torch does this step, and so it does every step of any other optimiser.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kernel = _KERNELS.get(type(optimizer))
        if not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
            self._kernel = None  # somebody has replaced the method
        self._of_class = type(optimizer).step
        # As they were after a step of torch's.
        self._groups: list[_Group] = []
        self._all_settings: list[dict[str, Any]] = []
        self._all_states: list[dict[str, Tensor]] = []

    def __call__(self) -> None:
        """Update the parameters."""
        if self._kernel is None or self._calls_others():
            self._optimizer.step()
        elif not self._is_current():
            self._optimizer.step()
            self._look()
        elif None in (gradients := [group.gradients() for group in self._groups]):
            self._optimizer.step()
        else:
            found_inf = getattr(self._optimizer, "found_inf", None)
            recorded = torch.is_grad_enabled()
            kernels.set_grad_enabled(False)
            try:
                for group, grads in zip(self._groups, gradients):
                    self._kernel(group.settings, group.params, grads, group.states, found_inf)
            finally:
                kernels.set_grad_enabled(recorded)

    def _calls_others(self) -> bool:
        """Whether step() would call anything but torch's own code."""
        optimizer = self._optimizer
        return (
            type(optimizer).step is not self._of_class or "step" in vars(optimizer) or kernels.has_step_hooks(optimizer)
        )

    def _is_current(self) -> bool:
        """Whether the optimiser is as `_look` has found it, but for values of tensors and learning rates."""
        return (
            _same(self._all_settings, self._optimizer.param_groups)
            and _same(self._all_states, self._optimizer.state.values())
            and all(group.is_unchanged() for group in self._groups)
        )

    def _look(self) -> None:
        """torch has done a step: see whether the next ones can be done here."""
        groups = [_Group(settings, self._optimizer) for settings in self._optimizer.param_groups]
        if not all(group.is_plain() for group in groups):
            self._kernel = None
        self._groups, self._all_settings = groups, [group.settings for group in groups]
        self._all_states = list(self._optimizer.state.values())


class _Group:
    """A parameter group as a step of torch's left it."""

    def __init__(self, settings: dict[str, Any], optimizer: Optimizer) -> None:
        self.settings = settings
        self.params: list[Tensor] = list(settings["params"])
        self.states: list[dict[str, Tensor]] = [optimizer.state.get(param, {}) for param in self.params]
        self._fixed = itemgetter(*(name for name in settings if name not in ("params", "lr")))
        self._values: tuple[Any, ...] = self._fixed(settings)
        # torch makes the state of a parameter in the first step that has a gradient for it.
        self._has_states = all(map(bool, self.states)) or not settings.get("momentum", True)

    def is_plain(self) -> bool:
        """Whether one call of the kernel does for this group: torch would sort the tensors by device and type."""
        kinds = {(type(param) in (nn.Parameter, Tensor), param.device, param.dtype) for param in self.params}
        has_tensors = any(isinstance(value, Tensor) for value in (self.settings["lr"], *self._values))
        return bool(self.settings["fused"]) and not has_tensors and len(kinds) == 1 and kinds.pop()[0]

    def is_unchanged(self) -> bool:
        """Whether the group is the same, but for values of tensors and the learning rate."""
        settings = self.settings
        return (
            type(settings["lr"]) is float
            and self._fixed(settings) == self._values
            and _same(self.params, settings["params"])
        )

    def gradients(self) -> list[Tensor] | None:
        """The gradient of each parameter; None if one has none, or no state yet."""
        gradients = [gradient for param in self.params if (gradient := param.grad) is not None]
        return gradients if self._has_states and len(gradients) == len(self.params) else None


def _same(objects: Collection[Any], others: Iterable[Any] | Collection[Any]) -> bool:
    """Whether these are the same objects in the same order. Tensors are not compared by value."""
    return len(objects) == len(others) and all(map(is_, objects, others))  # type: ignore[arg-type]
