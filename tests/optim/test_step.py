"""An update without what torch puts around it is torch's own, and whatever stands around it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from laststep import compat


def parameter() -> nn.Parameter:
    found = nn.Parameter(torch.linspace(-1, 1, 5))
    found.grad = torch.linspace(1, 2, 5)
    return found


def sgd() -> Optimizer:
    return SGD([parameter()], lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize(
    "make", [sgd, lambda: AdamW([parameter()], lr=0.1, fused=True), lambda: RMSprop([parameter()])]
)
def test_the_bits_are_those_of_torch(make: Callable[[], Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step that is left out by the flag of train.nonfinite=skip, which a fused optimiser reads itself."""
    ours, theirs = make(), make()
    profiled: list[Optimizer] = []
    monkeypatch.setattr(Optimizer, "_optimizer_step_code", lambda optimizer: profiled.append(optimizer))
    for number in range(4):
        for optimizer in (ours, theirs):
            if not isinstance(optimizer, RMSprop):
                optimizer.found_inf = torch.tensor(float(number == 2))  # type: ignore[attr-defined]
        compat.step(ours)
        theirs.step()
        one, other = (each.param_groups[0]["params"][0] for each in (ours, theirs))
        assert torch.equal(one, other) and one.requires_grad
        torch.testing.assert_close(ours.state[one], theirs.state[other], rtol=0, atol=0)
    assert ours not in profiled, "nothing is left out"


def test_hooks_are_called() -> None:
    """In every step, from the one on before which they are registered to the one before which they are removed."""
    optimizer, called = sgd(), list[Optimizer]()
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda optimizer, *_: called.append(optimizer))
        compat.step(optimizer)
        handle.remove()
        compat.step(optimizer)
        assert called == [optimizer]
        called.clear()


def test_a_replaced_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the object, as torch's schedulers do, on the class, wrapped or not, or in a class of the user's."""

    class Mine(SGD):
        def step(self, closure: Any = None) -> Any:
            called.append("inherited")
            return super().step(closure)

    called: list[str] = []
    compat.step(Mine([parameter()], lr=0.1))
    assert called == ["inherited"]

    optimizer = sgd()
    original = optimizer.step
    optimizer.step = lambda *given: (called.append("object"), original(*given))[1]  # type: ignore[assignment, func-returns-value]
    compat.step(optimizer)
    assert called.pop() == "object"

    of_class = SGD.step
    for wrap in (functools.wraps(of_class), lambda function: function):

        def step(self: SGD, *given: Any) -> Any:
            called.append("class")
            return of_class(self, *given)

        monkeypatch.setattr(SGD, "step", wrap(step))
        for _ in range(2):
            compat.step(sgd())
            assert called.pop() == "class"
