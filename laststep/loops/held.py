"""A state as it is now, to be read later, when the CPU has moved on and the device has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from laststep.checkpoint.manager import Position
from laststep.checkpoint.pack import map_tensors


class HeldState(Protocol):
    """What the host holds of a state. The contents of tensors on the device are not copied."""

    @property
    def state(self) -> dict[str, Any]:
        """The state: references."""

    def unchanged(self) -> bool:
        """Whether these are still the tensors of that state."""


@dataclass(frozen=True)
class HeldStep:
    """What the host held of a step's state before the next update."""

    position: Position
    state: HeldState


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors are in memory. An update that gives one other memory leaves the old memory to anything else."""
    return [tensor.data_ptr() for tensor in tensors]


class HeldOptimizer:
    """An optimiser's state: its rates, its counters, and which tensors it uses. Adam's `step` may be on the CPU: then
    it is copied."""

    def __init__(self, optimizer: Optimizer, on_host: Callable[[Tensor], bool]) -> None:
        def hold(value: Any) -> Any:
            return map_tensors(value, lambda tensor: tensor.clone() if on_host(tensor) else tensor)

        self._optimizer, self._on_host = optimizer, on_host
        self._whole: dict[str, Any] | None = None
        if type(optimizer).state_dict is not Optimizer.state_dict:
            self._whole = hold(optimizer.state_dict())
            return
        self._groups = [
            {name: value if name == "params" else hold(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._state = {
            key: {n: v if isinstance(v, Tensor) and not on_host(v) else hold(v) for n, v in values.items()}
            if isinstance(values, dict)
            else hold(values)
            for key, values in optimizer.state.items()
        }

    def can_put_back(self) -> bool:
        """Whether `put_back` is possible: the optimiser has the same tensors as then, and has made no others."""
        live = self._optimizer.state
        if self._whole is not None or self._state.keys() != live.keys():
            return False
        return all(
            isinstance(values, dict)
            and values.keys() == live[key].keys()
            and all(self._is_same(live[key][name], value) for name, value in values.items())
            for key, values in self._state.items()
        )

    def _is_same(self, live: Any, held: Any) -> bool:
        return not isinstance(live, Tensor) or live is held or self._on_host(live)

    def put_back(self) -> None:
        """Give the optimiser back what the CPU has changed since."""
        for group, held in zip(self._optimizer.param_groups, self._groups):
            group.update({name: value for name, value in held.items() if name != "params"})
        for key, values in self._state.items():
            for name, value in values.items():
                live = self._optimizer.state[key][name]
                if not isinstance(live, Tensor):
                    self._optimizer.state[key][name] = value
                elif live is not value:
                    live.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser's own state_dict() returned, or would have returned, when this was made."""
        if self._whole is not None:
            return self._whole
        numbers: dict[int, int] = {}
        groups = []
        for group in self._groups:
            named = {name: value for name, value in group.items() if name != "params"}
            named["params"] = [numbers.setdefault(id(parameter), len(numbers)) for parameter in group["params"]]
            groups.append(named)
        state = {numbers.get(id(key), key): values for key, values in self._state.items()}
        return {"state": state, "param_groups": groups}
