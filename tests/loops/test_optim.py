"""Optimisers and schedules in the loop: every optimiser resumes bit for bit, and a task may bring its own.

An optimiser whose state does not survive a checkpoint to the last bit makes a resumed run another experiment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.learner import Learner
from laststep.optim.build import SORTED, check_order, load_optimizer
from laststep.optim.names import optimizer_names
from laststep.ranks.group import Group
from laststep.task import Task
from tests.support.records import a_world
from tests.support.states import save_alone

X, Y = torch.randn(12, 8, generator=torch.Generator().manual_seed(3)), torch.arange(12) % 5
TOTAL = 6


class Perceptron(Task):
    """Two matrices, since Muon takes nothing else."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 5, bias=False))

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": functional.cross_entropy(model(x), y)}


def learner(task: type[Task] = Perceptron, *words: str) -> Learner:
    config = Config.load(None, ["device=cpu", "task=mine.Mine", "optim.lr=0.01", *words])
    return Learner(
        config, task(config), Group(a_world(), torch.distributed.HashStore(), torch.device("cpu")), total_steps=TOTAL
    )


def train(learning: Learner, *steps: int, x: Tensor = X) -> list[dict[str, float]]:
    """What each of these steps measured."""
    measured = []
    for step in steps:
        learning.learn(step, [(x, Y)], [12], 12)
        measured.append({name: float(value) for name, value in learning.update().items()})
    return measured


def state_of(learning: Learner) -> list[Any]:
    """All tensors and numbers of a learner's state, copied."""
    leaves, _ = torch.utils._pytree.tree_flatten(copy.deepcopy(learning.state_dict()))
    return leaves


def same(first: list[Any], second: list[Any]) -> bool:
    """Bit for bit, and type for type."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else (type(a), a) == (type(b), b)
        for a, b in zip(first, second)
    )


def through_a_checkpoint(state: dict[str, Any], folder: Path) -> Any:
    """The state, written and read."""
    store = CheckpointStore(folder)
    save_alone(store, CheckpointInfo(3, 1, 36, {}, {}), state)
    return load(store.path(3), store.manifest(3))


@pytest.mark.parametrize(
    "words",
    [
        *(f"optim.name={name}" for name in optimizer_names()),
        "optim.name=adam optim.args.amsgrad=true optim.args.betas=[0.8,0.9]",
        "optim.name=rmsprop optim.args.centered=true optim.args.momentum=0.5",
        "optim.name=sgd optim.args.nesterov=true optim.decay_norms_and_biases=false optim.weight_decay=0.1",
        "optim.name=nadam train.precision=fp16 optim.clip_norm=0.5",
    ],
)
def test_every_optimiser_resumes_exactly(words: str, tmp_path: Path) -> None:
    """Six steps give the same bits as three, a checkpoint through the disk, and three more; and it learns."""
    options = words.split()
    calm, first, second = learner(Perceptron, *options), learner(Perceptron, *options), learner(Perceptron, *options)
    losses = [measured["loss"] for measured in train(calm, *range(TOTAL))]
    train(first, 0, 1, 2)
    second.warm_up((X, Y))
    second.load_state_dict(through_a_checkpoint(first.state_dict(), tmp_path))
    assert same(state_of(second), state_of(first))
    train(second, 3, 4, 5)
    assert same(state_of(second), state_of(calm))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["nadam", "asgd"])
def test_state_keeps_its_precision(name: str) -> None:
    """Torch rounds a loaded state to the dtype of its parameter: float32 products beside bfloat16 weights."""

    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"nadam": torch.optim.NAdam, "asgd": torch.optim.ASGD}
    model = nn.Linear(8, 5).bfloat16()
    optimizer, restored = (kinds[name](model.parameters(), lr=0.01) for _ in range(2))
    for _ in range(3):
        functional.cross_entropy(model(X.bfloat16()).float(), Y).backward()
        optimizer.step()
    load_optimizer(restored, copy.deepcopy(optimizer.state_dict()))
    slots = zip(optimizer.state_dict()["state"].values(), restored.state_dict()["state"].values())
    assert all(same(list(before.values()), list(after.values())) for before, after in slots)
    assert {tensor.dtype for tensor in restored.state[model.weight].values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("words", ["optim.name=rmsprop", "optim.name=sgd optim.args.dampening=0.5", "optim.name=adam"])
def test_every_optimiser_leaves_out_a_step_that_is_not_finite(words: str) -> None:
    """Also those that cannot read the flag on the device. Its gradient norm is no number, so metrics.jsonl has null."""
    learning = learner(Perceptron, "train.nonfinite=skip", "optim.clip_norm=1", *words.split())
    for step, x in enumerate((X * math.nan, X, X * math.nan, X)):
        before = state_of(learning)
        (measured,) = train(learning, step, x=x)
        weights = list(learning.model.parameters())
        assert all(weight.isfinite().all() for weight in weights)
        assert bool(measured["nonfinite"]) == (step % 2 == 0) == math.isnan(measured["grad_norm"])
        assert any(torch.equal(weights[0], old) for old in before if isinstance(old, Tensor)) == (step % 2 == 0)


# --- the gradient norm


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradient_norm(precision: str) -> None:
    """It is the norm before clipping, of the whole gradient, and in fp16 of the unscaled one. An infinite limit
    measures it and changes no weight."""
    words = (f"train.precision={precision}",)
    plain = learner(Perceptron, *words)
    assert all("grad_norm" not in measured for measured in train(plain, 0, 1))
    measuring = learner(Perceptron, *words, "optim.clip_norm=.inf")
    norms = [measured["grad_norm"] for measured in train(measuring, 0, 1)]
    clipping = learner(Perceptron, *words, "optim.clip_norm=0.01")
    assert train(clipping, 0)[0]["grad_norm"] == norms[0]
    if precision == "fp32":
        assert same(list(measuring.model.parameters()), list(plain.model.parameters()))
    model = learner(Perceptron).model
    functional.cross_entropy(model(X), Y).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norms[0] == pytest.approx(float(expected), rel=1e-2 if precision == "fp16" else 1e-5)


# --- what a task may bring


class TwoGroups(Perceptron):
    """Its optimiser and its schedule are its own."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first, last = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5}, {"params": [last]}]
        return torch.optim.Adagrad(groups, lr=0.25)

    def schedule(self, step: int, total: int) -> float:
        return 1 - step / total


def test_parameters_in_the_models_order() -> None:
    """However a task lists them: an optimiser's state is saved by their numbers. Their names move along."""

    class Backwards(Perceptron):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(list(model.named_parameters())[::-1])

    learning = learner(Backwards)
    (group,) = learning.optimizer.param_groups
    assert list(map(id, group["params"])) == list(map(id, learning.model.parameters()))
    assert group["param_names"] == [name for name, _ in learning.model.named_parameters()]
    with pytest.raises(ConfigError, match=r"^this run's checkpoints are of an older version"):  # which did not sort
        check_order(learning.sorted, {"torch": "2.15.0"})
    check_order(learning.sorted, {"torch": "2.15.0", **SORTED})
    check_order(learner().sorted, {"torch": "2.15.0"})


def test_own_optimizer_and_schedule() -> None:
    """The factor applies to each group's own learning rate, and a resumed run asks for it again."""
    learning = learner(TwoGroups)
    for step in (0, 3, 4):
        train(learning, step)
        rates = [group["lr"] for group in learning.optimizer.param_groups]
        assert rates == learning.rates.at(step) == [0.5 * (1 - step / 6), 0.25 * (1 - step / 6)]
    resumed = learner(TwoGroups)
    resumed.load_state_dict(copy.deepcopy(learning.state_dict()))
    train(learning, 5)
    train(resumed, 5)
    assert same(state_of(resumed), state_of(learning))


def test_the_default_schedule_can_be_wrapped() -> None:
    """`super().schedule(...)` is the factor that the configuration asks for."""

    class Halved(Perceptron):
        def schedule(self, step: int, total: int) -> float:
            return super().schedule(step, total) / 2

    words = ("optim.schedule=step", "optim.warmup_steps=2")
    whole, half = learner(Perceptron, *words), learner(Halved, *words)
    for step in range(TOTAL):
        assert half.rates.at(step)[0] == pytest.approx(whole.rates.at(step)[0] / 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, None, "fast", "0.5"])
def test_a_wrong_factor(value: Any) -> None:
    """One line that names the step, instead of weights that are lost."""

    class Wrong(Perceptron):
        def schedule(self, step: int, total: int) -> float:
            return value if step == 2 else 1.0

    learning = learner(Wrong)
    train(learning, 0, 1)
    with pytest.raises(ConfigError, match=r"^task=mine.Mine: schedule\(2, 6\) returned .*a finite number, at least 0$"):
        train(learning, 2)


def without_lr(model: nn.Module) -> Any:
    return type("Own", (torch.optim.Optimizer,), {})(model.parameters(), {})


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda model: None, "must return a torch.optim.Optimizer, not NoneType"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS repeats the forward pass within a step"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), "SparseAdam takes sparse gradients only"),
        (lambda model: torch.optim.Adam(model[0].parameters()), r"leaves out 1 of the model's parameters \(2.weight\)"),
        (
            lambda model: torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(1))]),
            "1 of its parameters are not the model's; build it from the model given",
        ),
        (without_lr, "a parameter group has no lr, which the schedule sets"),
    ],
)
def test_wrong_optimizers(make: Callable[[Any], Any], wrong: str) -> None:
    """Found before the first step. Parameters that no optimiser has would never learn, and nobody would notice."""

    class Wrong(Perceptron):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = make(model)
            return optimizer

    with pytest.raises(ConfigError, match=rf"^task=mine.Mine: optimizer\(\).*{wrong}"):
        learner(Wrong)


def test_every_parameter_frozen() -> None:
    """One line that names the cause; torch's own speaks of an empty list."""

    class Frozen(Perceptron):
        def model(self) -> nn.Module:
            return super().model().requires_grad_(False)

    with pytest.raises(ConfigError, match=r"^task=mine.Mine: no parameter of the model requires a gradient"):
        learner(Frozen)


def test_sparse_gradients() -> None:
    """One line that names the module; torch's own, in the first step, is about a missing kernel."""

    class Sparse(Perceptron):
        def model(self) -> nn.Module:
            return nn.Sequential(super().model(), nn.ModuleDict({"words": nn.EmbeddingBag(3, 2, sparse=True)}))

    with pytest.raises(ConfigError, match=r"^task=mine.Mine: 1.words is an EmbeddingBag with sparse=True.*; remove"):
        learner(Sparse)


def test_frozen_parameters_may_be_left_out() -> None:
    """Whoever freezes a part of a model leaves it out of the optimiser."""

    class Frozen(Perceptron):
        def model(self) -> nn.Module:
            model = super().model()
            next(model.parameters()).requires_grad_(False)
            return model

        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam([p for p in model.parameters() if p.requires_grad])

    learning = learner(Frozen)
    before = [p.clone() for p in learning.model.parameters()]
    train(learning, 0)
    assert [torch.equal(a, b) for a, b in zip(before, learning.model.parameters())] == [True, False]
