"""CheckpointWriter: writes this rank's stripe of a checkpoint in the background while training continues.

The ranks that hold the same shard of the state write one stripe of it each; of a small one only some do, see
`own_files`. A state that is not sharded has one shard, which all ranks hold. One save goes like this:

    1. In the training loop of every rank, `start` waits for the previous save, then copies this rank's stripe into a
       buffer that is used again by every save. Training waits for nothing else. The thread of step 2 has made the
       buffer, see `prepare`.
    2. A thread in every rank writes the stripe into its files, a large one into several at once, hashes them on the
       way, fsyncs them, and reports their sizes and SHA-256s, or an error.
       Files that a framework has written into the folder are hashed likewise (`laststep.checkpoint.opaque`).
    3. Rank 0's thread waits for all reports and reads them in one round trip. If no rank failed it writes the manifest
       and commits (`laststep.checkpoint.store`), otherwise it discards what was written.
    4. Rank 0's thread publishes the result and every rank's thread reads it, so all ranks agree whether the save
       succeeded. A failed save leaves no files behind.

If a rank dies before its report, the save is never committed: `wait` keeps returning False, and `close` still lets the
process end.

The threads communicate through the ranks' key-value store, with these keys under "save/":

    token           set once by rank 0: part of the folder's name, so that it is never shared with a writer that hangs
                    from an earlier attempt
    <n>/<rank>      the report of a rank on its part of the n-th save: a `_PartReport` as JSON
    <n>/result      what came of the n-th save: a `_Result` as JSON

If the disk is full, or the user's quota is used up, rank 0 deletes older checkpoints before it publishes that result,
see `CheckpointStore.make_room`: a retry then has their room.
"""

from __future__ import annotations

import errno
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from laststep.checkpoint.files import BLOCK, CheckpointError, FileEntry, at_once, file_count, own_files, write_hashed
from laststep.checkpoint.links import Links
from laststep.checkpoint.memory import reusable_buffer
from laststep.checkpoint.opaque import Share
from laststep.checkpoint.pack import Packed, has_fixed, serialized_structure
from laststep.checkpoint.store import (
    BY_LOSS,
    FIXED_FORMAT,
    FORMAT,
    SHARDED_FORMAT,
    STRUCTURE,
    CheckpointStore,
    Manifest,
    shard_name,
    syncs_names,
)
from laststep.config.keep import NO_ANCHORS, Anchors, Ranking
from laststep.ranks.meeting import with_prefix
from laststep.ranks.world import ShardPlace
from laststep.rundir import fsync

# Bytes hashed and written at a time. `close` can interrupt a write after each of them, and a `FrozenState` needs a
# buffer of this size instead of one as large as the state.
WRITE_BYTES = 16 << 20
LONGEST_POLL_S = 0.1  # between two looks at the key-value store
MISSING_S = 1.0  # after this rank 0 looks which reports are missing, with one round trip per rank, and again each time
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CheckpointInfo:
    """What the manifest says about a checkpoint; see `Manifest` for the fields."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    numerics: Mapping[str, str | int] = field(default_factory=dict)
    config: str = ""


class _PartReport(TypedDict):
    """What one rank reports about its part of a save: the files that it wrote, or the reason why it could not."""

    files: dict[str, FileEntry]
    error: str | None
    full: bool  # whether the reason is that the disk has no room, or the user's quota none


class _Result(TypedDict):
    """What came of a save: committed, or why it was not."""

    error: str | None
    freed: int  # bytes, by deleting older checkpoints


@dataclass(frozen=True)
class _SaveJob:
    """One save, as `start` hands it to the thread."""

    number: int  # of the save within this attempt, from 1; the same on all ranks
    info: CheckpointInfo
    part: Part  # of the state, that this rank writes
    opaque: Share | None  # of the files that a framework has written
    before_commit: Callable[[], None]
    keep_last: int
    keep_best: int
    ranking: Ranking
    anchors: Anchors


class CheckpointWriter:
    """Saves in the background. The training loop pays only for copying its rank's stripe into a reusable buffer."""

    def __init__(
        self,
        store: CheckpointStore,
        keys: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        place: ShardPlace | None = None,
    ) -> None:
        """By default this rank holds all of the state."""
        self.error: CheckpointError | None = None  # why the last save that ended was not committed
        self.freed = 0  # bytes that older checkpoints had, which were deleted because that save found the disk full
        self.missing_ranks: list[int] = []  # on rank 0, while it waits: the ranks that have not reported yet
        self._store, self._rank, self._size = store, rank, size
        self.place = place or ShardPlace(0, 1, rank, size)  # which shard of the state this rank holds
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)  # that every save copies this rank's stripe into
        # A TCPStore client serves one caller at a time, so the thread needs its own connection.
        self._keys = with_prefix("save", keys.clone())
        if rank == 0:
            self._keys.set("token", secrets.token_hex(4))
        self._token = ""
        self._number = 0
        self.links = Links(store)
        self._jobs: SimpleQueue[_SaveJob | int | None] = SimpleQueue()
        self._idle, self._closed = threading.Event(), threading.Event()
        self._idle.set()
        # One thread for all saves: on a busy machine a new thread takes long to start, and `start` would wait for it.
        self._thread = threading.Thread(target=self._serve, name="saver", daemon=True)
        self._thread.start()

    # In the training loop's thread

    @property
    def buffer_bytes(self) -> int:
        """The size of the buffer that stripes are copied into."""
        return self._buffer.numel()

    def prepare(self, state: Any) -> None:
        """Have the thread make the buffer for this rank's stripe of `state`, or of another state of that size, so that
        the first save need not: one of 12 GB, which is pinned for a GPU, takes seconds. A save that comes earlier waits
        for it."""
        packed = Packed(state, self.place)
        count = sum(_in_blocks(stop - start) for _, start, stop, _ in self._stripes(packed)[1])
        if self._idle.is_set() and count:
            self._idle.clear()
            self._jobs.put(count)

    def next_folder(self, step: int) -> Path:
        """The folder of the checkpoint of `step` that the next `start` will begin to write: another may write there
        first. Waits for the previous save. Raises OSError."""
        self._idle.wait()  # from here on the thread does not use the keys
        self._token = self._token or self._await_key("token")
        return self._store.create_writing_folder(step, f"{self._token}-{self._number + 1}")

    def start(
        self,
        info: CheckpointInfo,
        state: Any,
        before_commit: Callable[[], None],
        keep_last: int,
        keep_best: int,
        ranking: Ranking = BY_LOSS,
        opaque: Share | None = None,
        anchors: Anchors = NO_ANCHORS,
    ) -> None:
        """Start to save `state`, which may change as soon as this returns. Waits for the previous save first.

        All ranks call this at the same step with the same state, or each with its shard of it. `before_commit` runs on
        rank 0, in the writer's thread; if it raises, the save fails. After the commit older checkpoints are pruned, see
        `CheckpointStore.prune`. `opaque` is this rank's share of the files in `next_folder`.
        """
        self._idle.wait()
        # In a separate method, so that no tensor used for copying remains here, to be freed once the writer's thread
        # has work: freeing it would give that thread Python's lock for a long time.
        part = self._copy(state)
        self._number += 1
        info = replace(info, metrics=dict(info.metrics))
        job = _SaveJob(self._number, info, part, opaque, before_commit, keep_last, keep_best, ranking, anchors)
        self._idle.clear()
        self._jobs.put(job)

    def _stripes(self, packed: Packed) -> tuple[int, list[tuple[int, int, int, bool]]]:
        """Into how many files each shard is cut; and what this rank writes of its own: the number of a file, where its
        bytes begin and end in those of the shard, and whether they are of fixed tensors."""
        runs = [(*count, fixed) for count, fixed in ((packed.changing, False), (packed.fixed, True)) if count[1]]
        files, begin, own = 0, 0, []
        for count, most, fixed in runs or [(0, 0, False)]:
            for file in own_files(most, self.place.replica, self.place.replicas, self.place.shards):
                start, stop = file.bounds(count)
                own.append((files + file.number, begin + start, begin + stop, fixed))
            files, begin = files + file_count(most, self.place.replicas, self.place.shards), begin + count
        return files, own

    def _copy(self, state: Any) -> Part:
        """This rank's part of `state`, valid until the next call."""
        place, packed = self.place, Packed(state, self.place)
        files, stripes = self._stripes(packed)
        sharding = [files] * place.shards if place.shards > 1 else []
        self._reserve(sum(_in_blocks(stop - start) for _, start, stop, _ in stripes))
        parts, copied = list[FilePart](), 0
        for number, start, stop, fixed in stripes:
            data = self._buffer[copied : copied + stop - start]
            packed.copy(start, stop, data)
            name = shard_name(place.shard * files + number, place.shards * files)
            parts.append(FilePart(name, data.numpy().data, fixed))
            copied += _in_blocks(stop - start)
        return Part(packed.structure, sharding, parts)

    def _reserve(self, count: int) -> None:
        if self._buffer.numel() < count:
            self._buffer = reusable_buffer(count, self._device)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last save has ended, successfully or not (see `error`). False if it has not within
        `timeout_s`: a peer may be dead."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """End the thread and abandon a save in progress."""
        self._closed.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    # In the writer's thread

    def _serve(self) -> None:
        """The thread's main loop."""
        while job := self._jobs.get():
            try:
                if isinstance(job, int):
                    with suppress(Exception):  # then the first save tries it, and reports the error
                        self._reserve(job)
                else:
                    self._save(job)
            finally:
                self._idle.set()

    def _save(self, job: _SaveJob) -> None:
        """One save, from this rank's shard to the result that holds for all ranks."""
        error, freed = None, 0
        try:
            self._token = self._token or self._await_key("token")
            tag = f"{self._token}-{job.number}"
            files = self._write_part(job, tag)
            if self._rank == 0:
                self._keys.set(f"{job.number}/result", json.dumps(self._commit(job, tag)))
            result: _Result = json.loads(self._await_key(f"{job.number}/result"))
            error = CheckpointError(result["error"]) if result["error"] is not None else None
            freed = result["freed"]
            if error is None:
                self.links.note(job.info.step, {file.name: files[file.name] for file in job.part.files if file.fixed})
        except Exception as cause:  # such as a dist.DistError: the key-value store dies with rank 0
            error = self._store.write_error(job.info.step, reason_of(cause))
        self.error, self.freed = error, freed

    def _write_part(self, job: _SaveJob, tag: str) -> dict[str, FileEntry]:
        """Write this rank's files, and report them or the error to rank 0. Returns the files."""
        report: _PartReport = {"files": {}, "error": None, "full": False}
        try:
            writing = self._store.writing_folder(job.info.step, tag)
            if self._rank == 0 or job.part.files:
                self._store.create_writing_folder(job.info.step, tag)
            if self._rank == 0:
                job.before_commit()
                report["files"][STRUCTURE] = write_file(writing / STRUCTURE, [serialized_structure(job.part.structure)])
            report["files"] |= self._write_files(job, writing)
            if job.opaque is not None:
                report["files"] |= job.opaque.entries(writing, self._check_open)
        except Exception as error:  # of any kind: rank 0 waits for this report
            report = {"files": {}, "error": reason_of(error), "full": _is_full(error)}
        self._keys.set(f"{job.number}/{self._rank}", json.dumps(report))
        # This rank has read the result of the previous save, so rank 0 no longer needs its report on that one.
        self._keys.delete_key(f"{job.number - 1}/{self._rank}")
        return report["files"]

    def _write_files(self, job: _SaveJob, writing: Path) -> dict[str, FileEntry]:
        """Write this rank's files of the state, all at once, into the folder `writing`. Raises OSError."""
        failed: list[BaseException] = []

        def write(file: FilePart) -> FileEntry:
            def chunks() -> Iterator[memoryview]:
                for chunk in self._chunks(file.data):
                    if failed:
                        raise failed[0]
                    yield chunk

            path = writing / file.name
            try:
                linked = self.links.take(job.info.step, path, chunks()) if file.fixed else None
                return linked or write_file(path, chunks(), name_too=False)
            except BaseException as error:
                failed.append(error)
                raise

        entries = at_once([partial(write, file) for file in job.part.files])
        if entries:
            sync_names(writing)
        return dict(zip((file.name for file in job.part.files), entries))

    def _commit(self, job: _SaveJob, tag: str) -> _Result:
        """On rank 0: wait for all ranks, then commit what they wrote. Any error is a result: the others wait for one.
        On a full disk room is made for another try."""
        step, writing = job.info.step, self._store.writing_folder(job.info.step, tag)
        try:
            reports = self._await_reports(job.number)
            # Every rank has reported on this save, so it has read the result of the previous one.
            self._keys.delete_key(f"{job.number - 1}/result")
            errors = [report["error"] for report in reports if report["error"] is not None]
            if not errors:
                files = {name: entry for report in reports for name, entry in report["files"].items()}
                self._store.commit(writing, make_manifest(job.info, self._size, files, job.part))
                with suppress(OSError):  # what could not be deleted now is deleted after the next save
                    self._store.prune(step, job.keep_last, job.keep_best, job.ranking, job.anchors)
                return {"error": None, "freed": 0}
            error, full = str(self._store.write_error(step, errors[0])), any(report["full"] for report in reports)
        except _WriterClosed:  # those of the others are closed, too
            self._store.discard(writing)
            raise
        except CheckpointError as refused:  # by the disk, in the commit
            error, full = str(refused), _is_full(refused.__cause__)
        except Exception as cause:
            error, full = str(self._store.write_error(step, reason_of(cause))), _is_full(cause)
        self._store.discard(writing)
        freed = 0
        if full:
            with suppress(OSError):
                freed = self._store.make_room(job.keep_best, job.ranking, job.anchors)
        return {"error": error, "freed": freed}

    def _await_reports(self, number: int) -> list[_PartReport]:
        """The reports of all ranks on a save, in rank order. When this returns no rank is writing any more."""
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        next_look = time.monotonic() + MISSING_S

        def all_reported() -> bool:
            nonlocal next_look
            if self._keys.check(keys):
                return True
            if time.monotonic() > next_look:
                self.missing_ranks = [rank for rank, key in enumerate(keys) if not self._keys.check([key])]
                next_look = time.monotonic() + MISSING_S
            return False

        try:
            self._poll_until(all_reported)
        finally:
            self.missing_ranks = []
        return [json.loads(report) for report in self._keys.multi_get(keys)]

    def _await_key(self, key: str) -> str:
        """The value of a key, as soon as it has one."""
        self._poll_until(lambda: self._keys.check([key]))
        return self._keys.get(key).decode()

    def _poll_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, polling less often the longer it takes. Raises _WriterClosed.

        The key-value store's own `wait` sleeps in C, where only a timeout can end it, about which torch prints
        warnings; and a thread that wakes up there while Python shuts down aborts the process.
        """
        began = time.monotonic()
        while not condition():
            if self._closed.wait(min(LONGEST_POLL_S, 0.002 + (time.monotonic() - began) / 5)):
                raise _WriterClosed("the attempt is ending")

    def _chunks(self, stripe: memoryview) -> Iterator[memoryview]:
        for start in range(0, len(stripe), WRITE_BYTES):
            self._check_open()
            yield stripe[start : start + WRITE_BYTES]

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise _WriterClosed("the attempt is ending")


def _in_blocks(count: int) -> int:
    """`count` bytes rounded up to whole blocks: each file's bytes begin where they may go past the page cache."""
    return -(-count // BLOCK) * BLOCK


def _is_full(error: BaseException | None) -> bool:
    """Whether a write failed because the disk has no room, or the user's quota none."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class _WriterClosed(OSError):
    """The CheckpointWriter was closed while its thread waited or wrote."""


class FilePart(NamedTuple):
    """A file that a rank writes."""

    name: str
    data: memoryview
    fixed: bool  # whether it has only tensors that training does not change, see `laststep.checkpoint.links`


class Part(NamedTuple):
    """What a rank writes of the state."""

    structure: Any  # of the whole state, see `laststep.checkpoint.pack`
    sharding: list[int]  # see `Manifest`
    files: Sequence[FilePart] = ()


def make_manifest(info: CheckpointInfo, world_size: int, files: dict[str, FileEntry], part: Part) -> Manifest:
    """The manifest of a checkpoint with these files, which this many ranks trained."""
    metrics, numerics = dict(info.metrics), dict(info.numerics)
    return Manifest(
        *(info.step, info.epoch, info.samples, world_size, metrics, files, numerics, info.config),
        format=FIXED_FORMAT if has_fixed(part.structure) else SHARDED_FORMAT if part.sharding else FORMAT,
        sharding=part.sharding,
    )


def write_file(
    path: Path, chunks: Iterable[memoryview], sync_bytes: int | None = None, name_too: bool = True
) -> FileEntry:
    """Write a new file so that it survives a power cut, see `write_hashed`; returns its entry in the manifest. Without
    `name_too` its name may not: `sync_names` sees to that, for several files."""
    entry = write_hashed(path, chunks, sync_bytes)
    if name_too:
        sync_names(path.parent)
    return entry


def sync_names(folder: Path) -> None:
    """Have the names of new files, which are synced, survive a power cut. Raises OSError."""
    if not syncs_names(folder):
        fsync(folder)  # on a shared disk this node may be the only one that knows of them yet


def reason_of(error: Exception) -> str:
    """The error in one line, for the message that a checkpoint could not be written."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
