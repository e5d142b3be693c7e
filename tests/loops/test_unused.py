"""A model with parts that some steps do not use: train.find_unused_parameters.

Such a model trains on one rank and died on two, with an advice of torch's that could not be followed. With the key it
trains on any number of ranks as on one: what no rank has used keeps its weights, whatever the weight decay.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from laststep.checkpoint.export import read_run
from laststep.config.checks import validate
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data.order import seed_generators, seed_of
from laststep.records.metrics import read_lines
from laststep.task import make_task
from tests.loops.unused_tasks import Branches
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import config, undisturbed_run

KEY = "train.find_unused_parameters=true"
BRANCHES = ("task=tests.loops.unused_tasks.Branches", KEY, "optim.schedule=constant")
MOMENTUM = ("optim.name=sgd", "optim.momentum=0.9", "optim.weight_decay=0.1")
KILLED = -signal.SIGKILL


@pytest.mark.parametrize("optimiser", [MOMENTUM, ("optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=0.001")])
def test_the_same_bits_on_any_number_of_ranks(root: Path, optimiser: tuple[str, ...]) -> None:
    """With train.shares a model with branches ends with the same bits on one, two and four ranks: a rank without a
    gradient adds nothing, and a step in which none has one changes nothing, however the optimiser decays."""
    options = (*BRANCHES, *optimiser, "train.shares=4", "train.epochs=1", "optim.clip_norm=1.0")
    found = [fingerprint(train(config(root, f"bits-{len(optimiser)}-{ranks}", ranks, options))) for ranks in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def test_what_nobody_uses_stays(root: Path) -> None:
    """Zeros for the gradient of an unused part would let weight decay and momentum change it on two ranks, and not on
    one. Without shares, too, and with several micro-batches of which only the first uses a part."""
    options = (*BRANCHES, *MOMENTUM, "train.epochs=1", "train.accumulate=2")
    run = train(config(root, "stays", 2, options))
    alone = train(config(root, "alone", 1, options))
    weights, of_one = read_run(run).tensors, read_run(alone).tensors
    assert len(read_lines(run.metrics)) == 8
    whole = config(root, "stays", 2, options)
    seed_generators(seed_of("model", whole.seed), torch.device("cpu"))
    initial = make_task(Branches, whole).model().state_dict()
    for name in ("never.weight", "never.bias"):
        assert torch.equal(weights[name], initial[name]) and torch.equal(of_one[name], initial[name])
    for name in ("light.weight", "dark.weight", "body.weight"):
        assert not torch.equal(weights[name], initial[name])


@pytest.mark.parametrize(
    "signals",
    ["SIGTERM step 3 rank 1", "SIGKILL step 5 rank 0", "SIGKILL step 3 rank 1"],
    ids=["stop", "kill-0", "kill-1"],
)
def test_exact(root: Path, signals: str, request: pytest.FixtureRequest) -> None:
    """Stopped or rescued, a run with such a model ends with the same bits."""
    options = (*BRANCHES, *MOMENTUM, "launch.hang_timeout_s=10", "launch.max_failures=9")
    whole = config(root, f"exact-{request.node.callspec.id}", 2, options)
    ended = Attempt(whole, {"LASTSTEP_TEST_SIGNAL": signals})
    codes = ended.wait()
    assert KILLED in codes or codes == [128 + signal.SIGTERM] * 2, ended.output()
    run = train(whole)
    assert read_lines(run.attempts)[0]["lost_steps"] == 0
    assert fingerprint(run) == undisturbed_run(whole)


def test_without_the_key(root: Path) -> None:
    """Torch's error names options that a Task cannot set. Here one line names the parameters and the key, before the
    first step; on one rank, and with the key, the same model trains."""
    options = ("task=tests.loops.unused_tasks.Constant", "train.epochs=1", "launch.max_failures=0")
    attempt = Attempt(config(root, "without", 2, options))
    assert attempt.wait() == [1, 1]
    says = "a step gave no gradient to dark.weight, dark.bias, never.weight and 1 more: with several ranks set " + KEY
    assert says in attempt.output() and "step 1/" not in attempt.output()
    train(config(root, "one", 1, options))
    train(config(root, "with", 2, (*options, KEY)))


def test_a_step_that_was_not_summed_is_not_saved(root: Path) -> None:
    """A part that one rank leaves out in the fourth step: its update would be made with gradients of its own alone, and
    a rescue would save that as the run's state."""
    options = (
        "task=tests.loops.unused_tasks.Late",
        "train.epochs=1",
        "launch.max_failures=9",
        "launch.hang_timeout_s=5",
    )
    whole = config(root, "late", 2, options)
    attempt = Attempt(whole)
    assert 1 in attempt.wait()
    assert f"a step gave no gradient to light.weight, light.bias: with several ranks set {KEY}" in attempt.output()
    assert read_lines(attempt.run.attempts)[0]["end_step"] == 3
    train(config(root, "late-with-it", 2, (*options, KEY)))


def test_sharded(root: Path) -> None:
    """FSDP2 needs no key for what no rank uses, and cannot train what only some use: the key is refused."""
    with pytest.raises(ConfigError, match=r"train.find_unused_parameters=true: cannot be combined with train.sharding"):
        validate(Config.load(None, [KEY, "train.sharding=full"]))
    train(
        config(root, "sharded", 2, ("task=tests.loops.unused_tasks.Constant", "train.epochs=1", "train.sharding=full"))
    )


def test_a_gradient_that_is_not_defined(root: Path) -> None:
    """A custom autograd function may return None for a parameter that the forward pass has used: DDP counts it as
    ready, and what the rank's earlier shares have added up must not be left out."""
    options = ("task=tests.loops.unused_tasks.Undefined", "train.shares=4", "train.epochs=1", *MOMENTUM, KEY)
    assert fingerprint(train(config(root, "undefined-one", 1, options))) == fingerprint(
        train(config(root, "undefined-two", 2, options))
    )
