"""Which keys of its configuration a run reads: a key that was set and that nothing reads would change nothing.

A task gets its configuration as a view that notes which keys are read, and so does a function, as `run.config`. Nothing
is concluded from source code. Code that takes a section or a mapping apart, as `dataclasses.asdict(config)` and
`build(**config.model.args)` do, reads all of it.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from argparse import Namespace
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from laststep import rooms
from laststep.config.config import PACKAGED, find_config, keys_in, missing_keys
from laststep.config.errors import ConfigError, nearest
from laststep.config.keys import leaves
from laststep.config.machine import Machine
from laststep.config.schema import COMMAND, SCRIPT, Settings

S = TypeVar("S")

# What Laststep itself reads, whatever is trained. A name that ends in a dot stands for a whole section.
ROOMS = tuple(f"{name}." for name in rooms.section_names())
ALWAYS = ("seed", "device", "task", "script", "launch.", "checkpoint.", *ROOMS)
# What the ready-made loop around a Task reads besides, and the loop around a user's function.
FOR_A_TASK = (*ALWAYS, "train.", "data.workers", "model.weights", "optim.clip_norm")
# All that is read where a command runs that does not know Laststep.
FOR_A_COMMAND = ("task", "script", "launch.", *ROOMS)
FOR_A_FUNCTION = (
    *ALWAYS,
    *("train.log_every", "train.digest_every", "train.deterministic", "train.nonfinite", "train.rehearsal"),
    "train.shares",
)


class Reads:
    """Notes which keys of a configuration are read."""

    def __init__(self) -> None:
        self.keys: set[str] = set()  # also those that were asked for and are not set, such as args.width

    def watch(self, config: S) -> S:
        """A view of a configuration: an object of the same class with the same values, for which each read is noted.
        A copy of it is a plain configuration."""
        watched: S = view(config, "", self.keys)
        return watched

    def has(self, key: str) -> bool:
        """Whether this key has been read, or something in it, or all of the mapping that it is in."""
        return any(f"{key}.".startswith(f"{read}.") or read.startswith(f"{key}.") for read in self.keys)

    def unread(self, keys: Iterable[str], by_laststep: Collection[str]) -> list[str]:
        """Those of `keys` that nobody has read: neither the view, nor Laststep, which reads `by_laststep`."""
        return [key for key in keys if not covers(by_laststep, key) and not self.has(key)]


def for_a_function(config: Settings) -> tuple[str, ...]:
    """What Laststep reads besides a user's function."""
    # The other precisions say how the GPU multiplies, which is the same for every loop.
    return FOR_A_FUNCTION if config.train.precision in ("bf16", "fp16") else (*FOR_A_FUNCTION, "train.precision")


def declared(reads: Iterable[str] | None, settings: type | None = None) -> list[str]:
    """What a task declares to read, as `covers` takes it: keys and sections, such as "model.name" and "data", and with
    a dataclass of `settings` its args."""
    sections = [name if "." in name else f"{name}." for name in reads or ()]
    return [*sections, *([] if settings is None else ["args."])]


def covers(names: Collection[str], key: str) -> bool:
    """Whether `names` contain a key, the section that it is in (a name with a dot at its end), or its mapping."""
    return any(key.startswith(name) if name.endswith(".") else f"{key}.".startswith(f"{name}.") for name in names)


def refusal(key: str, task: str, read: Collection[str]) -> ConfigError:
    """The error for a key that was set, and that nothing of the run reads. `read` are the keys that are read."""
    section, _, name = key.rpartition(".")
    beside = {other.removeprefix(f"{section}.").partition(".")[0] for other in read if other.startswith(f"{section}.")}
    names = sorted(beside - {name})
    what = f"{key}: task={task} does not read it, so it would change nothing"
    if not names:
        where = f"no key of {section}" if section else "no such key"
        late = "" if task in (SCRIPT, COMMAND) else ", or name it in the task's `reads` if it is read later"
        return ConfigError(f"{what}; it reads {where}: leave it out{late}")
    return ConfigError(f"{what}; of {section} it reads {', '.join(names[:8])}: {nearest(name, names)}")


def given_keys(words: Iterable[str], text: str | None = None) -> list[str]:
    """The keys that a user has set: in `key=value` words, and in the `text` of a YAML file of the user's to a value
    other than the default. None for the file of a run, which has all keys."""
    given = [word.partition("=")[0] for word in words]
    if text is None or len(missing_keys(text)) < len(_DEFAULTS) / 2:
        return given
    return given + [key for key, value in keys_in(text).items() if _DEFAULTS.get(key) != value]


def given_by(machine: Machine) -> list[str]:
    """`given_keys` of a start: of the words that were typed, and of a YAML file that does not ship with Laststep."""
    path = None if machine.source is None else find_config(machine.source)
    own = path is not None and not path.resolve().is_relative_to(PACKAGED.resolve())
    return given_keys(machine.words, path.read_text() if path is not None and own else None)


_DEFAULTS = dict(leaves(dataclasses.asdict(Settings())))


class GivenKeys:
    """The keys that the user has set for a run, and whether its task reads them."""

    def __init__(
        self, task: str, given: Iterable[str], by_laststep: Collection[str], declared: Collection[str] = ()
    ) -> None:
        """`by_laststep` is what Laststep reads for the task; what the task has `declared`, it may read late."""
        self.reads = Reads()
        self._task, self._given = task, dict.fromkeys(given)
        self._by_laststep, self._declared = by_laststep, declared

    def add(self, keys: Iterable[str]) -> None:
        """The user has set these as well, to resume the run."""
        self._given |= dict.fromkeys(keys)

    def problem(self, among: Collection[str] = ("",)) -> ConfigError | None:
        """Once a task has built its data and its model, and has done a step: what to say of a key that it has not read,
        of those in the sections `among`. A setting of its own (args) may be read later, unless its name is that of
        another, misspelt."""
        for key in self._unread():
            asked = {read for read in self.reads.keys if read.startswith("args.")} - self._given.keys()
            may_be_late = key.startswith("args.") and not difflib.get_close_matches(key, asked, n=1, cutoff=0.8)
            if not may_be_late and key.startswith(tuple(among)) and not covers(self._declared, key):
                return refusal(key, self._task, self.reads.keys)
        return None

    def late(self) -> list[str]:
        """A line for each key that has not been read in the first epoch either."""
        return [
            f"WARNING: {key}: task={self._task} has not read it in the first epoch: does it change anything?"
            for key in self._unread()
        ]

    def _unread(self) -> list[str]:
        return self.reads.unread(self._given, self._by_laststep)


def _wrapped(value: Any, key: str, seen: set[str]) -> Any:
    if isinstance(value, Namespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return view(value, f"{key}.", seen)
    return _Mapping.of(value, key, seen) if type(value) is dict else value


def view(plain: Any, prefix: str, seen: set[str]) -> Any:
    """A view of a dataclass's instance or of a namespace, whose fields are the keys that begin with `prefix`: each that
    is read is added to `seen`."""
    kind: Any = type(plain)
    made: Any = object.__new__(_view_class(kind, tuple(_names(plain))))
    inner = {name: _wrapped(getattr(plain, name), prefix + name, seen) for name in _names(plain)}
    notes = {name: prefix + name for name, value in inner.items() if value is getattr(plain, name)}
    object.__setattr__(made, "_view", (plain, inner, notes, seen, prefix))
    return made


def plain(config: S) -> S:
    """The configuration behind a view; any other as it is."""
    found: S = _behind(config)[0] or config
    return found


def seen_by(config: Any) -> set[str] | None:
    """Where a view notes what is read; None for a plain configuration."""
    return _behind(config)[1]


def _behind(config: Any) -> tuple[Any, set[str] | None]:
    try:
        behind, _, _, seen, _ = object.__getattribute__(config, "_view")
    except AttributeError:
        return None, None
    return behind, seen


def _names(instance: Any) -> list[str]:
    """The fields that have a value yet: one with init=False may lack it."""
    if isinstance(instance, Namespace):
        return list(vars(instance))
    return [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]


def _note_all(view: Any) -> None:
    """Note all of a view: its own keys, and those of the sections and mappings in it."""
    _, inner, notes, seen, _ = view._view
    seen.update(notes.values())
    for value in inner.values():
        if isinstance(value, _Mapping):
            seen.add(value._key)
        elif seen_by(value) is not None:
            _note_all(value)


@functools.cache
def _view_class(kind: type, names: tuple[str, ...]) -> type:
    """The class of views of a dataclass's instances, or of namespaces with these names. A view says that it is of that
    class itself, so that `dataclasses.replace`, `==` and isinstance do as they do with a plain one. Each field is a
    property: torch's compiler can follow one, in a model that reads its settings in its forward pass."""

    def values_of(self: Any) -> Any:
        _note_all(self)
        return vars(self._view[0])

    def set_value(self: Any, name: str, value: Any) -> None:
        plain, inner, *_ = self._view
        setattr(plain, name, value)  # which raises for a frozen one
        if name in inner:
            inner[name] = value
        else:
            object.__setattr__(self, name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        _note_all(self)
        return copy.copy, (self._view[0],)

    def missing(self: Any, name: str) -> Any:
        _, _, _, seen, prefix = self._view
        seen.add(prefix + name)
        return kind.__getattr__(self, name)  # type: ignore[attr-defined]

    members: dict[str, Any] = {
        "__slots__": ("_view",),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__hash__": kind.__hash__,
        "__class__": property(lambda self: kind),
        "__dict__": property(values_of),  # vars(config): all of it
        "__setattr__": set_value,
        "__reduce_ex__": reduce,
        "__repr__": lambda self: repr(self._view[0]),  # what is only printed is not read
        **{name: _noted(name) for name in names},
    }
    if hasattr(kind, "__getattr__"):
        members["__getattr__"] = missing
    return type(kind.__name__, (kind,), members)


def _noted(name: str) -> property:
    """A field of a view."""

    def read(self: Any) -> Any:
        _, inner, notes, seen, _ = self._view
        if name in notes and notes[name] not in seen:
            seen.add(notes[name])
        return inner[name]

    return property(read)


_OWN_ARGS = ", or self.args.NAME, run.args.NAME for settings of your own"


class _Mapping(dict[str, Any]):
    """A mapping that notes which of its keys are read."""

    _key: str
    _seen: set[str]

    @classmethod
    def of(cls, values: dict[str, Any], key: str, seen: set[str]) -> _Mapping:
        """The view of a mapping that is the value of this key."""
        view: _Mapping = dict.__new__(cls)
        dict.update(view, {name: _wrapped(value, f"{key}.{name}", seen) for name, value in values.items()})
        view._key, view._seen = key, seen
        return view

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain dictionary: `dataclasses.asdict` copies a mapping by calling its class."""
        return dict(*args, **kwargs)

    def copy(self) -> dict[str, Any]:
        """A plain dictionary."""
        return dict(self.items())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._key}.{name}: {self._key} is a dict: write {self._key}[{name!r}]{_OWN_ARGS}")

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _noting_one(method: Any) -> Any:
    """A method of dict that looks up one key: notes it, unless its value is a mapping, of which its own keys are."""

    def look_up(self: _Mapping, name: object, *default: Any) -> Any:
        if not isinstance(dict.get(self, str(name)), _Mapping):
            self._seen.add(f"{self._key}.{name}")
        return method(self, name, *default)

    return look_up


def _noting_all(method: Any) -> Any:
    """A method of dict that goes through all of it: notes all."""

    def go_through(self: _Mapping, *other: Any) -> Any:
        self._seen.add(self._key)
        return method(self, *other)

    return go_through


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(_Mapping, _name, _noting_one(getattr(dict, _name)))
for _name in ("__iter__", "__eq__", "keys", "items", "values"):
    setattr(_Mapping, _name, _noting_all(getattr(dict, _name)))
