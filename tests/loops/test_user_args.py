"""A custom loop's own settings: free, or checked against a dataclass before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from laststep.config.args import user_args
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.run import settings_of
from laststep.task import args_parameter

if TYPE_CHECKING:
    from laststep import Run


@dataclass(frozen=True)
class Head:
    """A part of the settings."""

    width: int = 8


@dataclass(frozen=True)
class Args:
    """Settings as a user may write them."""

    epochs: int
    name: str = "first"
    rates: list[float] = field(default_factory=lambda: [0.1])
    head: Head = field(default_factory=Head)
    warmup: int | None = None

    def __post_init__(self) -> None:
        if self.epochs > 100:
            raise ValueError("more than 100 epochs")


def free(run: Run) -> None:
    """A loop that reads run.args."""


def takes(run: Run, args: Any = None) -> None:
    """The same, as a second argument."""


def checked(run: Run, args: Args) -> None:
    """A loop with a dataclass. Run is not imported at run time."""


def untyped(run: Run, args: dict[str, int]) -> None:
    """No dataclass."""


def missing(run: Run, args: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """A class that is not there."""


def unrelated(run: Run, debug: bool = False) -> None:
    """A second parameter that is not ours."""


def settings(function: Any, *words: str) -> Any:
    """What the function gets."""
    return user_args(settings_of(function), Config.load(None, words).args)


def test_free() -> None:
    """As attributes, nested; one that is not set names the key, unless there is a default for it."""
    assert settings(untyped, "args.lr=1").lr == 1
    args = settings(free, "args.lr=0.5", "args.head.width=3", "args.name='1.10'", "args.tags=[a,b]")
    assert (args.lr, args.head.width, args.name, args.tags) == (0.5, 3, "1.10", ["a", "b"])
    with pytest.raises(ConfigError, match=r"args\.width: not set; give it a value, as in args\.width=1"):
        args.width  # noqa: B018
    assert getattr(args, "width", 4) == 4 and not hasattr(args, "width")


def test_a_mapping() -> None:
    """Bridges to argparse, hydra and trackers pass all settings on; one that is named as a method is still there."""
    args = settings(free, "args.lr=0.5", "args.items=3", "args.mixed_precision=no", "args.nested={a: 1}")
    assert dict(args) == {"lr": 0.5, "items": 3, "mixed_precision": "no", "nested": args.nested}
    assert args["lr"] == 0.5 and "lr" in args and "width" not in args and len(args) == 4
    assert dict(**args)["mixed_precision"] == "no" and args.get("width", 4) == 4
    assert args["items"] == 3 and settings(free, "args.lr=1").items() == {"lr": 1}.items()
    with pytest.raises(KeyError, match=r"args\.width: not set"):
        args["width"]


def test_a_mapping_is_read() -> None:
    """A setting that is read by its name as a key counts as read, and one that nobody reads does not."""
    seen: set[str] = set()
    args = user_args(None, {"lr": 1, "other": 2}, seen)
    assert args["lr"] == 1 and seen == {"args.lr"}
    assert dict(args.items()) == {"lr": 1, "other": 2} and seen == {"args.lr", "args.other"}


@dataclass
class Text:
    """A field of text, and a truth value."""

    mixed_precision: str = "fp16"
    fast: bool = True


@dataclass
class NoText:
    """A field whose default is not of its type."""

    resume: str = None  # type: ignore[assignment]


def test_the_text_that_was_typed() -> None:
    """YAML takes no for False; for a field of text it is a word."""
    found = user_args(Text, Config.load(None, ["args.mixed_precision=no", "args.fast=no"]).args)
    assert (found.mixed_precision, found.fast) == ("no", False)
    with pytest.raises(ConfigError, match=r"args: NoText.resume: str = None: write resume: str \| None = None"):
        user_args(NoText, {})


def test_a_dataclass() -> None:
    """Values have the types of their fields."""
    args = settings(checked, "args.epochs=3", "args.head={width: 5}", "args.rates=[1]")
    assert args == Args(epochs=3, head=Head(5), rates=[1.0])
    assert isinstance(args.rates[0], float)


@pytest.mark.parametrize(("function", "second"), [(free, False), (unrelated, False), (takes, True), (checked, True)])
def test_who_gets_them(function: Any, second: bool) -> None:
    """A parameter that is named otherwise is the function's own affair."""
    assert (args_parameter(function) is not None) is second


@pytest.mark.parametrize(
    ("function", "words", "message"),
    [
        (checked, ["args.epoch=3"], "args.epoch: Args has no such field; did you mean epochs?"),
        (
            checked,
            ["args.epochs=3", "args.head.widht=1"],
            "args.head.widht: Args has no such field; did you mean head.w",
        ),
        (
            checked,
            ["args.epochs=many"],
            "args.epochs=many: Value 'many' of type 'str' could not be converted to Integer",
        ),
        (checked, [], "args.epochs: not set, and Args has no default for it"),
        (checked, ["args.epochs=101"], "args: Args refuses them: more than 100 epochs"),
        (missing, [], "def missing(run, args: Nowhere): its module has no such class when it is run"),
    ],
)
def test_refused(function: Any, words: list[str], message: str) -> None:
    """A typo in the name of a setting would otherwise train with the default."""
    with pytest.raises(ConfigError) as error:
        settings(function, *words)
    assert message in str(error.value)


class Scaled(nn.Module):
    """A model that keeps its settings, and reads them in its forward pass."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n,)"""
        return x * self.args.head.width if self.args.epochs > 1 else x


@pytest.mark.parametrize("dataclass", [None, Args])
def test_torch_compiles_what_reads_them(dataclass: type | None) -> None:
    """What is read is noted by code in Python: the compiler must be able to follow it."""
    seen: set[str] = set()
    args = user_args(dataclass, {"epochs": 3, "head": {"width": 5}}, seen)
    torch._dynamo.reset()
    compiled = torch.compile(Scaled(args), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    assert seen >= {"args.epochs", "args.head.width"}
