"""The private names of torch that sharded training uses; the others are beside it.

Nothing is imported at the top, and no other part of Laststep may use a private name of a library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer


def set_found_inf(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Let `scaler.step` act as after an `unscale_` that has found this flag, a scalar on the device. torch's own would
    ask the other ranks in the middle of the update."""
    from torch.amp.grad_scaler import OptState

    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.UNSCALED


def on_this_rank(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, as it is at this moment; any other tensor itself. `to_local()` takes ten times
    as long."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar on the device, in one call."""
    import torch

    torch._foreach_mul_(tensors, factor)


def recording(note: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> AbstractContextManager[Any]:
    """Call `note` with each operator that torch runs in this block, its arguments, and what it has returned."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            note(func, args, kwargs, result)
            return result

    return Recorder()


def name_of(operator: Any) -> str:
    """The name of an operator, the same for all its overloads, such as aten::normal_."""
    name: str = operator._schema.name
    return name


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    schema = operator._schema.arguments
    given = [(args[n] if n < len(args) else kwargs.get(each.name), each.alias_info) for n, each in enumerate(schema)]
    return [value for value, alias in given if alias is not None and alias.is_write]


def storage_of(tensor: Tensor) -> int:
    """What tells the memory of a tensor from that of any other that exists, also on the meta device."""
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def trunc_normal_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have `nn.init.trunc_normal_` call what `wrap` makes of the function that does the work: it reads what it draws,
    and leaves out tensors without data."""
    from torch.nn import init

    real = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = wrap(real)
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = real


def takes_default_device(function: Any) -> bool:
    """Whether a function of torch makes a tensor on the default device."""
    from torch.utils._device import _device_constructors

    return function in _device_constructors()
