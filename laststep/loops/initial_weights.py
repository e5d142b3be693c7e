"""The weights that a run starts from. A resumed run has its own, and reads no others.

They come from model.weights, a file or a name (`read_initial_weights`), or from the model's own initialisation. Where a
model is sharded, no rank may have memory for all of it: `build` makes it without memory and notes each operator on a
tape, and `InitialValues` then fills each rank's rows with the very values that the whole model would have had.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laststep import compat
from laststep.checkpoint.export import plain_name, read_source, weights_sha256
from laststep.checkpoint.shards import local_of
from laststep.compat import sharding
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks.world import ShardPlace, shard_rows
from laststep.say import say
from laststep.tasks.models import is_weights_name, pretrained_weights

SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Fitted:
    """Weights from elsewhere, by the names of the model that they are for."""

    tensors: dict[str, Tensor]
    left_out: list[str]  # names that the model has with another number of classes
    classes: tuple[int, int] | None  # there and here, if they differ


def read_initial_weights(config: Config, model: nn.Module, record: Path) -> tuple[Fitted, list[str]]:
    """The weights that `config.model.weights` names, for this model, and lines that say what was taken.

    An attempt that dies before the first checkpoint is followed by one that reads them again: `record` says whether
    they are still the same. Raises ConfigError when there are none, or they are another model's.
    """
    given = str(config.model.weights)
    if is_weights_name(given):
        found = pretrained_weights(config.model.name, given, config.model.args)
    else:
        try:
            found = read_source(Path(given))
        except ConfigError as error:
            raise ConfigError(f"model.weights={error}") from None
    fitted = fit(model.state_dict(), found, f"model.weights={given}")
    line = f"weights: {len(fitted.tensors)} of {len(fitted.tensors) + len(fitted.left_out)} tensors from {given}"
    if fitted.classes is not None:
        there, here = fitted.classes
        line += f"; {', '.join(fitted.left_out)} left as initialised (classes {there} -> {here})"
    return fitted, [line, *_note(record, given, weights_sha256(found))]


def fit(wanted: Mapping[str, Any], found: Mapping[str, Tensor], source: str) -> Fitted:
    """Match weights to the tensors of a model's state_dict, `wanted`, by name and shape.

    Names may have the prefixes of torch.compile and DistributedDataParallel. Tensors that differ only in the number of
    classes, their first dimension, are left out. Raises ConfigError, which names `source`, for any other difference.
    """
    names = {plain_name(name): name for name, value in wanted.items() if isinstance(value, Tensor)}
    given = {plain_name(name): tensor for name, tensor in found.items()}
    if not names.keys() & given.keys():
        given = {name.removeprefix("module."): tensor for name, tensor in given.items()}
    _check_names(names, given, source)
    for name in names.keys() & given.keys():
        _check_kind(name, wanted[names[name]], given[name], source)
    shared = {name: (tuple(given[name].shape), tuple(wanted[names[name]].shape)) for name in names if name in given}
    differing = {name: shapes for name, shapes in shared.items() if shapes[0] != shapes[1]}
    classes = {_classes(*shapes) for shapes in differing.values()}
    if None in classes or len(classes) > 1 or len(differing) == len(shared):
        name, (there, here) = next(iter(differing.items()))
        raise ConfigError(f"{source}: weights of another model: {name} is {there} there, {here} in this model")
    taken = {names[name]: given[name] for name in shared if name not in differing}
    return Fitted(taken, list(differing), next(iter(classes), None))


def _check_names(wanted: Mapping[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError unless the weights have the names of the model's tensors."""
    # Batch norm's count of batches, which old files lack, has no part in what a model computes.
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    if missing:
        raise ConfigError(f"{source}: weights of another model: this model's {_few(missing)} not among them")
    if unknown := [name for name in given if name not in wanted]:
        raise ConfigError(f"{source}: weights of another model: {_few(unknown)} not in this model")


def _check_kind(name: str, wanted: Tensor, given: Tensor, source: str) -> None:
    """Raise ConfigError for a tensor that torch would convert with loss, such as the integers of a quantised model."""
    loses = wanted.dtype.is_floating_point and not given.dtype.is_floating_point
    if given.layout is not torch.strided or loses:
        raise ConfigError(f"{source}: {name} is {_kind(given)} there, {_kind(wanted)} in this model; convert it")


def _kind(tensor: Tensor) -> str:
    sparse = "" if tensor.layout is torch.strided else "sparse "
    return f"{sparse}{str(tensor.dtype).removeprefix('torch.')}"


def _classes(there: tuple[int, ...], here: tuple[int, ...]) -> tuple[int, int] | None:
    """The first dimensions of two shapes, if they differ in nothing else."""
    return (there[0], here[0]) if there and here and there[1:] == here[1:] else None


def _few(names: list[str]) -> str:
    """The first of some names, as the subject of a sentence."""
    if len(names) > SHOWN:
        return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more are"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _note(record: Path, source: str, sha256: str) -> Iterator[str]:
    """Record what the run starts from; yields a warning if an earlier attempt has started from something else."""
    now = {"source": source, "weights_sha256": sha256}
    try:
        before = json.loads(record.read_text())["weights_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        before = sha256
    with contextlib.suppress(OSError):
        record.write_text(json.dumps(now) + "\n")
    if before != sha256:
        yield f"WARNING: {source} has changed since this run first started from it; no step of that attempt is left"


Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class InitialValues:
    """The initial values of a model that has no memory yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._slots: dict[Ref | Tensor, list[Slot]] = defaultdict(list)

    def note(self, models: Sequence[nn.Module]) -> None:
        """`models` are the one on the tape and copies of it. Call this before any of them is changed."""
        for alike in zip(*(model.modules() for model in models)):
            for name, tensor in _own(alike[0]):
                self._slots[Ref.of(tensor) if tensor.is_meta else tensor] += [(module, name) for module in alike]

    def fill(self, models: Sequence[nn.Module], place: ShardPlace, device: torch.device) -> None:
        """Give the models, which have been sharded, memory on the device, and their values."""
        made: dict[int, Tensor] = {}
        for value, slots in self._slots.items():
            for module, name in slots:
                before = getattr(module, name)
                if id(before) not in made:  # a tied parameter has several slots
                    made[id(before)] = _with_memory(before, device)
                setattr(module, name, made[id(before)])
            if isinstance(value, Tensor):
                for slot in slots:
                    _sink(slot, place)(value)
        for model in models:
            model.load_state_dict({}, strict=False)  # has FSDP2 look where its shards are now
        refs = {ref: slots for ref, slots in self._slots.items() if isinstance(ref, Ref)}
        self._tape.replay({ref: [_sink(slot, place) for slot in slots] for ref, slots in refs.items()})


def build(
    make: Callable[[], nn.Module], reseed: Callable[[], None], says: bool
) -> tuple[nn.Module, InitialValues | None]:
    """The model on the meta device, with its initial values; or with memory, where that cannot be, which is said."""
    try:
        tape = Tape()
        return tape.record(make), InitialValues(tape)
    except CannotDefer as why:
        if says:
            say(f"WARNING: model() cannot be built shard by shard ({why}); each rank first builds it in host memory")
    reseed()
    return make(), None


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _sink(slot: Slot, place: ShardPlace) -> Callable[[Tensor], None]:
    """What copies a rank's rows of a tensor to where they belong."""
    module, name = slot

    @torch.no_grad()
    def take(value: Tensor) -> None:
        target = getattr(module, name)
        rows = local_of(target)
        if rows.shape != value.shape:
            begin, end = shard_rows(len(value), place.shard, place.shards)
            value = value[begin:end]
        rows.copy_(value)

    return take


CPU, META = torch.device("cpu"), torch.device("meta")
GIVES_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.linspace)
# Operators that write to their first argument without reading it.
OVERWRITE = {
    *("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::random_"),
    *("aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"),
}
UNDEFINED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
FORBIDDEN = {"aten::set_", "aten::resize_", "aten::resize_as_"}  # these give a tensor other memory
Sink = Callable[[Tensor], None]


class CannotDefer(Exception):
    """This model cannot be built without memory; says why."""


@dataclass(frozen=True)
class Ref:
    """A tensor on the tape: where it lies in which memory."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Ref:
        """The tensor's place."""
        offset = int(tensor.storage_offset())
        return cls(sharding.storage_of(tensor), offset, tuple(tensor.size()), tensor.stride(), tensor.dtype)


@dataclass
class _Op:
    function: Any
    args: Any  # with a Ref in place of each tensor
    kwargs: Any
    results: list[Ref]
    read: set[int]
    written: set[int]
    made: set[int]
    overwrites: bool  # all that it writes to, without reading it
    draws: bool


class Tape:
    """The operators that have built a model on the meta device, in their order.

    There tensors have shapes and no data. Once the model is sharded, `replay` runs the operators on the CPU, so that
    the generator draws the same numbers for the same weights. Memory is taken for a tensor only from the first operator
    whose result it keeps to the last one that uses it; then each rank takes its rows. Most models initialise each layer
    twice, by torch's default and then by their own; the first draws go into scratch memory.
    """

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        self._bytes: dict[int, int] = {}  # the size of each memory
        self._kept: list[Any] = []  # else the numbers of memories would be used again
        self._generator = torch.get_rng_state()
        self._pretend = _Pretend()

    def record(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model that `build` makes, on the meta device. Raises CannotDefer; then the generators are as before."""
        before = random.getstate(), numpy.random.get_state()
        try:
            with self._pretend, sharding.recording(self._note), sharding.trunc_normal_by(self._noted):
                model = build()
            self._check_generator()
            for tensor in (*model.parameters(), *model.buffers()):
                if _is_meta(tensor) and sharding.storage_of(tensor) not in self._bytes:
                    raise CannotDefer("a tensor comes from nowhere")
            if any(not _is_meta(parameter) for parameter in model.parameters()):
                raise CannotDefer("it makes parameters on a device that it names itself")
        except Exception as error:  # what the model itself raises, it raises again when it is built in memory
            random.setstate(before[0])
            numpy.random.set_state(before[1])
            torch.set_rng_state(self._generator)
            raise error if isinstance(error, CannotDefer) else CannotDefer(str(error)) from error
        return model

    def replay(self, sinks: Mapping[Ref, Sequence[Sink]]) -> None:
        """Compute these tensors, and hand each to its sinks as soon as it is complete."""
        wanted: dict[int, list[Ref]] = defaultdict(list)
        for ref in sinks:
            wanted[ref.storage].append(ref)
        runs, scratch = self._plan(set(wanted))
        last = {storage: n for n in sorted(runs) for op in [self._ops[n]] for storage in op.read | op.written | op.made}
        ends: dict[int, list[int]] = defaultdict(list)
        for storage, number in last.items():
            ends[number].append(storage)
        memory: dict[int, Tensor] = {}

        def end(storage: int) -> None:
            for ref in wanted.get(storage, ()):
                for sink in sinks[ref]:
                    sink(self._tensor(memory, ref))
            memory.pop(storage, None)

        with torch.no_grad():
            for number, op in enumerate(self._ops):
                if number in runs:
                    self._run(op, memory)
                elif number in scratch:
                    self._run(op, {})
                for storage in ends[number]:
                    end(storage)
            for storage in wanted.keys() - last.keys():  # nothing has ever been written there
                end(storage)

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        draws = torch.Tag.nondeterministic_seeded in function.tags
        given, results = _metas((args, kwargs)), _metas(result)
        if not given and not results:
            if draws:
                raise CannotDefer("it draws random numbers on a device that it names itself")
            return
        name = sharding.name_of(function)
        if name in FORBIDDEN:
            raise CannotDefer(f"it calls {name}")
        read = {sharding.storage_of(tensor) for tensor in given}
        if name in UNDEFINED:
            read = set()
        void = self._pretend.void & read
        if void and (void != read or self._pretend.asked == "cpu"):
            raise CannotDefer(f"{name} mixes tensors with and without data")
        if void or self._pretend.asked == "meta":
            self._pretend.void |= {sharding.storage_of(tensor) for tensor in results}
            self._kept += results
            return
        if read - self._bytes.keys():
            raise CannotDefer(f"{name} reads a tensor that comes from nowhere")
        if draws:
            self._check_generator()
        made = {sharding.storage_of(tensor): tensor for tensor in results}
        made = {storage: tensor for storage, tensor in made.items() if storage not in self._bytes}
        for storage, tensor in made.items():
            self._bytes[storage] = tensor.untyped_storage().nbytes()
        self._kept += [*given, *results]
        targets = _metas(sharding.written_by(function, args, kwargs))
        if not targets and (not made or name in UNDEFINED):
            return  # a view, or memory without contents
        overwrites = name in OVERWRITE and all(map(self._is_whole, targets))
        written = {sharding.storage_of(tensor) for tensor in targets}
        if overwrites:
            read = {sharding.storage_of(tensor) for tensor in _metas((args[1:], kwargs))}
        args, kwargs = compat.tree_map(_ref, (args, kwargs))
        refs = [Ref.of(tensor) for tensor in results]
        self._ops.append(_Op(function, args, kwargs, refs, read, written, set(made), overwrites, draws))

    def _noted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that draws its first argument, and is noted as one operator."""

        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not _is_meta(tensor):
                return function(tensor, *args, **kwargs)
            self._check_generator()
            self._kept.append(tensor)
            ref, whole = Ref.of(tensor), self._is_whole(tensor)
            read = set() if whole else {ref.storage}
            self._ops.append(_Op(function, (ref, *args), kwargs, [], read, {ref.storage}, set(), whole, draws=True))
            return tensor

        return noted

    def _is_whole(self, tensor: Tensor) -> bool:
        """Whether the tensor is all that there is in its memory."""
        return tensor.numel() * tensor.itemsize == self._bytes.get(sharding.storage_of(tensor))

    def _check_generator(self) -> None:
        """Nothing draws on the meta device."""
        if not torch.equal(torch.get_rng_state(), self._generator):
            raise CannotDefer("it seeds torch's generator, or draws from it, by itself")

    def _plan(self, live: set[int]) -> tuple[set[int], set[int]]:
        """The numbers of the operators to run so that these memories have their contents, and of those that only have
        to draw."""
        runs, scratch, drawn_later = set[int](), set[int](), False
        for number in range(len(self._ops) - 1, -1, -1):
            op = self._ops[number]
            if (op.written | op.made) & live:
                runs.add(number)
                live = live - op.made - (op.written if op.overwrites else set()) | op.read
                drawn_later |= op.draws
            elif op.draws and drawn_later:
                if op.read:
                    runs.add(number)
                    live = live | op.read
                else:
                    scratch.add(number)
        return runs, scratch

    def _run(self, op: _Op, memory: dict[int, Tensor]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                return self._tensor(memory, value)
            return CPU if isinstance(value, torch.device) and value.type == "meta" else value

        args, kwargs = compat.tree_map(real, (op.args, op.kwargs))
        results = [each for each in compat.tree_leaves(op.function(*args, **kwargs)) if isinstance(each, Tensor)]
        for ref, tensor in zip(op.results, results):
            if ref.storage in op.made:
                self._tensor(memory, ref).copy_(tensor)

    def _tensor(self, memory: dict[int, Tensor], ref: Ref) -> Tensor:
        if ref.storage not in memory:
            memory[ref.storage] = torch.empty(self._bytes[ref.storage], dtype=torch.uint8)
        storage = memory[ref.storage].untyped_storage()
        return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


class _Pretend(TorchFunctionMode):
    """Makes on the meta device what would be made on the CPU.

    Not so tensors of given numbers, which would be lost, nor the steps from one number to another, which models read
    back as settings of their layers. What the model itself makes on the meta device is no part of the tape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: str | None = None  # the device that the call under way names, or that is the default
        self.void: set[int] = set()  # the memories of the model's own meta tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return sharding.storage_of(args[0]) in self.void  # torch does not initialise a meta tensor
        if func == Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args, kwargs = (args[0], *args[2:]), {**kwargs, "device": args[1]}
        given = kwargs.get("device")
        asked = None if given is None else torch.device(given).type
        if asked is None and sharding.takes_default_device(func):
            asked = "cpu"
        if asked == "cpu":
            kwargs["device"] = CPU if func in GIVES_NUMBERS else META
        before, self.asked = self.asked, asked
        try:
            return func(*args, **kwargs)
        finally:
            self.asked = before


def _metas(tree: Any) -> list[Tensor]:
    return [leaf for leaf in compat.tree_leaves(tree) if isinstance(leaf, Tensor) and _is_meta(leaf)]


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # see _AsIfWithData


def _ref(value: Any) -> Any:
    """What stands on the tape for an argument. One with data may change later: it is copied."""
    if isinstance(value, Tensor):
        return Ref.of(value) if _is_meta(value) else value.detach().clone()
    return value
