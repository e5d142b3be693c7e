"""Which keys of a configuration are read: the view that notes it behaves as the configuration itself."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
import re

import pytest

from laststep.config.config import Config
from laststep.config.reads import FOR_A_TASK, GivenKeys, Reads, covers, given_keys, refusal, view


@pytest.fixture
def config() -> Config:
    """A configuration with free mappings."""
    return Config.load(None, ["model.args={width: 8, stem: {kernel: 3}}", "args.depth=2", "optim.lr=0.5"])


def test_a_read_key_is_noted(config: Config) -> None:
    """Only what the task has asked for counts: a key that was set beside it changes nothing."""
    reads = Reads()
    watched = reads.watch(config)
    assert watched.optim.lr == 0.5
    assert reads.keys == {"optim.lr"}
    assert reads.unread(["optim.lr", "optim.momentum", "train.epochs"], FOR_A_TASK) == ["optim.momentum"]


def test_a_section_alone_reads_nothing(config: Config) -> None:
    """`optim = self.config.optim` at the top of a method is no use of its keys."""
    reads = Reads()
    assert reads.watch(config).optim.__class__ is type(config.optim)
    assert not reads.keys


@pytest.mark.parametrize(
    "take", [lambda d: d["width"], lambda d: d.get("width"), lambda d: "width" in d, lambda d: d.pop("width")]
)
def test_a_key_of_a_mapping(config: Config, take) -> None:  # type: ignore[no-untyped-def]
    """model.args and args hold keys of the user's own: each is read by itself."""
    reads = Reads()
    take(reads.watch(config).model.args)
    assert reads.has("model.args.width")
    assert not reads.has("model.args.stem.kernel")


@pytest.mark.parametrize(
    "take",
    [
        lambda d: (lambda **given: given)(**d),
        dict,
        list,
        lambda d: {**d},
        lambda d: d | {},
        lambda d: {} | d,
        json.dumps,
        copy.deepcopy,
        copy.copy,
        lambda d: d.copy(),
        lambda d: d == {},
        lambda d: list(d.items()),
        lambda d: list(d.values()),
        pickle.dumps,
    ],
)
def test_a_mapping_taken_apart_is_read(config: Config, take) -> None:  # type: ignore[no-untyped-def]
    """A constructor that gets `**model.args` complains about a wrong name itself: all of them are read."""
    reads = Reads()
    take(reads.watch(config).model.args)
    assert reads.has("model.args.width")
    assert reads.has("model.args.stem.kernel")


def test_the_view_is_the_configuration(config: Config) -> None:
    """A user's code may compare, copy, pickle, replace and print it, as the plain one."""
    watched = Reads().watch(config)
    assert watched == config
    assert config == watched
    assert watched.model.args == config.model.args
    assert isinstance(watched, Config)
    for other in (
        copy.copy(watched),
        copy.deepcopy(watched),
        pickle.loads(pickle.dumps(watched)),
        dataclasses.replace(watched),
    ):
        assert other == config
        assert type(other) is Config
    assert dataclasses.asdict(watched) == dataclasses.asdict(config)
    assert repr(watched) == repr(config)
    assert watched.to_yaml() == config.to_yaml()


def test_asdict_reads_all(config: Config) -> None:
    """Code that logs its whole configuration has used all of it: nothing can be said about its keys."""
    reads = Reads()
    dataclasses.asdict(reads.watch(config))
    assert reads.unread(["optim.momentum", "model.args.width", "args.depth"], ()) == []


def test_a_value_can_be_set(config: Config) -> None:
    """A task may finish its configuration itself; what it reads next is what it has set."""
    watched = Reads().watch(config)
    watched.optim.lr = 0.25
    assert watched.optim.lr == 0.25


def test_a_users_dataclass() -> None:
    """args may be a dataclass of the user's: frozen, with slots, properties and cached properties."""

    @dataclasses.dataclass(frozen=True)
    class Plain:
        width: int = 4
        depth: int = 2
        late: int = dataclasses.field(init=False)

        @property
        def size(self) -> int:
            return self.width * 2

        @functools.cached_property
        def area(self) -> int:
            return self.width * self.depth

    @dataclasses.dataclass(slots=True)
    class Slotted:
        width: int = 4
        depth: int = 2

        @property
        def size(self) -> int:
            return self.width * 2

    for kind in (Plain, Slotted):
        seen: set[str] = set()
        args = view(kind(), "args.", seen)
        assert args.size == 8
        assert seen == {"args.width"}
    frozen = view(Plain(), "args.", set())
    assert (frozen.area, frozen.area) == (8, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.width = 3


def test_the_refusal_names_the_nearest_key() -> None:
    """A typo in a setting of one's own is found by the name that the task asked for."""
    text = str(refusal("args.widht", "net.Net", {"args.width", "args.depth"}))
    assert text == (
        "args.widht: task=net.Net does not read it, so it would change nothing; of args it reads depth, width: "
        "did you mean width?"
    )
    assert "it reads no key of model" in str(refusal("model.name", "net.Net", {"args.width"}))


def test_names_that_cover() -> None:
    """A section, a key and a key within a mapping; not a key that only begins alike."""
    assert covers(["train."], "train.epochs")
    assert covers(["data.args"], "data.args.augment")
    assert not covers(["data.name"], "data.names")


def test_given_keys() -> None:
    """What was typed counts, even if it is the default; of a file only what differs from it; of a run's own file, which
    has every key, nothing."""
    text = "optim: {lr: 0.5, momentum: 0.9}\nargs: {width: 3}\n"
    assert given_keys(["model.name=convnet", "seed=1,2"], text) == ["model.name", "seed", "optim.lr", "args.width"]
    assert given_keys([], Config.load(None, ["optim.lr=0.5"]).to_yaml()) == []


def test_a_misspelt_setting(config: Config) -> None:
    """A task may read a setting of its own late; but one whose name the task has asked for, misspelt, is an error."""
    given = GivenKeys("net.Net", ["args.widht", "args.export_to"], FOR_A_TASK)
    given.reads.watch(config).args.get("width")
    assert re.match(r"args.widht: .*; of args it reads width: did you mean width\?", str(given.problem()))
    given = GivenKeys("net.Net", ["args.export_to"], FOR_A_TASK)
    given.reads.watch(config).args.get("width")
    assert given.problem() is None
    assert given.late() == [
        "WARNING: args.export_to: task=net.Net has not read it in the first epoch: does it change anything?"
    ]
    given.reads.watch(config).args.get("export_to")
    assert given.late() == []


@pytest.mark.parametrize("key", ["model.name", "data.root", "optim.momentum", "model.args.foo"])
def test_a_key_of_the_schema_that_nothing_reads(key: str, config: Config) -> None:
    """The run would be labelled with a value that has changed nothing."""
    given = GivenKeys("net.Net", [key, "train.epochs", "launch.nodes"], FOR_A_TASK)
    assert given.reads.watch(config).optim.lr
    assert str(given.problem()).startswith(f"{key}: task=net.Net does not read it, so it would change nothing")
