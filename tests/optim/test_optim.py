"""The optimiser is the one that the configuration names, with its arguments; a wrong name costs no time in a queue."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laststep.code import task_check
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.config.schema import Optim
from laststep.optim import names
from laststep.optim.build import clear_gradients, make_optimizer
from laststep.optim.names import UNSUPPORTED, check_optimizer, class_name, optimizer_names
from tests.support.project import PROJECT

CLASSES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


def make(**fields: Any) -> torch.optim.Optimizer:
    """The optimiser of a model with a layer, its bias, and a normalisation layer."""
    return make_optimizer(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), Optim(**fields))


def test_names_are_those_of_torch() -> None:
    """Also in the table, for commands, which do not import torch: no class is missing, and none is invented."""
    assert sorted([*optimizer_names(), *UNSUPPORTED]) == sorted(CLASSES)
    of_torch = {
        name: arguments for name, arguments in names._of_torch(torch).items() if name.lower() not in UNSUPPORTED
    }
    assert of_torch == names._TABLE
    assert {name: class_name(name) for name in CLASSES} == {name: kind.__name__ for name, kind in CLASSES.items()}


def test_checks_import_no_torch() -> None:
    """A submission answers at once."""
    code = (
        "import sys; from laststep.config.schema import Optim; from laststep.optim.names import check_optimizer\n"
        "check_optimizer(Optim(name='NAdam', args={'betas': [0.9, 0.95]})); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - UNSUPPORTED.keys()))
def test_arguments_are_those_of_torch(name: str) -> None:
    """Each argument of the constructor is accepted; all others are refused."""
    own_key = {"params", "lr", "weight_decay"} | ({"momentum"} if name == "sgd" else set())
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name not in own_key}
    as_in_yaml = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    check_optimizer(Optim(name=name, args=as_in_yaml))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"name": "adan"}, r"optim.name=adan: torch.optim has no such class; did you mean adam\?"),
        ({"name": "x"}, "optim.name=x: torch.optim has no such class; choose from sgd, adamw, adadelta, adafactor"),
        ({"name": "LBFGS"}, r"optim.name=LBFGS: LBFGS repeats the forward pass .*; choose another optimiser"),
        ({"name": "SparseAdam"}, "optim.name=SparseAdam: SparseAdam takes sparse gradients only"),
        (
            {"name": "Adam", "args": {"beta": 1}},
            "optim.args.beta: Adam has no such argument; it takes betas, eps, amsgrad, ",
        ),
        ({"args": {"momentum": 0.5}}, "optim.args.momentum: set optim.momentum instead"),
        ({"name": "Adam", "args": {"lr": 0.5}}, "optim.args.lr: set optim.lr instead"),
        ({"name": "Rprop", "weight_decay": 0.1}, "optim.weight_decay=0.1: Rprop has no weight decay; set it to 0"),
        ({"name": "Adam", "args": {"betas": 3}}, r"optim.args.betas=3: must be a list of 2 numbers, such as \[0.9, "),
        ({"name": "Adam", "args": {"betas": [0.9]}}, r"optim.args.betas=\[0.9\]: must be a list of 2 numbers"),
        ({"name": "Adam", "args": {"betas": [0.9, "x"]}}, "betas=.*: must be a list of 2 numbers"),
        ({"name": "Adam", "args": {"eps": "small"}}, "optim.args.eps=small: must be a number"),
        ({"args": {"nesterov": "maybe"}}, "optim.args.nesterov=maybe: must be true or false"),
        ({"name": "Adam", "args": {"betas": [2, 3]}}, r"optim.args=\{'betas': \[2, 3\]\}: Adam refuses: "),
        ({"name": "Muon"}, "optim.name=Muon: Muon refuses: Muon only supports 2D parameters"),
    ],
)
def test_wrong_names_and_arguments(fields: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the key and the choice. A command, without torch, writes the same."""
    with pytest.raises(ConfigError, match=wrong) as raised:
        make(**fields)
    if "refuses" not in wrong and "it takes" not in wrong:  # the order in which a list names them differs
        monkeypatch.setattr(names, "_of_torch", lambda _: names._TABLE)
        with pytest.raises(ConfigError) as by_table:
            check_optimizer(Optim(**fields))
        assert str(by_table.value) == str(raised.value)
    assert "\n" not in str(raised.value)


def test_settings_arrive() -> None:
    """The learning rate and the weight decay of the configuration count for every optimiser that takes them; all else
    has torch's defaults, since optim.momentum is for sgd alone."""
    adam = make(name="Adam", lr=0.3, weight_decay=0.2, args={"betas": [0.8, 0.9], "amsgrad": True})
    assert type(adam) is torch.optim.Adam
    assert (adam.defaults["lr"], adam.defaults["weight_decay"], adam.defaults["amsgrad"]) == (0.3, 0.2, True)
    assert tuple(adam.defaults["betas"]) == (0.8, 0.9)
    assert make(name="RMSprop").defaults["momentum"] == 0
    assert make(name="rmsprop", args={"momentum": 0.5}).defaults["momentum"] == 0.5
    assert make(name="SGD", momentum=0.7, args={"nesterov": True}).defaults["momentum"] == 0.7
    assert not make(args={"dampening": 0.1}).defaults["fused"]
    assert make(name="Rprop", lr=0.3).defaults["lr"] == 0.3


def test_no_weight_decay_on_norms_and_biases() -> None:
    """By one key. Without it, all parameters are in one group."""
    (every,) = make(weight_decay=0.1).param_groups
    assert len(every["params"]) == 4
    decayed, others = make(weight_decay=0.1, decay_norms_and_biases=False).param_groups
    assert ([p.ndim for p in decayed["params"]], decayed["weight_decay"]) == ([2], 0.1)
    assert ([p.ndim for p in others["params"]], others["weight_decay"]) == ([1, 1, 1], 0.0)


@pytest.mark.parametrize(
    ("source", "checked"),
    [
        ("class Mine(Task): ...", True),
        ("class Mine(laststep.Task): ...", True),
        ("class Mine(Task):\n    def optimizer(self, model): ...", False),
        ("class Mine(Base): ...", False),
        ("def Mine(run): ...", False),
    ],
)
def test_own_optimizers_may_have_any_name(
    source: str, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`optim` is for a task with an optimizer() to read, and a typo in it is found before a submission otherwise."""
    (tmp_path / "own_optimizer.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config.load(None, ["task=own_optimizer.Mine", "optim.name=lion"])
    if checked:
        with pytest.raises(ConfigError, match=r"optim.name=lion: torch.optim has no such class"):
            task_check.check(config, Machine(Way.SLURM))
    else:
        task_check.check(config, Machine(Way.SLURM))


def test_an_infinite_clip_norm(tmp_path: Path) -> None:
    """It means: measure, do not clip. A resumed run reads it from the run's config.yaml."""
    config = Config.load(None, ["optim.clip_norm=.inf", "optim.args.eps=1e-6"])
    config.save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml") == config
    for wrong in (".nan", "-.inf"):
        with pytest.raises(ConfigError, match=f"optim.clip_norm={wrong.replace('.', '')}: must be a finite number"):
            Config.load(None, [f"optim.clip_norm={wrong}"])


def test_gradients_are_cleared_as_the_optimiser_would() -> None:
    """Gradients that stay would be added to those of the next step. An optimiser that does more keeps doing so."""

    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.cleared += 1
            super().zero_grad(set_to_none)

    layer = nn.Linear(4, 3)
    plain, counting = torch.optim.SGD(layer.parameters()), Counting(layer.parameters())
    for optimizer in (plain, counting):
        layer(torch.ones(2, 4)).sum().backward()
        clear_gradients(optimizer)
        assert all(parameter.grad is None for parameter in layer.parameters())
    assert counting.cleared == 1
