"""An update by the kernels alone is torch's own step, bit for bit, and torch does every step that might differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from laststep.optim.fast_step import FastStep

STEPS = 6


class Pair:
    """One model twice: one copy is updated by torch, the other by a FastStep."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.copied = copy.deepcopy(self.model)
        self.torchs, self.optimizer = make(self.model), make(self.copied)
        self.fast = FastStep(self.optimizer)

    def both(self, change: Callable[[Optimizer], Any]) -> None:
        """Do something to both optimisers."""
        change(self.torchs)
        change(self.optimizer)

    def step(self, number: int, without: int | None = None) -> None:
        """Update both with the same gradients; the parameter `without` gets none. Compare weights and states."""
        for model in (self.model, self.copied):
            generator = torch.Generator().manual_seed(number)
            for place, parameter in enumerate(model.parameters()):
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if place == without else gradient
        self.torchs.step()
        self.fast()
        for ours, theirs in zip(self.copied.parameters(), self.model.parameters()):
            assert torch.equal(ours, theirs), "the weights are not those of torch's step"
        states = ([*optimizer.state.values()] for optimizer in (self.optimizer, self.torchs))
        torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """The optimisers whose own step() has been called, in order."""
    calls: list[Optimizer] = []
    monkeypatch.setattr(Optimizer, "_optimizer_step_code", lambda optimizer: calls.append(optimizer))
    return calls


def groups(model: nn.Module) -> list[Any]:
    """Two parameter groups with weight decay of their own."""
    decayed, others = [[p for p in model.parameters() if (p.ndim > 1) is which] for which in (True, False)]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> Optimizer:
    """What the configuration makes by default."""
    return AdamW(groups(model), lr=0.1, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, fused=True),
    "nesterov": lambda model: SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "dampening": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
    "adam": lambda model: Adam(groups(model), lr=0.1, weight_decay=0.1, fused=True),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True, maximize=True, fused=True),
    "adamw": adamw,
    "adamw betas": lambda model: AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.7), eps=1e-3, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_torch(name: str, by_torch: list[Optimizer]) -> None:
    """A step that rounds otherwise would end in other weights than a run of before. torch is called for the first step
    alone: else nothing is gained."""
    pair = Pair(OPTIMIZERS[name])
    for number in range(STEPS):
        pair.both(lambda optimizer, lr=0.1 / (number + 1): optimizer.param_groups[0].update(lr=lr))  # type: ignore[misc]
        pair.step(number)
    assert by_torch.count(pair.optimizer) == 1


@pytest.mark.parametrize("name", ["nesterov", "amsgrad", "adamw"])
def test_a_step_is_left_out_by_the_flag(name: str, by_torch: list[Optimizer]) -> None:
    """train.nonfinite=skip relies on it."""
    pair = Pair(OPTIMIZERS[name])
    for number in range(STEPS):
        flag = torch.tensor(float(number in (2, 3)))
        pair.both(lambda optimizer, flag=flag: setattr(optimizer, "found_inf", flag))  # type: ignore[misc]
        before = [parameter.clone() for parameter in pair.copied.parameters()]
        pair.step(number)
        same = all(torch.equal(*each) for each in zip(before, pair.copied.parameters()))
        assert same == (number in (2, 3))
    assert by_torch.count(pair.optimizer) == 1


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "other state": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a new tensor": lambda optimizer: [
        state.update(exp_avg=torch.ones_like(state["exp_avg"])) for state in optimizer.state.values()
    ],
    "a new entry": lambda optimizer: optimizer.state.update(
        {key: {n: v + 1 for n, v in values.items()} for key, values in optimizer.state.items()}
    ),
    "no state": lambda optimizer: optimizer.state.clear(),
    "weight decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "betas": lambda optimizer: optimizer.param_groups[1].update(betas=(0.1, 0.2)),
    "a tensor as rate": lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.3)),
    "not fused": lambda optimizer: [group.update(fused=False, foreach=True) for group in optimizer.param_groups],
    "fewer parameters": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "one group": lambda optimizer: optimizer.param_groups.pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name: str) -> None:
    """User code holds the optimiser, and may do anything to it between two steps."""
    pair = Pair(adamw)
    for number in range(STEPS):
        if number == 3:
            pair.both(CHANGES[name])
        pair.step(number)


def test_a_parameter_without_gradient() -> None:
    """It is left alone, with its state, as by torch; in the first step it has no state yet."""
    for name in ("adamw", "amsgrad", "sgd"):
        pair = Pair(OPTIMIZERS[name])
        for number, without in enumerate((1, 1, None, None, 2, None)):
            pair.step(number, without)


def test_a_new_group_is_updated() -> None:
    """As when layers are unfrozen during training."""
    pair = Pair(lambda model: SGD([*model.parameters()][:2], lr=0.1, momentum=0.9, fused=True))
    for number in range(STEPS):
        if number == 3:
            for model, optimizer in ((pair.model, pair.torchs), (pair.copied, pair.optimizer)):
                optimizer.add_param_group({"params": [*model.parameters()][2:]})
        pair.step(number)


def test_hooks_are_called(by_torch: list[Optimizer]) -> None:
    """In every step, from the one on before which they are registered to the one before which they are removed."""
    pair, called = Pair(adamw), []
    for register in (
        pair.optimizer.register_step_pre_hook,
        pair.optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        pair.step(0)
        pair.step(1)
        handle = register(lambda optimizer, *_: called.append(optimizer))
        called.clear()
        pair.step(2)
        pair.step(3)
        assert called.count(pair.optimizer) == 2
        handle.remove()
        by_torch.clear()
        pair.step(4)
        assert pair.optimizer not in by_torch, "the hook is gone, but torch still does the steps"


def test_a_replaced_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the object, as torch's schedulers do, on the class, or in a class of the user's."""

    class Mine(SGD):
        def step(self, closure: Any = None) -> Any:
            called.append("inherited")
            return super().step(closure)

    called: list[str] = []
    pair = Pair(lambda model: Mine(model.parameters(), lr=0.1, fused=True))
    pair.step(0)
    pair.step(1)
    assert called.count("inherited") == 4

    pair = Pair(lambda model: SGD(model.parameters(), lr=0.1, fused=True))
    pair.step(0)
    pair.step(1)
    original = pair.optimizer.step
    pair.optimizer.step = lambda *given: (called.append("object"), original(*given))[1]  # type: ignore[assignment, func-returns-value]
    pair.step(2)
    assert "object" in called
    del pair.optimizer.step
    of_class = SGD.step

    def step(self: SGD, *given: Any) -> Any:
        called.append("class")
        return of_class(self, *given)

    monkeypatch.setattr(SGD, "step", step)
    pair.step(3)
    pair = Pair(lambda model: SGD(model.parameters(), lr=0.1, fused=True))
    called.clear()
    pair.step(0)
    pair.step(1)
    assert called.count("class") == 4


def test_parameters_of_two_types() -> None:
    """torch sorts them by type, and so does every step."""

    def make(model: nn.Module) -> Optimizer:
        next(model.children()).double()
        return SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    pair = Pair(make)
    for model in (pair.model, pair.copied):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        pair.torchs.step()
        pair.fast()
    assert all(torch.equal(*each) for each in zip(pair.model.parameters(), pair.copied.parameters()))
