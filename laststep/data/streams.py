"""Batches of data that can only be iterated, starting at any step: what run.stream(...) gives.

A stream is cut into parts, S times K of them. S is the number of shares of a global batch (train.shares, else the
number of ranks when the run began), K that of worker processes for each. In step t the share s takes a batch of part
s*K + t mod K, so which samples a step has depends neither on the number of ranks nor on what was loaded ahead. Each
part is read by itself, from its own copy of the source, over and over.

A part's `Mark` says how to come back to a batch that was used: the state of the source before it, or how many samples
came before, and a checksum. A part that comes back to another batch has a source that lies about its state; then it is
read again from its beginning. So a mark may be old: the batches since then are read and thrown away. That is why a
rescue needs no other rank: it saves the marks that it knows.
"""

from __future__ import annotations

import base64
import copy
import importlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from laststep import compat
from laststep.config.errors import ConfigError, first_line
from laststep.data.loader import DeviceLoader, end_workers, item_loader, note_ours, set_up_workers
from laststep.data.order import preserved_generators, seed_generators, seed_of
from laststep.ranks.group import Group
from laststep.ranks.process import held_back
from laststep.say import say

EXCHANGE_STEPS = 50


@dataclass(frozen=True)
class Mark:
    """A batch of a part that was used, and how to read it again."""

    batch: int  # of this part, from 0
    cycle: int  # how often the source had been read to its end before
    block: int  # of this cycle, in which the batch begins, from 0
    offset: int  # of its first sample in the shuffled block
    state: str | None  # of the source before the block; None: count the samples from the beginning
    checksum: int  # of the batch's first and last sample


@dataclass(frozen=True)
class Spec:
    """What the parts of a stream have in common."""

    source: Any  # an iterable, or a function of (part, parts) that makes one
    parts: int
    size: int | None  # samples in a batch of a part; None: the source gives batches
    shuffle: int  # samples in a block that is shuffled; 0: none
    seed: int

    @property
    def block(self) -> int:
        """How many samples are read together."""
        return max(self.shuffle, self.size or 1)

    def open(self, part: int, cycle: int) -> Opened:
        """The source of a part, at its beginning. Raises ConfigError for one that cannot be read twice."""
        with _as_rank(self.source, part, self.parts) as splits:
            if callable(self.source) and not hasattr(self.source, "__iter__"):
                return Opened(self._seeded(self.source(part, self.parts), part, cycle), cycle, 0, 1)
            hugging_face = sys.modules.get("datasets")
            if hugging_face is not None and isinstance(self.source, hugging_face.IterableDataset):
                split = importlib.import_module("datasets.distributed").split_dataset_by_node
                own = split(self.source, rank=part, world_size=self.parts)
                return Opened(own, cycle, 0, 1)
            own = self._seeded(_copy(self.source), part if splits else 0, cycle)
            return Opened(own, cycle, 0 if splits else part, 1 if splits else self.parts)

    def _seeded(self, source: Any, part: int, cycle: int) -> Any:
        return compat.with_seeded_shuffles(source, seed_of("shuffles", self.seed, part, cycle))


_with_workers: list[Any] = []  # iterations over the user's own DataLoaders


class Opened:
    """A source that is read from its beginning or from a state. It keeps every `step`-th sample."""

    def __init__(self, iterable: Any, cycle: int, first: int, step: int) -> None:
        if not hasattr(iterable, "__iter__"):
            raise ConfigError(f"run.stream(...): a {type(iterable).__name__} cannot be iterated")
        self._iterable, self._first, self._step = iterable, first, step
        if isinstance(iterable, DataLoader):
            note_ours(iterable.dataset)
            set_up_workers(iterable)
        if hasattr(iterable, "set_epoch"):
            iterable.set_epoch(cycle)
        self._iterator: Iterator[Any] | None = None

    def load(self, state: str) -> None:
        """Start at this state, in which at least one sample has been read."""
        self._iterable.load_state_dict(_from_text(state))
        self._first = self._step - 1

    def read(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""
        if self._iterator is None:
            with held_back():
                iterator = iter(self._iterable)
            if isinstance(self._iterable, DataLoader):
                _with_workers.append(iterator)
            self._iterator = islice(iterator, self._first, None, self._step)
        return list(islice(self._iterator, count))

    def state(self) -> str | None:
        """Where the source is, after a sample has been read; None if it does not say."""
        if not hasattr(self._iterable, "state_dict") or not hasattr(self._iterable, "load_state_dict"):
            return None
        try:
            return _to_text(self._iterable.state_dict())
        except Exception:  # it may want arguments, or hold what cannot be stored
            return None


class PartReader(Iterator[tuple[list[Any], int, Mark]]):
    """Reads the batches of one part, each with its mark; `taken` of them were used before."""

    def __init__(self, spec: Spec, part: int, mark: Mark | None, taken: int) -> None:
        self._spec, self._part = spec, part
        self._counts = False  # samples, as the source does not say where it is, or lies
        self._begin()
        if mark is None:
            self._find_out()
            self._skip(taken)
            return
        self._counts = mark.state is None and mark.block > 0
        if not self._comes_back(mark) and (self._counts or not self._comes_back_by_counting(mark)):
            raise self._differs(f"at batch {mark.batch}")
        self._skip(taken - mark.batch - 1)

    def _differs(self, where: str) -> ConfigError:
        return ConfigError(
            f"run.stream(...): part {self._part} gives another sample than before {where}: a "
            f"{_kind(self._spec.source)} must give the same samples in the same order whenever it is read from its "
            "beginning; give its shuffling a seed, or shuffle by run.stream(..., shuffle=N)"
        )

    def _begin(self, cycle: int = 0, block: int = 0, state: str | None = None) -> None:
        self._cycle, self._block = cycle, block  # of the block that is read next
        self._before = state  # the source's state before that block
        self._opened: Opened | None = None
        self._samples: list[Any] = []
        self._offset = self._number = 0

    def __next__(self) -> tuple[list[Any], int, Mark]:
        if self._offset == len(self._samples):
            self._fill()
        cycle, block, offset, state = *self._place, self._offset, self._state
        samples: list[Any] = []
        while len(samples) < (self._spec.size or 1):
            if self._offset == len(self._samples):
                self._fill()
            samples.append(self._samples[self._offset])
            self._offset += 1
        checksum = zlib.crc32(repr([_checksum(samples[0]), _checksum(samples[-1])]).encode())
        mark = Mark(self._number, cycle, block, offset, state, checksum)
        self._number += 1
        return samples, self._part, mark

    def _fill(self) -> None:
        """Read the next block, in the next cycle if this one has ended."""
        for _ in range(2):
            self._place, self._state = (self._cycle, self._block), self._before
            samples = self._read_block()
            if samples:
                break
            self._opened, self._before = None, None
            self._cycle, self._block = self._cycle + 1, 0
        else:
            parts = self._spec.parts
            raise ConfigError(
                f"run.stream(...): part {self._part} of {parts} has no samples; there must be at least {parts}, and "
                f"where shards are dealt out to the parts, {parts} shards"
            )
        self._block += 1
        self._before = None if self._counts or self._opened is None else self._opened.state()
        self._counts |= self._before is None
        if self._spec.shuffle:
            draws = torch.Generator().manual_seed(seed_of("shuffle", self._spec.seed, self._part, *self._place))
            samples = [samples[index] for index in torch.randperm(len(samples), generator=draws).tolist()]
        self._samples, self._offset = samples, 0

    def _read_block(self) -> list[Any]:
        spec = self._spec
        with _as_rank(spec.source, self._part, spec.parts):
            if self._opened is None:
                self._opened = spec.open(self._part, self._cycle)
                if self._before is not None:
                    self._opened.load(self._before)
            seed_generators(seed_of("stream", spec.seed, self._cycle, self._block))
            return self._opened.read(spec.block)

    def _comes_back(self, mark: Mark) -> bool:
        """Whether the source gives the batch of this mark again. Leaves this reader behind that batch."""
        if mark.state is None:
            return self._comes_back_by_counting(mark)
        try:
            self._begin(mark.cycle, mark.block, mark.state)
            return self._gives(mark)
        except Exception as error:  # a source that does not take its own state may raise anything
            self._say(f"does not take its own state ({first_line(error)})")
            return False

    def _comes_back_by_counting(self, mark: Mark) -> bool:
        if mark.state is not None:
            self._say("does not come back to where its state_dict() was taken")
            self._counts = True
        self._begin(mark.cycle)
        while self._block < mark.block:
            if len(self._read_block()) < self._spec.block:
                return False
            self._block += 1
        return self._gives(mark)

    def _gives(self, mark: Mark) -> bool:
        self._fill()
        if self._place != (mark.cycle, mark.block) or mark.offset >= len(self._samples):
            return False
        self._offset, self._number = mark.offset, mark.batch
        return next(self)[2].checksum == mark.checksum

    def _skip(self, batches: int) -> None:
        for _ in range(batches):
            next(self)

    def _find_out(self) -> None:
        """Whether the source comes back to where its state says, twice in a row; if it has none, whether it begins with
        the same samples again. It is tried with its first samples: a data set may forget a shuffle buffer, or its place
        when it is resumed for the second time. Raises ConfigError for other samples: a resume would end with that."""
        with _as_rank(self._spec.source, self._part, self._spec.parts):
            first = self._spec.open(self._part, 0)
            found, state = list[int](), None
            for number in range(3):
                seed_generators(seed_of("stream", self._spec.seed, "trial", number))
                if not (samples := first.read(1)):
                    break
                found.append(_checksum(samples[0]))
                state = first.state() if number == 0 else state
            if found and state is None:
                again = self._spec.open(self._part, 0)
                for number, before in enumerate(found):
                    seed_generators(seed_of("stream", self._spec.seed, "trial", number))
                    if not (samples := again.read(1)) or _checksum(samples[0]) != before:
                        raise self._differs("when it is read again")
                self._counts = True
                return self._say("does not say where it is")
            if len(found) < 3:
                return
            for number in (1, 2):
                try:
                    assert state is not None
                    again = self._spec.open(self._part, 0)
                    again.load(state)
                    seed_generators(seed_of("stream", self._spec.seed, "trial", number))
                    samples, state = again.read(1), again.state()
                    self._counts = not samples or _checksum(samples[0]) != found[number] or state is None
                except Exception:  # as above
                    self._counts = True
                if self._counts or state is None:
                    return self._say(f"does not come back to its state_dict() {'once' if number == 1 else 'twice'}")

    def _say(self, what: str) -> None:
        if self._part == 0:
            say(
                f"run.stream(...): a {_kind(self._spec.source)} {what}, so its samples are counted: a resume reads "
                "those of this cycle again, and throws them away. The run stays exact"
            )


class _Parts(IterableDataset[Any]):
    """The batches of some parts, in the order in which a rank takes them. One of n workers takes every n-th."""

    def __init__(
        self, spec: Spec, order: PartOrder, marks: list[Mark | None], collate: Callable[..., Any] | None
    ) -> None:
        self._spec, self._order, self._marks, self._collate = spec, order, marks, collate

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        compat.hide_worker()  # a source would take only some of its shards
        readers: dict[int, PartReader] = {}
        for part in islice(self._order.parts(), number, None, workers):
            try:
                if part not in readers:
                    taken = self._order.taken_of(part)
                    readers[part] = PartReader(self._spec, part, self._marks[part], taken)
                samples, _, mark = next(readers[part])
                batch = samples if self._collate is None else self._collate(samples)
            except ConfigError as error:
                yield error  # the rank raises it: raised here it would be the text of a traceback
                return
            yield batch, part, tuple(vars(mark).values())


@dataclass(frozen=True)
class PartOrder:
    """Which part a rank's shares take a batch of, from step `taken` of the stream on."""

    shares: range  # of this rank
    each: int  # parts of a share
    taken: int

    def parts(self) -> Iterator[int]:
        """The part of each batch, in the order of the steps and then of the shares."""
        step = self.taken
        while True:
            yield from (share * self.each + step % self.each for share in self.shares)
            step += 1

    def taken_of(self, part: int) -> int:
        """How many batches of a part are used before this step."""
        return max(0, -(-(self.taken - part % self.each) // self.each))


@dataclass
class StreamRecord:
    """What a checkpoint holds of a stream."""

    parts: int
    each: int  # parts of a share
    batch_size: int | None
    shuffle: int
    taken: int = 0  # steps of the stream
    marks: list[Mark | None] = field(default_factory=list)  # by part; None: not used yet, or known to another rank only

    def snapshot(self) -> StreamRecord:
        """A copy that does not change."""
        return replace(self, marks=list(self.marks))

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StreamRecord:
        """From what a checkpoint has."""
        marks = [None if mark is None else Mark(**mark) for mark in plain["marks"]]
        return cls(**{**plain, "marks": marks})


@dataclass(frozen=True)
class StreamOptions:
    """What a function has asked run.stream(...) for."""

    source: Any
    batch_size: int | None
    shuffle: int
    collate: Callable[[list[Any]], Any] | None
    workers: int
    pin_memory: bool = True

    @property
    def own_workers(self) -> int:
        """How many processes of ours read; a DataLoader has its own."""
        return 0 if isinstance(self.source, DataLoader) else self.workers

    def check(self) -> None:
        """Raise ConfigError for a source that cannot be a stream."""
        source = self.source
        if isinstance(source, Iterator) and not hasattr(source, "load_state_dict"):
            raise ConfigError(
                f"run.stream(...): a {type(source).__name__} can be iterated only once; give the function that makes "
                "it, of the part and the number of parts: run.stream(lambda part, parts: samples(), ...)"
            )
        if isinstance(source, DataLoader):
            if self.batch_size is not None:
                raise ConfigError("run.stream(...): a DataLoader gives batches already; leave batch_size out")
            if isinstance(source.sampler, torch.utils.data.RandomSampler) and not hasattr(source, "state_dict"):
                raise ConfigError("run.stream(...): its order is random; write run.loader(dataset, batch_size)")

    def record(self, total: int, size: int, before: StreamRecord | None) -> StreamRecord:
        """The record of a stream in `total` shares on `size` ranks: `before`, if there is one. Raises ConfigError if it
        does not fit."""
        if total % size:
            raise ConfigError(
                f"run.stream(...): this run's streams are read in {total} shares, which {size} ranks cannot divide; "
                f"resume it on a number of ranks that divides {total}"
            )
        if self.batch_size is not None and (self.batch_size < 1 or self.batch_size % total):
            raise ConfigError(f"run.stream(batch_size={self.batch_size}): not divisible by {total} shares of the ranks")
        each = max(1, self.own_workers) if before is None else before.each
        fresh = StreamRecord(total * each, each, self.batch_size, self.shuffle, 0, [None] * (total * each))
        if before is not None and replace(before, taken=0, marks=fresh.marks) != fresh:
            raise ConfigError(
                f"run.stream(...): this run reads it in {before.parts} parts, batch_size={before.batch_size}, "
                f"shuffle={before.shuffle}, not in {fresh.parts}, {self.batch_size}, {self.shuffle}; leave these as "
                "they were"
            )
        return before or fresh


class StepStream:
    """This rank's batches of a stream for a custom training loop: one per step, or one for each of its shares."""

    def __init__(
        self,
        asked: StreamOptions,
        seed: int,
        device: torch.device,
        place: tuple[int, int],
        shares: int | None,
        record: StreamRecord | None,
    ) -> None:
        """`place` is the rank and the number of ranks, `shares` is train.shares, `record` what the checkpoint holds.
        Raises ConfigError."""
        rank, size = place
        asked.check()
        total = shares or (size if record is None else record.parts // record.each)
        self.record = asked.record(total, size, record).snapshot()
        batch_size, workers, each, here = asked.batch_size, asked.own_workers, self.record.each, total // size
        self._total, self._here, self._device, self._pin = total, here, device, asked.pin_memory
        self._merges = shares is None and here > 1
        if self._merges and batch_size is None:
            raise ConfigError(f"run.stream(...): its batches are made for {total} ranks; resume on {total} ranks")
        size_of_one = None if batch_size is None else batch_size // total
        self._spec = Spec(asked.source, self.record.parts, size_of_one, asked.shuffle, seed)
        self._collate: Callable[..., Any] = asked.collate or default_collate if batch_size is not None else _only
        self._order = PartOrder(range(rank * here, (rank + 1) * here), each, self.record.taken)
        self._workers = max(n for n in range(1, here * each + 1) if here * each % n == 0 and n <= max(1, workers))
        self._workers = 0 if workers == 0 else self._workers
        self._batch_size = batch_size
        self._loaded: Any = None  # the iteration over the parts
        self._iterating: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Raises ConfigError: a stream has no length."""
        raise ConfigError(
            "run.steps(run.stream(...)) needs count=N, the number of steps of an epoch: a stream has none"
        )

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigError: only run.steps(...) knows which batch is next."""
        raise ConfigError(
            "a stream of run.stream(...) is not iterated itself: `for batch in run.steps(stream, count=N)`"
        )

    @property
    def batch_size(self) -> int:
        """Samples per step over all ranks; 0: not known."""
        return self._batch_size or 0

    def samples(self, step: int) -> int:
        """The samples of a step over all ranks."""
        return self.batch_size

    def weights(self, step: int) -> list[float]:
        """The part of the samples of a step that each of this rank's shares has."""
        return [1 / self._total] * self._here

    @property
    def own(self) -> list[int]:
        """The parts that this rank reads."""
        return [share * self._order.each + number for share in self._order.shares for number in range(self._order.each)]

    def batches(self, first: int, steps: int) -> Iterator[Any]:
        """The batches of the next `steps` steps. They continue where the last ones have ended."""
        units = 1 if self._merges else self._here
        for number in range(units * steps):
            with preserved_generators():
                batch, marks = next(self._batches())
            for part, mark in marks:
                self.record.marks[part] = mark
            self.record.taken += number % units == units - 1
            yield batch

    def close(self) -> None:
        """End the worker processes."""
        end_workers(self._loaded)
        while _with_workers:
            end_workers(_with_workers.pop())

    def _batches(self) -> Iterator[tuple[Any, list[tuple[int, Mark]]]]:
        if self._iterating is None:
            self._iterating = iter(DeviceLoader(self._load(), self._device))
        return self._iterating

    def _load(self) -> Iterator[Any]:
        collate = None if self._merges else self._collate
        parts = _Parts(self._spec, self._order, list(self.record.marks), collate)
        note_ours(parts)
        pin_memory = self._pin and self._device.type == "cuda" and not self._merges
        loader = item_loader(parts, None, self._workers, pin_memory, torch.Generator().manual_seed(0))
        with held_back():
            self._loaded = iter(loader)
        while True:
            found = [next(self._loaded) for _ in range(self._here if self._merges else 1)]
            for each in found:
                if isinstance(each, ConfigError):
                    yield each
            marks = [(part, Mark(*mark)) for _, part, mark in found]
            batch = found[0][0]
            if self._merges:
                batch = self._collate([sample for samples, _, _ in found for sample in samples])
            yield batch, marks


def _only(samples: list[Any]) -> Any:
    (one,) = samples
    return default_convert(one)  # as a DataLoader without a batch size does


def _kind(source: Any) -> str:
    return getattr(source, "__qualname__", None) or type(source).__name__


def _copy(source: Any) -> Any:
    try:
        return copy.deepcopy(source)
    except Exception as error:
        raise ConfigError(
            f"run.stream(...): a {type(source).__name__} cannot be copied ({first_line(error)}); give the function "
            "that makes it, of the part and the number of parts: run.stream(lambda part, parts: ..., batch_size)"
        ) from error


@contextmanager
def _as_rank(source: Any, part: int, parts: int) -> Iterator[bool]:
    """In this block webdataset takes this part of the stream for a rank; other sources see nothing of it. Says whether
    the source splits its shards by rank then."""
    makes = callable(source) and not hasattr(source, "__iter__") and "webdataset" in sys.modules
    if not makes and not type(source).__module__.startswith("webdataset"):
        yield False
        return
    stages = getattr(source, "pipeline", [])
    splits = any(getattr(stage, "__name__", "") == "split_by_node" for stage in stages)
    seen = {"RANK": part, "WORLD_SIZE": parts} if splits else {"RANK": 0, "WORLD_SIZE": 1}
    seen |= {"WORKER": 0, "NUM_WORKERS": 1}
    before = {name: os.environ.get(name) for name in seen}
    os.environ.update({name: str(value) for name, value in seen.items()})
    try:
        yield splits
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


PICKLED = "torch:"


def _to_text(state: Any) -> str:
    """A state of a source as text: JSON, or what torch loads from an untrusted file."""
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return text
    except (TypeError, ValueError):
        pass
    data = io.BytesIO()
    torch.save(state, data)
    torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    return PICKLED + base64.b64encode(data.getvalue()).decode()


def _from_text(text: str) -> Any:
    if not text.startswith(PICKLED):
        return json.loads(text)
    return torch.load(io.BytesIO(base64.b64decode(text.removeprefix(PICKLED))), weights_only=True)


MOST_BYTES = 1 << 16  # of each array that are looked at


def _checksum(value: Any) -> int:
    """A number for a sample. Of objects other than tensors, arrays, images, containers and plain values only the type
    counts."""
    if isinstance(value, Mapping):
        parts: Iterable[Any] = [each for item in value.items() for each in item]
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, Tensor):
        array = value.detach().cpu().reshape(-1)[:MOST_BYTES].contiguous()
        return zlib.crc32(array.view(torch.uint8).numpy().tobytes(), zlib.crc32(str(value.shape).encode()))
    elif isinstance(value, numpy.ndarray):
        return zlib.crc32(value.reshape(-1)[:MOST_BYTES].tobytes(), zlib.crc32(str(value.shape).encode()))
    elif isinstance(value, bytes):
        return zlib.crc32(value[:MOST_BYTES])
    elif hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    else:
        plain = isinstance(value, (bool, int, float, complex, str, type(None)))
        return zlib.crc32((repr(value) if plain else type(value).__name__).encode())
    return zlib.crc32(repr([_checksum(part) for part in parts]).encode())


class Streams:
    """The streams that a function has made, by name, and what each rank knows of the parts that the others read.

    A save gathers the newest marks of all parts. A rescue has no one to ask. So every `EXCHANGE_STEPS` steps each rank
    leaves its marks at rank 0's store, and picks up those that the others left the time before: nothing waits, and no
    collective or device takes part. A run that is rescued reads the batches since then again, and discards them.
    """

    def __init__(self, group: Group, seed: int, shares: int | None) -> None:
        """`shares` is train.shares."""
        self._group, self._seed, self._shares = group, seed, shares
        self._streams: dict[str, StepStream] = {}
        self._exchanged = 0  # how often

    def make(self, name: str, saved: Mapping[str, Any], asked: StreamOptions) -> StepStream:
        """The stream of this name. One that was made before continues where it was; else `saved` has what the
        position says of the run's streams. Raises ConfigError."""
        record = None
        if earlier := self._streams.get(name):
            if not earlier.record.taken:
                raise ConfigError(f"run.stream(name={name!r}): there are two of this name; give each its own")
            earlier.close()
            record = earlier.record.snapshot()
        elif name in saved:
            found = saved[name]
            record = found.snapshot() if isinstance(found, StreamRecord) else StreamRecord.of(found)
        world = self._group.world
        place, seed = (world.rank, world.size), seed_of("stream", name, self._seed)
        self._streams[name] = made = StepStream(asked, seed, self._group.device, place, self._shares, record)
        return made

    def snapshot(self, before: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of the streams after this step. `before` is what it has held."""
        if not self._streams:
            return before
        return {**before, **{name: stream.record.snapshot() for name, stream in self._streams.items()}}

    def gather(self) -> None:
        """Let every rank know the marks of all. A collective."""
        if not self._streams or self._group.world.size == 1:
            return
        for text in self._group.gather_bytes(self._own().encode()):
            self._take(text)

    def exchange(self, step: int) -> None:
        """Every EXCHANGE_STEPS steps (counted from 1): leave this rank's marks for the others, and take those that they
        left the time before. All of them have done so by now, unless one is dead."""
        group = self._group
        if not self._streams or group.world.size == 1 or step % EXCHANGE_STEPS:
            return
        key = "streams/{}/{}".format  # of two in turn: a rank that is ahead overwrites none that is still needed
        if self._exchanged:
            for text in group.store.multi_get([key(self._exchanged % 2, rank) for rank in range(group.world.size)]):
                self._take(text)
        self._exchanged += 1
        group.store.set(key(self._exchanged % 2, group.world.rank), self._own())

    def close(self) -> None:
        """End all worker processes."""
        for stream in self._streams.values():
            stream.close()

    def _own(self) -> str:
        """The marks of the parts that this rank reads."""
        return json.dumps(
            {
                name: {part: asdict(mark) for part in stream.own if (mark := stream.record.marks[part]) is not None}
                for name, stream in self._streams.items()
            }
        )

    def _take(self, text: bytes) -> None:
        for name, marks in json.loads(text).items():
            stream = self._streams[name]
            for part, mark in marks.items():
                if int(part) not in stream.own:
                    stream.record.marks[int(part)] = Mark(**mark)
