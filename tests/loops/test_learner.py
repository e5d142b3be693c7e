"""What one step does to the model: the gradient is that of the global batch, and no option changes it unasked.

A model with a wrong gradient still learns, only worse, without any error.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Optim
from laststep.data.order import Order
from laststep.loops import gradients as gradients_module
from laststep.loops.learner import Learner
from laststep.optim.build import scheduled
from laststep.ranks.group import Group
from laststep.tasks.models import build_model
from tests.support.images import IMAGES, LABELS, Images, resnet
from tests.support.records import a_world

PLAIN = ["optim.lr=1", "optim.momentum=0", "optim.schedule=constant"]  # a step is the negative gradient


def plain() -> nn.Module:
    """No layer depends on the other samples of a batch, or on random draws."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))


def convnet() -> nn.Module:
    """Batch norm and dropout, no repeated block."""
    return build_model("convnet", 3, 5, 8, {"width": 4})


class Block(nn.Module):
    """A residual block with everything that a recomputation could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.conv(x))))


def blocks() -> nn.Module:
    """Repeated blocks, one of them used twice, one with a norm whose average is over all batches."""
    block, slow = Block(), Block()
    slow.norm = nn.BatchNorm2d(6, momentum=None)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), block, slow, block, nn.Flatten(), nn.Linear(216, 5))


def learner(build: Callable[[], nn.Module] = plain, *words: str, rank: int = 0, size: int = 1) -> Learner:
    """A learner on the CPU. With `size` above 1, one rank of several; the test averages their gradients by hand."""
    config = Config.load(None, ["device=cpu", *words])
    group = Group(a_world(rank, size), torch.distributed.HashStore(), torch.device("cpu"))
    return Learner(config, Images(config, build), group, total_steps=10)


def take_step(learning: Learner, step: int, micro_batches: Sequence[tuple[Any, int]], samples: int = 12) -> float:
    """One whole step; returns its loss."""
    learning.learn(step, [batch for batch, _ in micro_batches], [count for _, count in micro_batches], samples)
    return float(learning.update()["loss"])


def train(learning: Learner, steps: int, batches: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
    """The model's tensors after some steps on all images, cut into micro-batches of these indices."""
    cuts = batches or [torch.arange(12)]
    samples = sum(len(cut) for cut in cuts)
    for step in range(steps):
        take_step(learning, step, [((IMAGES[cut], LABELS[cut]), len(cut)) for cut in cuts], samples)
    return {name: tensor.clone() for name, tensor in learning.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradient(before: dict[str, Tensor], after: dict[str, Tensor]) -> Tensor:
    """What a step of plain SGD with learning rate 1 took away."""
    return torch.cat([(before[name] - after[name]).flatten() for name in before])


# --- the learning rate


def rates(total: int = 90, **fields: Any) -> list[float]:
    optim = Optim(lr=1.0, **fields)
    return [scheduled(optim.lr, optim, step, total) for step in range(total)]


def test_schedules() -> None:
    """Each schedule has the shape that its name promises."""
    assert rates(schedule="constant") == [1.0] * 90
    assert rates(schedule="step") == pytest.approx([1.0] * 30 + [0.1] * 30 + [0.01] * 30)
    cosine = rates(schedule="cosine")
    assert cosine == pytest.approx([(1 + math.cos(math.pi * step / 90)) / 2 for step in range(90)])
    assert cosine[0] == 1.0 and 0 < cosine[-1] < 0.001


def test_warm_up() -> None:
    """The rate rises linearly, not from 0 (a first step without effect), and reaches the peak when the warm-up ends."""
    warm = rates(schedule="constant", warmup_steps=9)
    assert warm[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates(schedule="cosine", warmup_steps=9)[9] == 1.0


@given(
    st.sampled_from(["cosine", "step", "constant"]),
    st.integers(0, 200),
    st.integers(1, 200),
    st.floats(1e-9, 1e3),
)
def test_rate_is_positive_and_below_the_peak(schedule: str, warmup: int, total: int, lr: float) -> None:
    """Also when the warm-up is longer than the run."""
    optim = Optim(lr=lr, schedule=schedule, warmup_steps=warmup)
    assert all(0 < scheduled(lr, optim, step, total) <= lr for step in range(total))


def test_step_uses_the_schedule() -> None:
    """The rate that metrics.jsonl shows is the one that the optimiser used."""
    learning = learner(plain, "optim.lr=0.5", "optim.warmup_steps=3")
    for step in range(6):
        take_step(learning, step, [((IMAGES, LABELS), 12)])
        assert learning.optimizer.param_groups[0]["lr"] == scheduled(0.5, learning.config.optim, step, 10)


# --- the gradient


@pytest.mark.parametrize("cuts", [[6, 6], [4, 4, 4], [5, 4, 3], [11, 1], [7, 5]], ids=str)
def test_accumulation_gives_the_gradient_of_the_whole_batch(cuts: list[int]) -> None:
    """Micro-batches, of equal size or not, save memory and change nothing else."""
    before = learner().model.state_dict()
    whole = train(learner(plain, *PLAIN), 1)
    parts = train(learner(plain, *PLAIN), 1, torch.arange(12).split(cuts))
    torch.testing.assert_close(gradient(before, parts), gradient(before, whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [12, 11, 7, 3, 1], ids="batch-of-{}".format)
@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_short_last_batch(count: int, size: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with unequal shares of a short batch, or none, still give the mean over all of its samples.

    Each rank's gradient is averaged by hand, as DDP does.
    """
    monkeypatch.setattr(gradients_module, "data_parallel", lambda model, *_: model)
    order = Order(count, 12, 0)
    before = {name: tensor.clone() for name, tensor in learner().model.state_dict().items()}
    taken = torch.tensor(order.batch(0))
    expected = gradient(before, train(learner(plain, *PLAIN), 1, [taken]))

    gradients, losses = [], []
    for rank in range(size):
        learning = learner(plain, *PLAIN, "train.batch_size=12", rank=rank, size=size)
        shares = order.micro_batches(0, rank, size, accumulate)
        micro_batches = [torch.tensor(share if len(share) else order.batch(0)[:1]) for share in shares]
        pairs = [((IMAGES[cut], LABELS[cut]), len(share)) for cut, share in zip(micro_batches, shares)]
        losses.append(take_step(learning, 0, pairs, count))
        gradients.append(gradient(before, learning.model.state_dict()))
    torch.testing.assert_close(torch.stack(gradients).mean(0), expected, rtol=1e-4, atol=1e-6)

    loss = functional.cross_entropy(learner().model(IMAGES[taken]), LABELS[taken])
    torch.testing.assert_close(torch.tensor(losses).mean(), loss, rtol=1e-5, atol=1e-6)


def test_clip_norm() -> None:
    """The norm is that of the whole gradient, after accumulation; a gradient below it stays as it is."""
    before = learner().model.state_dict()
    whole = gradient(before, train(learner(plain, *PLAIN), 1))
    halves = torch.arange(12).split(6)
    for limit, expected in ((0.01, whole * 0.01 / whole.norm()), (100.0, whole)):
        clipped = train(learner(plain, *PLAIN, f"optim.clip_norm={limit}"), 1, halves)
        torch.testing.assert_close(gradient(before, clipped), expected, rtol=1e-3, atol=1e-6)


# --- options that must not change what is learned


def test_cuda_graphs_that_torch_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """As on a CPU, or for a model that it cannot record: the run would be slower than its configuration says. Where it
    can, it records the second pass, so there are two before the state is restored; they leave no trace."""
    plain_one = learner(convnet)
    config = plain_one.config
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, cuda_graphs=True))
    with_it = Learner(config, Images(config, convnet), plain_one.group, total_steps=10)
    passes: list[bool] = []
    next(with_it.model.parameters()).register_hook(lambda _: passes.append(True))
    for learning in (plain_one, with_it):
        learning.warm_up((IMAGES, LABELS))
    assert len(passes) == 2 and with_it.names == plain_one.names
    assert "WARNING: train.cuda_graphs=true: torch has recorded no CUDA graphs" in capsys.readouterr().out
    assert same(train(plain_one, 2), train(with_it, 2))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (convnet, []),
        (blocks, []),
        (blocks, ["train.ema_decay=0.5"]),
        (blocks, ["train.precision=bf16"]),
        (resnet, []),
    ],
)
def test_activation_checkpointing_changes_nothing(build: Callable[[], nn.Module], words: list[str]) -> None:
    """The recomputation draws the same dropout and does not count a batch twice in batch norm's statistics."""
    halves = torch.arange(12).split(6)
    without, with_it = learner(build, *words), learner(build, *words, "train.activation_checkpointing=true")
    assert any("CheckpointWrapper" in type(module).__name__ for module in with_it.model.modules()), "it is on"
    assert same(train(without, 3, halves), train(with_it, 3, halves))
    for key, value in without.state_dict().items():
        other = with_it.state_dict()[key]
        if isinstance(value, dict) and key in ("model", "average"):
            assert same(value, other), key


def test_checkpointing_can_be_turned_off_for_a_resume() -> None:
    """A checkpoint made with activation checkpointing loads without it: machines differ in memory."""
    source = learner(blocks, "train.activation_checkpointing=true", "train.ema_decay=0.9")
    train(source, 2)
    target = learner(blocks, "train.ema_decay=0.9")
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert same(train(source, 2), train(target, 2))


@pytest.mark.parametrize(
    "words",
    [["train.channels_last=true"], ["train.deterministic=true"], ["train.log_every=1"], ["data.workers=3"]],
    ids=lambda words: words[0],
)
def test_options_of_speed(words: list[str]) -> None:
    """These options change only the speed, up to the order of sums."""
    with_them, without = train(learner(convnet, *words), 3), train(learner(convnet), 3)
    for name, tensor in without.items():
        torch.testing.assert_close(with_them[name], tensor, rtol=1e-3, atol=1e-5)


# --- state


EVERY_STATE = [
    ["optim.name=sgd"],
    ["optim.name=sgd", "optim.momentum=0"],
    ["optim.name=adamw", "optim.lr=0.01"],
    ["train.ema_decay=0.5"],
    ["train.precision=fp16"],
    ["train.precision=bf16"],
]


@pytest.mark.parametrize("words", EVERY_STATE, ids=" ".join)
def test_state_holds_everything(words: list[str]) -> None:
    """A learner that loads the state continues with the same weights and the same optimiser state."""
    words = [*words, "optim.weight_decay=0.01", "optim.clip_norm=1"]
    source = learner(convnet, *words)
    train(source, 3)
    target = learner(convnet, *words)
    target.warm_up((IMAGES[:4], LABELS[:4]))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert same(train(source, 3), train(target, 3))
    if source.average is not None and target.average is not None:
        assert same(source.average.state_dict(), target.average.state_dict())


@pytest.mark.parametrize("words", EVERY_STATE, ids=" ".join)
def test_the_warm_up_leaves_no_trace(words: list[str]) -> None:
    """A new run continues from there: what the throwaway step did to batch norm would be in every model."""
    learning = learner(convnet, *words)
    before = copy.deepcopy(learning.state_dict())
    live = copy.deepcopy(dict(learning.model.named_buffers()))
    learning.warm_up((IMAGES, LABELS))
    now = learning.state_dict()
    assert same(now["model"], before["model"]) and same(dict(learning.model.named_buffers()), live)
    assert repr((now["optimizer"], now["scaler"])) == repr((before["optimizer"], before["scaler"]))
    assert now["average"] is None or same(now["average"], before["average"])


@pytest.mark.parametrize("words", EVERY_STATE, ids=" ".join)
def test_learns(words: list[str]) -> None:
    """Each optimiser and each precision brings the loss down, with finite weights."""
    learning = learner(plain, "optim.lr=0.1", "optim.schedule=constant", *words)
    losses = [take_step(learning, step, [((IMAGES, LABELS), 12)]) for step in range(10)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(tensor.isfinite().all() for tensor in learning.model.state_dict().values())


def test_optimisers_get_their_settings() -> None:
    """A weight decay or momentum that is lost on the way changes the result without any error."""
    sgd = learner(plain, "optim.momentum=0.7", "optim.weight_decay=0.3").optimizer
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.7, 0.3)
    adamw = learner(plain, "optim.name=adamw", "optim.weight_decay=0.3").optimizer
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["weight_decay"] == 0.3


def test_average() -> None:
    """After each step the average moves by 1 - decay towards the weights, buffers too; validation measures it."""
    learning = learner(convnet, "train.ema_decay=0.75")
    expected: dict[str, Tensor] = {}
    for step in range(4):
        take_step(learning, step, [((IMAGES, LABELS), 12)])
        for name, tensor in learning.model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = 0.75 * expected[name] + 0.25 * tensor if step else tensor.clone()
    assert learning.average is not None and learning.validated is learning.average
    averaged = learning.average.module.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=1e-5, atol=1e-6)
    assert learner().validated is not None and learner().average is None


def test_initial_weights_follow_the_seed() -> None:
    """All ranks and all attempts start from the same weights, no matter what was drawn before."""
    first = learner(convnet, "seed=1").model.state_dict()
    torch.rand(7)
    assert same(learner(convnet, "seed=1", rank=0).model.state_dict(), first)
    assert not same(learner(convnet, "seed=2").model.state_dict(), first)


# --- losses and gradients that are not finite


class Poisoned(nn.Module):
    """A convnet whose loss, or only its gradient, is not finite in chosen steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()
        self.poison = ""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        if self.poison == "loss":
            return logits * math.nan
        if self.poison == "gradient":  # the square root of 0 is 0, its slope is infinite
            return logits + (logits - logits.detach()).abs().sqrt()
        return logits


@pytest.mark.parametrize("poison", ["loss", "gradient"])
@pytest.mark.parametrize(
    "words", [[], ["optim.name=adamw"], ["optim.clip_norm=1"], ["train.ema_decay=0.5"]], ids=" ".join
)
def test_a_nonfinite_step_is_skipped(words: list[str], poison: str) -> None:
    """A NaN in one weight is in all weights a few steps later, and in the averages for good. Such a step must change
    nothing: neither weights nor optimiser nor batch norm's statistics, even if it is the very first."""
    learning = learner(Poisoned, "train.nonfinite=skip", *words)
    for poisoned in (0, 3):
        for step in range(poisoned, poisoned + 3):
            assert isinstance(learning.model, Poisoned)
            learning.model.poison = poison if step == poisoned else ""
            before = copy.deepcopy(learning.model.state_dict())
            learning.learn(step, [(IMAGES, LABELS)], [12], 12)
            assert bool(learning.update()["nonfinite"]) == (step == poisoned)
            assert same(learning.model.state_dict(), before) == (step == poisoned)
    state = learning.state_dict()
    tensors = [*state["model"].values(), *(state["average"] or {}).values()]
    tensors += [t for slot in state["optimizer"]["state"].values() for t in slot.values() if isinstance(t, Tensor)]
    assert all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("poison", ["", "loss", "gradient"])
def test_a_nonfinite_step_is_found(poison: str) -> None:
    """With train.nonfinite=fail too, and in that very step: an hour later every loss would be NaN."""
    learning = learner(Poisoned)
    assert isinstance(learning.model, Poisoned)
    learning.model.poison = poison
    learning.learn(0, [(IMAGES, LABELS)], [12], 12)
    assert bool(learning.update()["nonfinite"]) == bool(poison)


def test_the_state_is_that_of_the_last_finished_step() -> None:
    """A rank may have to save while its main thread is in the middle of a step, waiting for a dead rank. Batch norm has
    counted that step's samples already, and will count them again after the resume."""
    learning = learner(convnet)
    train(learning, 2)
    before = copy.deepcopy(learning.state_dict()["model"])
    learning.learn(2, [(IMAGES, LABELS)], [12], 12)
    assert not same(dict(learning.model.state_dict()), dict(before)), "a forward pass changes batch norm's statistics"
    assert same(dict(learning.state_dict()["model"]), dict(before))


# --- validation


def test_evaluate_weights_by_samples() -> None:
    """A rank's share of a batch counts by its number of samples, so an empty one for nothing. Nothing is learned."""
    learning = learner(convnet)
    learning.warm_up((IMAGES, LABELS))
    assert learning.names == ["loss", "accuracy"]
    learning.train(False)
    before = {name: tensor.clone() for name, tensor in learning.model.state_dict().items()}
    sums = learning.evaluate(0, 0, (IMAGES[:8], LABELS[:8]), 8) + learning.evaluate(0, 1, (IMAGES[8:], LABELS[8:]), 4)
    sums += learning.evaluate(0, 2, (IMAGES[:1], LABELS[:1]), 0)
    with torch.no_grad():
        logits = learning.model(IMAGES)
    expected = [functional.cross_entropy(logits, LABELS), (logits.argmax(1) == LABELS).float().mean()]
    torch.testing.assert_close(sums / 12, torch.stack(expected).double(), rtol=1e-5, atol=1e-6)
    assert same(learning.model.state_dict(), before)


def test_a_task_without_a_loss() -> None:
    """A Task whose step() returns no loss gets an error before the first step."""
    learning = learner()
    learning.task.step = lambda model, batch: {"los": model(batch[0]).sum()}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"step\(\): must return a dict with a 'loss', not \['los'\]"):
        learning.warm_up((IMAGES, LABELS))


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda loss, training: loss, r'step\(\): must return a dict with a "loss", such as .*, not a Tensor'),
        (
            lambda loss, training: {"loss": loss, "accuracy": 0.5},
            r"'accuracy' is of type float; return a tensor of one",
        ),
        (lambda loss, training: {"loss": loss.expand(3)}, r"'loss' has shape \(3,\); return its mean, loss.mean\(\)"),
        (lambda loss, training: {"loss": loss.detach()}, r"the loss does not depend on any trainable parameter"),
        (
            lambda loss, training: {"loss": loss, **({} if training else {"top5": loss})},
            r"step\(\) returns top5 only in validation; return the same names in both",
        ),
        (
            lambda loss, training: {"loss": loss, **({"top1": loss} if training else {"top5": loss})},
            r"step\(\) returns top1 only in training and top5 only in validation",
        ),
        (
            lambda loss, training: loss if training is None else ({"loss": loss} if training else loss),
            r"step\(\), in validation: must return a dict",
        ),
    ],
    ids=["a bare loss", "a float", "not reduced", "no gradient", "only in validation", "different names", "bare there"],
)
def test_what_a_step_returns(step: Callable[[Tensor, bool], Any], says: str) -> None:
    """Internals of torch, after a whole epoch or never: one line before the first step instead. A metric that only
    validation returns was dropped without a word."""
    learning = learner()

    def of_task(model: nn.Module, batch: Any) -> Any:
        return step(functional.cross_entropy(model(batch[0]), batch[1]), model.training)

    learning.task.step = of_task  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=says):
        learning.warm_up((IMAGES, LABELS), {"val": (IMAGES, LABELS)})


def test_a_validation_batch_in_the_warm_up_changes_nothing() -> None:
    """The state before the first step is the same with it and without it: the run's bits do not depend on it. It runs
    as validation does: without gradients, for which a large model may have no room."""
    one, other = learner(), learner()
    grad, step = [], one.task.step

    def noting(model: nn.Module, batch: Any) -> Any:
        grad.append((model.training, torch.is_grad_enabled()))
        return step(model, batch)

    one.task.step = noting  # type: ignore[method-assign]
    one.warm_up((IMAGES, LABELS), {"val": (IMAGES, LABELS)})
    other.warm_up((IMAGES, LABELS))
    assert same(one.model.state_dict(), other.model.state_dict())
    assert one.model.training
    assert grad == [(True, True), (False, False)]
