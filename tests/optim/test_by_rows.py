"""An optimiser of sharded parameters sees the rows of its rank alone, so each row's update must not need others.

Where that is not noticed, a sharded run trains in another way on each number of ranks, without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from laststep.config.errors import ConfigError
from laststep.loops.sharded import Rows
from laststep.optim.build import needs_other_rows


class Own(Optimizer):
    """A user's class, as they are usually written; `direction` makes of a gradient what is subtracted."""

    def __init__(self, parameters: Sequence[Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.power = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * self.direction(parameter, self.state[parameter])

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        state["square"] = 0.9 * state.get("square", 0) + parameter.grad**self.power
        state["step"] = state.get("step", 0) + 1
        return parameter.grad / state["square"].sqrt()


class Lamb(Own):
    """A step as long as the matrix (You et al. 2020)."""

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        direction = super().direction(parameter, state)
        return direction * (parameter.norm() / direction.norm())


class Shampoo(Own):
    """Preconditioned from both sides (Gupta et al. 2018)."""

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state["left"] = state.get("left", 0) + gradient @ gradient.T
        state["right"] = state.get("right", 0) + gradient.T @ gradient
        roots = [torch.linalg.matrix_power(torch.eye(len(each)) + each, -1) for each in (state["left"], state["right"])]
        return roots[0] @ gradient @ roots[1]


class Late(Own):
    """Whose large state is there long before it is used."""

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("covariance", torch.zeros(parameter.shape[1], parameter.shape[1]))
        return super().direction(parameter, state)


class Rounding(Own):
    """Rounds up or down by chance."""

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(parameter, state) + torch.rand_like(parameter)


class Named(Own):
    """Knows its parameters, and no others."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self.names = dict(zip(parameters, "abc"))

    def direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        assert self.names[parameter]
        return super().direction(parameter, state)


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5, 4)) for _ in range(2)]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Lamb, Shampoo, Late])
def test_refused(kind: Callable[[Sequence[Tensor]], Optimizer]) -> None:
    """In one line, before the first step, whether torch's or a user's own."""
    with pytest.raises(ConfigError, match=r"^task=mine.Mine: optimizer\(\): \w+ updates a matrix as a whole, so train"):
        Rows(kind(matrices()), "mine.Mine")


ELEMENTWISE: list[Callable[[Any], Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    lambda p: AdamW(p, fused=True),
    lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.0}], amsgrad=True, foreach=True),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, Own, Rounding, Named),
]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_accepted(kind: Callable[[Sequence[Tensor]], Optimizer]) -> None:
    """Every optimiser of torch that updates elements, and one that cannot be tried."""
    assert not needs_other_rows(kind(matrices()))


def test_a_trial_leaves_no_trace() -> None:
    """Neither in the optimiser, nor in its hooks and its schedule, nor in the generator: else the first step would be
    another one."""
    parameters, noted = matrices(), list[str]()
    optimizer = Rounding(parameters)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *_: noted.append("hook"))
    before = torch.get_rng_state()
    assert not needs_other_rows(optimizer)
    assert torch.equal(torch.get_rng_state(), before) and not noted
    assert not optimizer.state and all(torch.equal(each, torch.ones(5, 4)) for each in parameters)
    optimizer.step()
    schedule.step()  # warns if the optimiser's own step is not the one that it has replaced
    assert noted == ["hook"]
