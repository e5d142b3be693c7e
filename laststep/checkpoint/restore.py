"""The ranks of an attempt read the newest intact checkpoint together: each byte is read once, by one rank.

    1. Rank 0 names a candidate: the newest checkpoint with the right files in the right sizes, which takes no time to
       see. The other ranks' view of a shared disk may be out of date.
    2. Each rank reads whole files, its share of the bytes, into its memory, and compares them with their hashes. It
       does so in threads, and meanwhile imports the user's code and makes its Task. A function
       or a script makes its model later: it may ask at which step the run resumes.
    3. Every rank reports. What a rank could not read, or found damaged, rank 0 reads once more, its own files too: a
       fault of one node, or one that passes, must not set the run back. If rank 0 finds damage too, it names the next
       older candidate, and all ranks start again. If its disk only refuses to answer, the attempt fails.
    4. `SharedCheckpoint.load`: piece by piece, the rank that has read the bytes sends them to all ranks, and each
       copies them into its tensors. Rows of a sharded tensor that only the rank itself needs are not sent: with the
       same sharding as before, that is every shard. See `Transfer`.

So nothing is changed by a damaged checkpoint, and the bytes that are loaded are those whose hashes were compared. A
share is as large as the buffer of the first save (`laststep.checkpoint.writer`), which does not exist yet. Besides it a
rank needs two pieces of PIECE_BYTES: in its host's memory, or under NCCL in its device's.

A file has one hash, so one rank reads all of it: where a checkpoint has fewer files than there are ranks, some read
none. The files of a framework (`laststep.checkpoint.opaque`) are hashed only: the framework reads them itself, later.

The ranks communicate through their key-value store, with these keys under "restore/", where <n> counts candidates:

    <n>/candidate   the manifest of the candidate as JSON, empty when there is none (left)
    <n>/<rank>      why files of this rank's share cannot be used: an object in JSON, by the names of the files
    <n>/result      a `_Result` as JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from laststep.checkpoint.files import (
    ALIGNMENT,
    POLL_S,
    CheckpointError,
    CheckpointUnreadable,
    Patience,
    damaged_files,
    read_files,
    reading_steps,
)
from laststep.checkpoint.memory import HostMemory
from laststep.checkpoint.pack import Layout, Scatter, Target, aligned, empty_like, is_laid_out_as, tensors_of
from laststep.checkpoint.shards import Like, new_like, range_of
from laststep.checkpoint.store import STRUCTURE, CheckpointStore, Manifest
from laststep.ranks.disk import look_anew
from laststep.ranks.group import Group
from laststep.ranks.meeting import with_prefix
from laststep.ranks.process import start_thread

PIECE_BYTES = 32 << 20  # that are sent at a time; a multiple of the page size
# How long ranks wait for each other: a slow disk is not a fault, and the watchdog ends an attempt without progress.
PATIENCE = timedelta(hours=24)
READ_AGAIN_S = 10.0  # how long rank 0 tries to read what its disk refuses
CPU = torch.device("cpu")

State = dict[str, Any]


class _Result(TypedDict):
    """What rank 0 makes of the reports on a candidate."""

    damage: str | None
    read_by_rank_0: list[str]  # files that were another rank's share


class SharedCheckpoint:
    """An intact checkpoint in the memory of the ranks, each of which holds a share of its bytes."""

    def __init__(
        self, manifest: Manifest, group: Group, owners: Mapping[str, int], memory: dict[str, HostMemory]
    ) -> None:
        """`owners` has the rank that holds a file, `memory` the files that this rank holds. A collective."""
        self.manifest = manifest
        self._group, self._owners, self._memory = group, owners, memory
        self._layout = self._receive_structure()
        self.position: dict[str, Any] = self._layout.structure["position"]

    @property
    def names(self) -> list[str]:
        """The names in the state, without that of the position."""
        return [name for name in self._layout.structure if name != "position"]

    def load(self, live: Mapping[str, Any], advance: Callable[[], None], last: bool = True) -> State:
        """The state without its position. A collective; waits for ranks that come later.

        `live` has, by the names in the state, what the objects return from state_dict() that will load them. Where it
        has a tensor of the same layout, that tensor is filled and returned; any other tensor under these names is made
        on this rank's device, sharded if `live` has a `Like` in its place or above it. Tensors under other names, and
        those of one number, are made on the CPU. Calls `advance` after each piece. `last` frees the memory piece by
        piece: there is nothing left to load.
        """
        self._group.barrier(PATIENCE.total_seconds())
        state: State = {}
        targets: list[Target] = []
        world = self._group.world
        for name in self.names:
            part = self._layout.structure[name]
            alike = {id(stand_in): tensor for stand_in, tensor in _pairs(part, live.get(name))}
            make = partial(_tensor_for, alike, self._group.device if name in live else CPU)
            state[name], made = self._layout.make(part, make, world.rank)
            targets += made
        transfer = Transfer(self._layout, self.manifest, self._owners, targets, world.size)
        scatter = Scatter(targets)

        def write(name: str, segment: Segment, piece: Tensor) -> None:
            scatter.write(segment.start, piece)
            if last and name in self._memory:
                self._memory[name].release(segment.stored, segment.stop)

        self._copy_own(transfer, write, advance)
        for name, segments, piece in self._received(transfer):
            for segment, bytes_of_it in zip(segments, piece.split([segment.size for segment in segments])):
                write(name, segment, bytes_of_it)
            advance()
        if last:
            self._memory.clear()
        return state

    def _copy_own(
        self, transfer: Transfer, write: Callable[[str, Segment, Tensor], None], advance: Callable[[], None]
    ) -> None:
        """Copy what this rank has read and needs alone."""
        if not transfer.alone:
            return
        world, entries = self._group.world, self.manifest.files
        read = [0] * world.size
        for name in self.manifest.shards:
            read[self._owners[name]] += entries[name]["bytes"]
        steps = [count // PIECE_BYTES + 1 for count in read]
        left, copied = steps[world.rank], 0
        for _ in range(max(steps) - left):  # so all ranks that have copied their own are level
            advance()
        for name, segment in transfer.own(world.rank, PIECE_BYTES):
            write(name, segment, self._memory[name].tensor[segment.stored : segment.stop])
            copied += segment.size
            if steps[world.rank] - left < copied // PIECE_BYTES:
                left -= 1
                advance()
        for _ in range(left):
            advance()

    def _received(self, transfer: Transfer) -> Iterator[tuple[str, list[Segment], Tensor]]:
        """What all ranks receive, with its file, as its owner sends it. While one piece is used, the next one arrives
        in the other buffer."""
        device = self._group.collective_device
        buffers: list[Tensor] = []
        waiting: tuple[Callable[[], object], str, list[Segment], Tensor] | None = None
        for number, (name, segments) in enumerate(transfer.sent(PIECE_BYTES)):
            if not buffers:
                one = min(max(self.manifest.files[each]["bytes"] for each in self.manifest.shards), PIECE_BYTES)
                buffers = [torch.empty(one, dtype=torch.uint8, device=device) for _ in range(2)]
            piece = buffers[number % 2][: sum(segment.size for segment in segments)]
            if (mine := self._memory.get(name)) is not None:
                parts = [mine.tensor[segment.stored : segment.stop] for segment in segments]
                together = parts[0] if len(parts) == 1 else torch.cat(parts)
                piece = together if device.type == "cpu" else piece.copy_(together)
            arrived = self._group.start_broadcast(piece, self._owners[name])
            if waiting is not None:
                waiting[0]()
                yield waiting[1:]
            waiting = (arrived, name, segments, piece)
        if waiting is not None:
            waiting[0]()
            yield waiting[1:]

    def _receive_structure(self) -> Layout:
        """Rank 0 sends the structure to all ranks. Raises CheckpointError when it does not fit the shards."""
        raw = torch.empty(self.manifest.files[STRUCTURE]["bytes"], dtype=torch.uint8, device=CPU)
        if STRUCTURE in self._memory:
            raw.copy_(self._memory.pop(STRUCTURE).tensor)
        there = raw.to(self._group.collective_device)
        self._group.broadcast([there])
        try:
            layout = Layout.read(torch.load(io.BytesIO(there.cpu().numpy().data), weights_only=True), self.manifest)
        except Exception as error:  # a pickle of another version may raise anything
            raise CheckpointError(f"step {self.manifest.step}: could not be loaded: {error}") from error
        return layout


class NewestCheckpoint:
    """The newest intact checkpoint, on its way from the disk into the memory of all ranks.

    The reading begins at once, in threads: meanwhile the rank imports the user's code and makes its Task.
    `finish` waits for the end; leaving a `with` block before that abandons the reading.
    """

    def __init__(
        self,
        store: CheckpointStore,
        group: Group,
        candidates: Iterator[Manifest],
        warn: Callable[[str], None],
        advance: Callable[[int], None],
    ) -> None:
        """All ranks do this together, and `finish` too. Needs the group's key-value store, and no collective.

        Rank 0's `candidates` count, see `CheckpointStore.candidates`. Rank 0 calls `warn` with the reason for each
        damaged one that it skips. `advance`, which threads call, counts progress: a rank that is behind the others is
        one that they wait for.
        """
        self._store, self._group, self._candidates = store, group, candidates
        self._warn, self._advance = warn, advance
        self._keys, self._number = with_prefix("restore", group.store), 0
        self._reading = self._begin()

    def __enter__(self) -> NewestCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reading is not None:
            self._reading.abandon()

    @property
    def step(self) -> int:
        """The step of the checkpoint that is being read; 0 without one."""
        return 0 if self._reading is None else self._reading.manifest.step

    def _begin(self) -> _Reading | None:
        """Begin to read the next candidate; None: there is none."""
        if self._group.world.rank == 0:
            candidate = next(self._candidates, None)
            self._keys.set(f"{self._number}/candidate", "" if candidate is None else json.dumps(vars(candidate)))
        if not (text := _wait_for(self._keys, f"{self._number}/candidate")):
            return None
        return _Reading(self._store, Manifest(**json.loads(text)), self._group, self._advance)

    def finish(self) -> SharedCheckpoint | None:
        """The checkpoint; None when none is intact. A collective. Rank 0 raises DiskError if it cannot read one that
        may be intact, any rank CheckpointError if it lacks the memory."""
        keys, rank = self._keys, self._group.world.rank
        while (reading := self._reading) is not None:
            damage = {name: str(error) for name, error in reading.read_share().items()}
            keys.set(f"{self._number}/{rank}", json.dumps(damage))
            if rank == 0:
                reports = [_wait_for(keys, f"{self._number}/{each}") for each in range(self._group.world.size)]
                verdict = reading.judge([json.loads(report) for report in reports], self._warn)
                keys.set(f"{self._number}/result", json.dumps(verdict))
            result: _Result = json.loads(_wait_for(keys, f"{self._number}/result"))
            if result["damage"] is None:
                owners, self._reading = reading.owners | dict.fromkeys(result["read_by_rank_0"], 0), None
                return SharedCheckpoint(reading.manifest, self._group, owners, reading.memory)
            # So its memory is free before the next one is read; an error's traceback may hold the reading itself.
            reading.memory.clear()
            del reading
            self._reading, self._number = None, self._number + 1
            self._reading = self._begin()
        return None


class _Abandoned(Exception):
    """Nobody waits for this reading any more."""


class _Reading:
    """One rank's part in the reading of a candidate. It begins at once, in threads."""

    def __init__(
        self, store: CheckpointStore, manifest: Manifest, group: Group, advance: Callable[[int], None]
    ) -> None:
        self.manifest = manifest
        self.owners = shares(manifest, group.world.size)
        self.memory: dict[str, HostMemory] = {}
        self._store, self._group, self._count_progress = store, group, advance
        self._abandoned = threading.Event()
        steps = [self._steps(rank) for rank in range(group.world.size)]
        self._advance(max(steps) - steps[group.world.rank])  # so all ranks that have read their share are level
        self._share: Future[dict[str, CheckpointError]] = Future()
        start_thread("reader", self._read_own)

    def abandon(self) -> None:
        """Read no further: nobody waits for this any more."""
        self._abandoned.set()

    def _advance(self, count: int = 1) -> None:
        if self._abandoned.is_set():
            raise _Abandoned
        self._count_progress(count)

    def _read_own(self) -> None:
        try:
            own = [name for name, owner in self.owners.items() if owner == self._group.world.rank]
            self._share.set_result(self._read(own))
        except BaseException as error:
            self._share.set_exception(error)

    def read_share(self) -> dict[str, CheckpointError]:
        """Why some of this rank's files cannot be used, once all are read."""
        while not self._share.done():  # not in concurrent.futures: the watchdog names the line where a rank is stuck
            time.sleep(POLL_S)
        return self._share.result()

    def judge(self, reports: list[dict[str, str]], warn: Callable[[str], None]) -> _Result:
        """On rank 0: read again what a rank could not read, and say what becomes of the candidate."""
        doubtful = {name: error for report in reports for name, error in report.items()}
        errors = self._read_again(list(doubtful), warn) if doubtful else {}
        for name in doubtful.keys() - errors.keys():
            rank = self.owners[name]
            place = f"rank {rank} on {self._group.world.host_of(rank)}"
            warn(f"WARNING: step {self.manifest.step}: {doubtful[name]} on {place}; rank 0 can read it")
        if errors:
            damage = next(errors[name] for name in self.manifest.files if name in errors)
            self._store.skip(self.manifest.step, damage, warn)
            return {"damage": str(damage), "read_by_rank_0": []}
        return {"damage": None, "read_by_rank_0": list(doubtful)}

    def _read_again(self, names: list[str], warn: Callable[[str], None]) -> dict[str, CheckpointError]:
        """Read these files once more, and again as long as the disk refuses; returns why some cannot be used."""
        errors: dict[str, CheckpointError] = {}

        def read() -> None:
            nonlocal errors
            look_anew(self._store.path(self.manifest.step))
            errors = self._read(list(errors) or names)
            for error in errors.values():
                if isinstance(error, CheckpointUnreadable):
                    raise error

        with contextlib.suppress(CheckpointUnreadable):
            Patience(READ_AGAIN_S, warn).insist(read, self._advance)
        return errors

    def _read(self, names: list[str]) -> dict[str, CheckpointError]:
        opaque = {name: entry for name, entry in self.manifest.opaque.items() if name in names}
        entries = {name: self.manifest.files[name] for name in names if name not in opaque}
        try:
            memory = {name: HostMemory(entry["bytes"]) for name, entry in entries.items()}
        except OSError as error:  # the checkpoint is intact
            raise CheckpointError(f"step {self.manifest.step}: no memory to read it into: {error.strerror}") from error
        views = {name: each.tensor.numpy().data for name, each in memory.items()}
        folder = self._store.path(self.manifest.step)
        errors = read_files(folder, entries, views, self._advance)
        self.memory |= {name: each for name, each in memory.items() if name not in errors}
        return errors | damaged_files(folder, opaque, self._advance)

    def _steps(self, rank: int) -> int:
        return reading_steps({n: self.manifest.files[n] for n, owner in self.owners.items() if owner == rank})


def shares(manifest: Manifest, size: int) -> dict[str, int]:
    """The rank that reads each file; rank 0 the structure.

    A shard of the state is read by the ranks that hold it when the sharding is what it was. All else is cut into
    neighbouring files, about as many bytes for each rank.
    """
    owners, done = {STRUCTURE: 0}, 0
    names = [*manifest.shards, *manifest.opaque]
    total = sum(manifest.files[name]["bytes"] for name in names)
    for name in names:
        count = manifest.files[name]["bytes"]
        owners[name] = min((2 * done + count) * size // max(2 * total, 1), size - 1)  # by the middle of the file
        done += count
    shards = len(manifest.sharding) or size + 1
    if size % shards == 0:
        for shard, files in enumerate(manifest.shards_of_state):
            for number, name in enumerate(files):
                owners[name] = number * (size // shards) // len(files) * shards + shard
    return owners


def _wait_for(keys: dist.Store, key: str) -> str:
    keys.wait([key], PATIENCE)
    return keys.get(key).decode()


def _pairs(structure: Any, live: Any) -> Iterator[tuple[Tensor, Tensor | Like]]:
    """Each stand-in of a structure with the tensor in its place in `live`, where that has its layout."""
    if isinstance(live, Like):
        yield from ((stand_in, live) for stand_in in tensors_of(structure) if stand_in.shape == live.tensor.shape)
    elif isinstance(structure, Tensor):
        if isinstance(live, Tensor) and is_laid_out_as(live, structure):
            yield structure, live
    elif isinstance(structure, dict) and isinstance(live, dict):
        for name in structure.keys() & live.keys():
            yield from _pairs(structure[name], live[name])
    elif isinstance(structure, (list, tuple)) and isinstance(live, (list, tuple)):
        for one, other in zip(structure, live):
            yield from _pairs(one, other)


def _tensor_for(alike: Mapping[int, Tensor | Like], device: torch.device, stand_in: Tensor) -> Tensor:
    """The tensor to fill for a stand-in."""
    found = alike.get(id(stand_in))
    if isinstance(found, Like):
        return new_like(found.tensor, stand_in.dtype)
    return empty_like(stand_in, device if stand_in.dim() else CPU) if found is None else found


class Segment(NamedTuple):
    """A run of bytes in a file."""

    stored: int  # where it begins in the file
    start: int  # where it begins in the bytes of the full tensors
    size: int

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.stored + self.size


class Transfer:
    """The way of the bytes from the ranks that have read the files to those whose tensors are to be filled."""

    def __init__(
        self, layout: Layout, manifest: Manifest, owners: Mapping[str, int], targets: Sequence[Target], size: int
    ) -> None:
        """`owners` has the rank that has read a file, `targets` the tensors of one rank of `size`. Raises ValueError
        when they are sharded over different numbers of ranks."""
        self._layout, self._owners, self._size = layout, owners, size
        self._files = [[(name, manifest.files[name]["bytes"]) for name in names] for names in manifest.shards_of_state]
        self._sharded = {target.number for target in targets if target.shards}
        counts = {target.shards for target in targets if target.shards} or {1}
        if len(counts) > 1:
            raise ValueError(f"its tensors are cut into different numbers of shards: {sorted(counts)}")
        (self._shards,) = counts
        self.alone = self._shards == size  # whether each rank has rows of its own

    def own(self, rank: int, largest: int) -> Iterator[tuple[str, Segment]]:
        """What a rank has read and needs alone, with its file, in pieces of at most `largest` bytes."""
        for shard, files in enumerate(self._files):
            if self.alone and any(self._owners[name] == rank for name, _ in files):
                for name, segments in self._segments(shard, sent=False):
                    if self._owners[name] == rank:
                        yield from ((name, piece) for each in segments for (piece,) in _pieces([each], largest))

    def sent(self, largest: int) -> Iterator[tuple[str, list[Segment]]]:
        """What is sent to all ranks, with its file, in pieces of at most `largest` bytes together."""
        for shard, files in enumerate(self._files):
            if not all(self._stays(name, shard) for name, _ in files):
                for name, segments in self._segments(shard, sent=True):
                    yield from ((name, pieces) for pieces in _pieces(segments, largest))

    def _stays(self, name: str, shard: int) -> bool:
        """Whether a file's owner is known, without a look at each tensor, to be the only one that needs it: as after a
        restart with the same sharding."""
        same = self._layout.shards == self._shards and self._layout.sharded <= self._sharded
        return self._size == 1 or (self.alone and same and self._owners[name] == shard > 0)

    def _segments(self, shard: int, sent: bool) -> Iterator[tuple[str, list[Segment]]]:
        """What is sent, or not, of each file of a shard."""
        for name, parts in groupby(self._by_file(shard), key=lambda part: part[0]):
            found: list[Segment] = []
            for _, segment, needed_by in parts:
                stays = self._size == 1 or (self.alone and self._owners[name] == needed_by)
                if stays != sent:
                    _append(found, segment)
            yield name, found

    def _by_file(self, shard: int) -> Iterator[tuple[str, Segment, int | None]]:
        """The bytes of a shard in their order, by file, each segment with the live shard that needs it, or None."""
        files = iter(self._files[shard])
        name, first, end = "", 0, 0
        for (stored, start, left), needed_by in self._needed(shard):
            while left:
                while stored >= end:
                    name, size = next(files)
                    first, end = end, end + size
                count = min(left, end - stored)
                yield name, Segment(stored - first, start, count), needed_by
                stored, start, left = stored + count, start + count, left - count

    def _needed(self, shard: int) -> Iterator[tuple[Segment, int | None]]:
        """The bytes of a shard, with the live shard that needs them; None: every rank needs them."""
        stored = 0
        for number, begin, end in self._layout.held(shard):
            for start, stop, needed_by in self._parts(number, begin, end):
                place = stored + start - begin
                yield Segment(place, self._layout.offsets[number] + start, stop - start), needed_by
            stored += aligned(end - begin)

    def _parts(self, number: int, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """A range of the bytes of a tensor in parts, each with the live shard that needs it; None: all need it."""
        stand_in = self._layout.stand_ins[number]
        stop = end
        if end == stand_in.nbytes and begin % ALIGNMENT == 0:
            stop = aligned(end)  # with the padding neighbours form one run
        if number not in self._sharded:
            yield begin, stop, None
            return
        each = range_of(stand_in, 0, self._shards)[1]
        while begin < end:
            shard = begin // each
            until = (shard + 1) * each
            yield begin, (stop if until >= end else until), shard
            begin = until


def _append(segments: list[Segment], segment: Segment) -> None:
    """Add a segment; to the last one, if it continues that in the file and in the tensors."""
    if segments:
        last = segments[-1]
        if last.stop == segment.stored and last.start + last.size == segment.start:
            segments[-1] = last._replace(size=last.size + segment.size)
            return
    segments.append(segment)


def _pieces(segments: list[Segment], largest: int) -> Iterator[list[Segment]]:
    """Segments cut and put together, so that each list has as many bytes, the last one perhaps fewer."""
    piece: list[Segment] = []
    room = largest
    for stored, start, count in segments:
        done = 0
        while done < count:
            part = min(count - done, room)
            piece.append(Segment(stored + done, start + done, part))
            done, room = done + part, room - part
            if not room:
                yield piece
                piece, room = [], largest
    if piece:
        yield piece
