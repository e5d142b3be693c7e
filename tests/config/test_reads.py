"""Which keys of a configuration are read: the view that notes it behaves as the configuration itself."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle

import pytest

from laststep.config.config import Config
from laststep.config.reads import FOR_A_TASK, Reads, changed_keys, covers, refusal


@pytest.fixture
def config() -> Config:
    """A configuration with free mappings."""
    return Config.load(None, ["model.args={width: 8, stem: {kernel: 3}}", "args.depth=2", "optim.lr=0.5"])


def test_a_read_key_is_noted(config: Config) -> None:
    """Only what the task has asked for counts: a key that was set beside it changes nothing."""
    reads = Reads()
    view = reads.watch(config)
    assert view.optim.lr == 0.5
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
    view = Reads().watch(config)
    assert view == config
    assert config == view
    assert view.model.args == config.model.args
    assert isinstance(view, Config)
    for other in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view)), dataclasses.replace(view)):
        assert other == config
        assert type(other) is Config
    assert dataclasses.asdict(view) == dataclasses.asdict(config)
    assert repr(view) == repr(config)
    assert view.to_yaml() == config.to_yaml()


def test_asdict_reads_all(config: Config) -> None:
    """Code that logs its whole configuration has used all of it: nothing can be said about its keys."""
    reads = Reads()
    dataclasses.asdict(reads.watch(config))
    assert reads.unread(["optim.momentum", "model.args.width", "args.depth"], ()) == []


def test_a_value_can_be_set(config: Config) -> None:
    """A task may finish its configuration itself; what it reads next is what it has set."""
    view = Reads().watch(config)
    view.optim.lr = 0.25
    assert view.optim.lr == 0.25


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
        reads = Reads()
        view = reads.watch_section(kind(), "args.")
        assert view.size == 8
        assert reads.keys == {"args.width"}
    view = Reads().watch_section(Plain(), "args.")
    assert (view.area, view.area, hash(view) is not None if hasattr(view, "late") else True) == (8, 8, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.width = 3  # type: ignore[misc]


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


def test_changed_keys() -> None:
    """From Python, a Config may be made without words: what differs from the defaults was set."""
    assert changed_keys(Config.load(None, ["optim.lr=0.5", "args.width=3"])) == ["args.width", "optim.lr"]
