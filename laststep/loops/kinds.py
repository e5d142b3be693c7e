"""State of any kind, as a checkpoint can hold it.

A checkpoint holds tensors, and what torch.load accepts with `weights_only`: plain values in dicts, lists and tuples.
`encode` turns other kinds into these (NumPy's arrays, scalars and generators, Python's and torch's generators, tuples
with names, enums, deques, sets, dataclasses and the user's own objects). `decode` turns them back: in place where there
is such an object already, since the program may hold it elsewhere too. It runs no constructor and imports nothing.
"""

from __future__ import annotations

import copyreg
import datetime
import pathlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from laststep.config.errors import ConfigError

KIND = "laststep.kind"  # the key by which an encoded value is recognised
PLAIN = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
LONG = 1024  # bytes: a longer string of bytes is stored like a tensor
NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)  # stored by their names
# How to make values of these types again.
FROM_TEXT = {
    "Path": (pathlib.PurePath, str, pathlib.Path),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "dtype": (numpy.dtype, str, numpy.dtype),
}
FACTORIES = {each.__name__: each for each in (int, float, str, list, dict, set, tuple, bool)}


class Unstorable(ConfigError):
    """A value that no checkpoint can hold."""


def encode(value: Any, path: str, copies: bool = False) -> Any:
    """The value in a form that a checkpoint can hold. `path` names it in errors, as in `game.envs[2].np_random`.

    It is a copy, but for tensors, which are copied with `copies`. Raises Unstorable, which names what cannot be stored.
    """
    return _Encoder(copies).encode(value, path)


def decode(encoded: Any, live: Any = None, path: str = "") -> Any:
    """The value that `encode` was given. `live` is what the program has in its place now: where it is of the same kind,
    it is changed and returned. Raises Unstorable for an object of a class that the program has not defined."""
    return _Decoder().decode(encoded, live, path)


def changes_in_place(value: Any) -> bool:
    """Whether `decode` can give a live object another state, without a state_dict of its own."""
    containers = (dict, list, set, deque, numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)
    if isinstance(value, (*containers, random.Random, torch.Generator)):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (*NAMED, Enum))


class _Encoder:
    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._numbers: dict[int, tuple[int, Any]] = {}  # of objects, by id; the object, so that its id stays its own
        self._within: set[int] = set()  # the ids of the containers around this value

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in PLAIN or (kind is bytes and 0 < len(value) < LONG):  # torch.load takes no empty ones
            return value
        if isinstance(value, Tensor):
            return value.detach().clone() if self._copies else value
        if kind in (bytes, bytearray):
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
            return {KIND: kind.__name__, "data": data}
        if id(value) in self._within:
            raise Unstorable(f"{path} contains itself; no checkpoint can hold that")
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            self._within.add(id(value))
            try:
                return self._container(value, path)
            finally:
                self._within.discard(id(value))
        if isinstance(value, numpy.generic):
            return {KIND: "scalar", **self._array(numpy.asarray(value), path)}
        if isinstance(value, Enum):
            return {KIND: "enum", "class": _name_of(kind), "name": value.name}
        for name, (of, write, _) in FROM_TEXT.items():
            if isinstance(value, of):
                return {KIND: name, "text": write(value)}  # type: ignore[operator]
        if isinstance(value, (range, datetime.timedelta)):
            parts = (value.start, value.stop, value.step) if isinstance(value, range) else value
            parts = parts if isinstance(parts, tuple) else (parts.days, parts.seconds, parts.microseconds)
            return {KIND: kind.__name__, "parts": parts}
        if isinstance(value, NAMED):
            name = "" if isinstance(value, (MethodType, ModuleType)) else _name_of(value)
            return {KIND: "name", "name": name}
        return self._shared(value, path)

    def _container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if isinstance(value, dict):
            items = [(key, self.encode(item, _at(path, key))) for key, item in value.items()]
            if KIND in value or not all(map(_is_plain_key, value)):
                keys = [self.encode(key, f"a key of {path}") for key in value]
                return {KIND: "dict", "keys": keys, "values": [item for _, item in items]}
            if isinstance(value, defaultdict):
                factory = getattr(value.default_factory, "__name__", "")
                return {KIND: "defaultdict", "factory": factory, "items": dict(items)}
            if kind not in (dict, OrderedDict, Counter):
                return self._of_subclass(value, dict(items), path)
            plain: Any = kind(dict(items))
            if hasattr(value, "_metadata"):  # of a module's state_dict
                plain._metadata = value._metadata
            return plain
        items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
        if kind in (list, tuple):
            return kind(items)
        if isinstance(value, (set, frozenset)):  # whose order differs from process to process
            return {KIND: kind.__name__, "items": sorted(items, key=repr)}
        if hasattr(value, "_fields"):
            return {KIND: "namedtuple", "class": _name_of(kind), "items": items}
        return self._of_subclass(value, items, path)

    def _of_subclass(self, value: Any, items: Any, path: str) -> Any:
        """Of a dict or a list with a class of its own: as the base class has it, and its attributes."""
        attributes = self.encode(dict(vars(value)), path) if getattr(value, "__dict__", None) else {}
        return {KIND: "container", "class": _name_of(type(value)), "items": items, "attributes": attributes}

    def _shared(self, value: Any, path: str) -> Any:
        """An object that may be referred to from several places."""
        known = self._numbers.get(id(value))
        if known is not None:
            return {KIND: "same", "number": known[0]}
        number = len(self._numbers)
        self._numbers[id(value)] = (number, value)
        return {"number": number, **self._object(value, path)}

    def _object(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) is numpy.ndarray:
            return {KIND: "array", **self._array(value, path)}
        if isinstance(value, deque):
            items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
            return {KIND: "deque", "items": items, "maxlen": value.maxlen}
        if type(value) is random.Random:
            version, state, gauss = value.getstate()
            return {KIND: "Random", "version": version, "state": torch.tensor(state), "gauss": gauss}
        if isinstance(value, numpy.random.Generator):
            return {KIND: "Generator", "state": self.encode(dict(value.bit_generator.state), path)}
        if isinstance(value, numpy.random.RandomState):
            return {KIND: "RandomState", "state": self.encode(value.get_state(legacy=False), path)}
        if isinstance(value, torch.Generator):
            return {KIND: "torch.Generator", "state": value.get_state(), "device": str(value.device)}
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return {KIND: "stateful", "state": self.encode(value.state_dict(), path)}
        try:
            make, given, *rest = value.__reduce_ex__(4)
        except Exception as error:  # of a lock, a file, a running generator, a library's own object
            raise _refusal(value, path, " ".join(str(error).split())[:200]) from error
        state, listed, keyed = (*rest, None, None, None)[:3]
        if make is not copyreg.__newobj__ or given != (type(value),) or listed or keyed:  # type: ignore[attr-defined]
            raise _refusal(value, path, "only its own library knows how to make it")
        slots: Any = {}
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state, slots = state[0] or {}, state[1]
        held = {name: self.encode(getattr(value, name), f"{path}.{name}") for name in slots}
        if isinstance(state, dict) and not hasattr(value, "__setstate__"):
            attributes = {name: self.encode(item, f"{path}.{name}") for name, item in state.items()}
            return {KIND: "object", "class": _name_of(type(value)), "attributes": {**attributes, **held}}
        return {KIND: "object", "class": _name_of(type(value)), "state": self.encode(state, path)}  # for __setstate__

    def _array(self, array: numpy.ndarray[Any, Any], path: str) -> dict[str, Any]:
        if array.dtype.hasobject:
            if array.dtype != object:
                raise _refusal(array, path, "its rows hold objects")
            items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(array.ravel().tolist())]
            return {"objects": items, "shape": array.shape}
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = array.flatten("F") if fortran else array.flatten()  # a copy
        try:
            data = torch.from_numpy(flat)
        except (TypeError, ValueError):  # a type that torch has not, such as dates and text
            data = torch.from_numpy(numpy.frombuffer(bytearray(flat.tobytes()), numpy.uint8))
        described = numpy.lib.format.dtype_to_descr(array.dtype)
        return {"data": data, "dtype": described, "shape": array.shape, "fortran": fortran}


class _Decoder:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}  # objects, by their numbers
        self._changed: dict[int, Any] = {}  # live objects, by their ids

    def decode(self, encoded: Any, live: Any, path: str) -> Any:
        if live is not None and not isinstance(live, (*PLAIN, *NAMED, bytes, tuple, Enum)):
            # What is one object now may have been two in the run that was saved.
            live = None if id(live) in self._changed else self._changed.setdefault(id(live), live)
        if isinstance(encoded, dict):
            if KIND in encoded:
                return self._of_kind(encoded[KIND], encoded, live, path)
            return self._dict(encoded, encoded.items(), live, path)
        if type(encoded) in (list, tuple):
            items = self._items(encoded, live, path)
            return _refill(live, items) if type(encoded) is list and type(live) is list else type(encoded)(items)
        if isinstance(encoded, Tensor) and isinstance(live, Tensor) and encoded.device != live.device:
            return encoded.to(live.device)  # a checkpoint is read on the CPU
        return encoded

    def _of_kind(self, kind: str, encoded: dict[str, Any], live: Any, path: str) -> Any:
        if kind == "same":
            return self._made[encoded["number"]]
        if kind in FROM_TEXT:
            return FROM_TEXT[kind][2](encoded["text"])  # type: ignore[operator]
        if kind in ("range", "timedelta"):
            return (range if kind == "range" else datetime.timedelta)(*encoded["parts"])
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(encoded["data"].cpu().numpy().tobytes())
        if kind == "scalar":
            return self._array(encoded, path)[()]
        if kind == "enum":
            return _class_of(encoded["class"], live, path, Enum)[encoded["name"]]
        if kind == "name":
            return _named(encoded["name"], live, path)
        if kind == "dict":
            keys = [self.decode(key, None, path) for key in encoded["keys"]]
            return self._dict({}, zip(keys, encoded["values"]), live, path)
        if kind == "defaultdict":
            empty = live if isinstance(live, defaultdict) else defaultdict(FACTORIES.get(encoded["factory"]))
            return self._dict(empty, encoded["items"].items(), empty, path)
        if kind in ("set", "frozenset"):
            items = [self.decode(item, None, path) for item in encoded["items"]]
            if kind == "frozenset":
                return frozenset(items)
            return _refill(live, items) if type(live) is set else set(items)
        if kind == "namedtuple":
            made = _class_of(encoded["class"], live, path, tuple)
            return tuple.__new__(made, self._items(encoded["items"], live, path))
        if kind == "container":
            return self._subclass(encoded, live, path)
        return self._object(kind, encoded, live, path)

    def _subclass(self, encoded: dict[str, Any], live: Any, path: str) -> Any:
        made = _class_of(encoded["class"], live, path, (dict, list, tuple))
        base = next(each for each in (dict, list, tuple) if issubclass(made, each))
        if base is tuple:
            return tuple.__new__(made, self._items(encoded["items"], live, path))
        value = live if type(live) is made else base.__new__(made)
        if base is dict:
            self._dict(value, encoded["items"].items(), value, path)
        else:
            value[:] = self._items(encoded["items"], live, path)
        if encoded["attributes"]:
            vars(value).update(self.decode(encoded["attributes"], None, path))
        return value

    def _object(self, kind: str, encoded: dict[str, Any], live: Any, path: str) -> Any:
        if kind == "object":
            return self._users_object(encoded, live, path)
        if kind == "stateful":
            if not hasattr(live, "load_state_dict"):
                raise Unstorable(f"{path}: make this object before run.restore(...), which restores its state")
            live.load_state_dict(self.decode(encoded["state"], None, path))
            value = live
        elif kind == "array":
            value = self._array(encoded, path)
            if _takes(live, value):
                numpy.copyto(live, value)
                value = live
        elif kind == "deque":
            items = self._items(encoded["items"], live, path)
            alike = type(live) is deque and live.maxlen == encoded["maxlen"]
            value = _refill(live if alike else deque(maxlen=encoded["maxlen"]), items)
        elif kind == "torch.Generator":
            alike = isinstance(live, torch.Generator) and str(live.device) == encoded["device"]
            value = live if alike else torch.Generator(encoded["device"])
            value.set_state(encoded["state"].cpu())
        elif kind == "Random":
            value = live if type(live) is random.Random else random.Random()
            value.setstate((encoded["version"], tuple(encoded["state"].tolist()), encoded["gauss"]))
        elif kind == "RandomState":
            value = live if isinstance(live, numpy.random.RandomState) else numpy.random.RandomState()
            value.set_state(self.decode(encoded["state"], None, path))
        elif kind == "Generator":
            state = self.decode(encoded["state"], None, path)
            value = live
            if not isinstance(live, numpy.random.Generator) or live.bit_generator.state.keys() != state.keys():
                value = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
            value.bit_generator.state = state
        else:
            raise Unstorable(f"{path}: stored as a {kind!r} by another version of Laststep")
        self._made[encoded["number"]] = value
        return value

    def _users_object(self, encoded: dict[str, Any], live: Any, path: str) -> Any:
        """One of a class of the program's."""
        made = _class_of(encoded["class"], live, path, object)
        value = live if type(live) is made else object.__new__(made)
        self._made[encoded["number"]] = value  # first: what it is made of may refer to it
        if "state" in encoded:
            if value is not live:  # no code of a class that the checkpoint alone names
                raise Unstorable(f"{path}: make this {made.__name__} before run.restore(...), to be restored in place")
            value.__setstate__(self.decode(encoded["state"], None, path))
            return value
        for name, item in encoded["attributes"].items():
            now = getattr(value, name, None) if value is live else None
            object.__setattr__(value, name, self.decode(item, now, f"{path}.{name}"))
        for name in set(getattr(value, "__dict__", ())) - encoded["attributes"].keys():
            object.__delattr__(value, name)
        return value

    def _array(self, encoded: dict[str, Any], path: str) -> numpy.ndarray[Any, Any]:
        if "objects" in encoded:
            array = numpy.empty(len(encoded["objects"]), dtype=object)
            for number, item in enumerate(self._items(encoded["objects"], None, path)):
                array[number] = item
            return array.reshape(encoded["shape"])
        dtype = numpy.lib.format.descr_to_dtype(encoded["dtype"])
        flat = numpy.frombuffer(encoded["data"].cpu().numpy().tobytes(), dtype)
        return flat.reshape(encoded["shape"], order="F" if encoded["fortran"] else "C").copy(order="K")

    def _items(self, encoded: Any, live: Any, path: str) -> list[Any]:
        beside = list(live) if isinstance(live, (list, tuple, deque)) else []
        beside += [None] * (len(encoded) - len(beside))
        return [self.decode(item, now, f"{path}[{n}]") for n, (item, now) in enumerate(zip(encoded, beside))]

    def _dict(self, empty: Any, items: Iterable[tuple[Any, Any]], live: Any, path: str) -> Any:
        before = live if isinstance(live, dict) else {}
        decoded = {key: self.decode(item, before.get(key), _at(path, key)) for key, item in items}
        if isinstance(live, dict):
            live.clear()
            live.update(decoded)
            return live
        if type(empty) is dict:
            return decoded
        made = type(empty)(decoded)
        if hasattr(empty, "_metadata"):
            made._metadata = empty._metadata
        return made


def _refill(live: Any, items: list[Any]) -> Any:
    live.clear()
    live.update(items) if isinstance(live, set) else live.extend(items)
    return live


def _takes(live: Any, array: numpy.ndarray[Any, Any]) -> bool:
    """Whether an array in the program can take over the values of this one."""
    if type(live) is not numpy.ndarray or not live.flags.writeable:
        return False
    return (live.shape, live.dtype) == (array.shape, array.dtype)


def _at(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _is_plain_key(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_plain_key, key)))


def _name_of(value: Any) -> str:
    """The name of a class or a function, by which a later attempt finds it."""
    return f"{value.__module__}:{value.__qualname__}"


def _named(name: str, live: Any, path: str) -> Any:
    """What a program calls by this name: a class, a function, a module. A program that has something of the kind there
    keeps it."""
    if isinstance(live, NAMED):
        return live
    module, _, inner = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in inner.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise Unstorable(f"{path}: the checkpoint holds {name.replace(':', '.')}, which the program has not defined")
    return found


def _class_of(name: str, live: Any, path: str, base: Any) -> Any:
    kind = type(live)
    if _name_of(kind) == name:
        return kind
    if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        raise Unstorable(
            f"{path}: make this {name.rpartition(':')[2]} before run.restore(...), which restores its state"
        )
    found = _named(name, None, path)
    if not isinstance(found, type) or not issubclass(found, base):
        raise Unstorable(f"{path}: {name.replace(':', '.')} is no such class any more")
    return found


def _refusal(value: Any, path: str, why: str) -> Unstorable:
    return Unstorable(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which no checkpoint can hold ({why}): leave "
        "it out, or give the object that has it state_dict() and load_state_dict()"
    )
