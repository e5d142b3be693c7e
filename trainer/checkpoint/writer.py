"""CheckpointWriter: writes this rank's stripe of a checkpoint in the background while training continues.

All ranks hold the same state, so each writes one stripe of it. One save goes like this:

    1. In the training loop of every rank, `start` waits for the previous save, then copies this rank's stripe into a
       buffer that is used again by every save. Training waits for nothing else.
    2. A thread in every rank writes the stripe into its shard file, hashes it on the way, fsyncs it, and reports the
       file's size and SHA-256, or an error.
    3. Rank 0's thread waits for all reports. If no rank failed it writes the manifest and commits
       (`trainer.checkpoint.store`), otherwise it discards what was written.
    4. Rank 0's thread publishes the result and every rank's thread reads it, so all ranks agree whether the save
       succeeded. A failed save leaves no files behind.

If a rank dies before its report, the save is never committed: `wait` keeps returning False, and `close` still lets the
process end.

The threads communicate through the ranks' key-value store, with these keys under "save/":

    token           set once by rank 0: part of the folder's name, so that it is never shared with a writer that hangs
                    from an earlier attempt
    <n>/<rank>      the report of a rank on its part of the n-th save: a `_PartReport` as JSON
    <n>/result      empty if rank 0 committed the n-th save, else the error
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from trainer.checkpoint.buffers import reusable_buffer
from trainer.checkpoint.pack import ALIGNMENT, Packed, serialized_structure
from trainer.checkpoint.store import STRUCTURE, CheckpointError, CheckpointStore, FileEntry, Manifest, fsync, shard_name

# Bytes hashed and written at a time. `close` can interrupt a write after each of them, and `save_alone` needs a buffer
# of this size instead of one as large as the state.
WRITE_BYTES = 16 << 20
LONGEST_POLL_S = 0.1  # between two looks at the key-value store
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


@dataclass(frozen=True)
class _SaveJob:
    """One save, as `start` hands it to the thread."""

    number: int  # of the save within this attempt, from 1; the same on all ranks
    info: CheckpointInfo
    structure: Any  # of the state, see `trainer.checkpoint.pack`
    stripe: memoryview  # this rank's part of the state's bytes
    before_commit: Callable[[], None]
    keep_last: int
    keep_best: int


class CheckpointWriter:
    """Saves in the background. The training loop pays only for copying its rank's stripe into a reusable buffer."""

    def __init__(self, store: CheckpointStore, keys: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.error: CheckpointError | None = None  # why the last save that ended was not committed
        self.missing_ranks: list[int] = []  # on rank 0, while it waits: the ranks that have not reported yet
        self._store, self._rank, self._size, self._device = store, rank, size, device
        # A TCPStore client serves one caller at a time, so the thread needs its own connection.
        self._keys = dist.PrefixStore("save", keys.clone())
        if rank == 0:
            self._keys.set("token", secrets.token_hex(4))
        self._number = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._jobs: SimpleQueue[_SaveJob | None] = SimpleQueue()
        self._idle, self._closed = threading.Event(), threading.Event()
        self._idle.set()
        # One thread for all saves: on a busy machine a new thread takes long to start, and `start` would wait for it.
        self._thread = threading.Thread(target=self._serve, name="saver", daemon=True)
        self._thread.start()

    # In the training loop's thread

    def start(
        self, info: CheckpointInfo, state: Any, before_commit: Callable[[], None], keep_last: int, keep_best: int
    ) -> None:
        """Start to save `state`, which may change as soon as this returns. Waits for the previous save first.

        All ranks call this at the same step with the same state. `before_commit` runs on rank 0, in the writer's
        thread; if it raises, the save fails. After the commit older checkpoints are pruned, see
        `CheckpointStore.prune`.
        """
        self._idle.wait()
        # In a separate method, so that no tensor used for copying remains here, to be freed once the writer's thread
        # has work: freeing it would give that thread Python's lock for a long time.
        structure, stripe = self._copy_stripe(state)
        self._number += 1
        info = replace(info, metrics=dict(info.metrics))
        job = _SaveJob(self._number, info, structure, stripe, before_commit, keep_last, keep_best)
        self._idle.clear()
        self._jobs.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last save has ended, successfully or not (see `error`). False if it has not within
        `timeout_s`: a peer may be dead."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """End the thread and abandon a save in progress."""
        self._closed.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _copy_stripe(self, state: Any) -> tuple[Any, memoryview]:
        """The structure of `state`, and this rank's stripe of it, copied into the reusable buffer."""
        packed = Packed(state)
        start, stop = (_stripe_start(packed.bytes, rank, self._size) for rank in (self._rank, self._rank + 1))
        if self._buffer.numel() < stop - start:
            self._buffer = reusable_buffer(stop - start, self._device)
        stripe = self._buffer[: stop - start]
        packed.copy(start, stop, stripe)
        return packed.structure, stripe.numpy().data

    # In the writer's thread

    def _serve(self) -> None:
        """The thread's main loop."""
        while job := self._jobs.get():
            try:
                self._save(job)
            finally:
                self._idle.set()

    def _save(self, job: _SaveJob) -> None:
        """One save, from this rank's shard to the result that holds for all ranks."""
        error: CheckpointError | None
        try:
            tag = f"{self._await_key('token')}-{job.number}"
            self._write_part(job, tag)
            if self._rank == 0:
                self._keys.set(f"{job.number}/result", self._commit(job, tag))
            result = self._await_key(f"{job.number}/result")
            error = CheckpointError(result) if result else None
        except Exception as cause:  # such as a dist.DistError: the key-value store dies with rank 0
            error = self._store.write_error(job.info.step, _reason(cause))
        self.error = error

    def _write_part(self, job: _SaveJob, tag: str) -> None:
        """Write this rank's files, and report them or the error to rank 0."""
        report: _PartReport = {"files": {}, "error": None}
        try:
            writing = self._store.create_writing_folder(job.info.step, tag)
            if self._rank == 0:
                job.before_commit()
                report["files"][STRUCTURE] = _write_file(writing / STRUCTURE, [serialized_structure(job.structure)])
            name = shard_name(self._rank, self._size)
            report["files"][name] = _write_file(writing / name, self._chunks(job.stripe))
        except Exception as error:  # of any kind: rank 0 waits for this report
            report = {"files": {}, "error": _reason(error)}
        self._keys.set(f"{job.number}/{self._rank}", json.dumps(report))
        # This rank has read the result of the previous save, so rank 0 no longer needs its report on that one.
        self._keys.delete_key(f"{job.number - 1}/{self._rank}")

    def _commit(self, job: _SaveJob, tag: str) -> str:
        """On rank 0: wait for all ranks, then commit what they wrote. Returns the error, or an empty string."""
        step, writing = job.info.step, self._store.writing_folder(job.info.step, tag)
        try:
            reports = self._await_reports(job.number)
        except _WriterClosed:
            self._store.discard(writing)
            raise
        # Every rank has reported on this save, so it has read the result of the previous one.
        self._keys.delete_key(f"{job.number - 1}/result")
        errors = [report["error"] for report in reports if report["error"] is not None]
        if errors:
            self._store.discard(writing)
            return str(self._store.write_error(step, errors[0]))
        files = {name: entry for report in reports for name, entry in report["files"].items()}
        try:
            self._store.commit(writing, _manifest(job.info, self._size, files))
        except CheckpointError as error:
            return str(error)
        with suppress(OSError):  # what could not be deleted now is deleted after the next save
            self._store.prune(step, job.keep_last, job.keep_best)
        return ""

    def _await_reports(self, number: int) -> list[_PartReport]:
        """The reports of all ranks on a save, in rank order. When this returns no rank is writing any more."""
        self.missing_ranks = list(range(self._size))

        def all_reported() -> bool:
            self.missing_ranks = [rank for rank in self.missing_ranks if not self._keys.check([f"{number}/{rank}"])]
            return not self.missing_ranks

        self._poll_until(all_reported)
        return [json.loads(self._keys.get(f"{number}/{rank}")) for rank in range(self._size)]

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
            if self._closed.wait(min(LONGEST_POLL_S, 0.001 + (time.monotonic() - began) / 10)):
                raise _WriterClosed("the attempt is ending")

    def _chunks(self, stripe: memoryview) -> Iterator[memoryview]:
        for start in range(0, len(stripe), WRITE_BYTES):
            if self._closed.is_set():
                raise _WriterClosed("the attempt is ending")
            yield stripe[start : start + WRITE_BYTES]


class _WriterClosed(Exception):
    """The CheckpointWriter was closed while its thread waited or wrote."""


def save_alone(
    store: CheckpointStore,
    info: CheckpointInfo,
    state: Any,
    world_size: int,
    before_commit: Callable[[], None],
    tag: str,
) -> Manifest:
    """Save from this process alone and wait for the commit: one shard, no other rank, no key-value store.

    It streams, so it needs no second copy of the state in memory. `tag` as for `CheckpointStore.writing_folder`.
    Raises CheckpointError.
    """
    writing, name = store.writing_folder(info.step, tag), shard_name(0, 1)
    try:
        store.create_writing_folder(info.step, tag)
        before_commit()
        packed = Packed(state)
        files = {STRUCTURE: _write_file(writing / STRUCTURE, [serialized_structure(packed.structure)])}
        files[name] = _write_file(writing / name, _stream(packed))
    except Exception as error:  # of any kind: the caller only asks whether the state is saved
        store.discard(writing)
        raise store.write_error(info.step, _reason(error)) from error
    manifest = _manifest(info, world_size, files)
    store.commit(writing, manifest)
    return manifest


def _stream(packed: Packed) -> Iterator[memoryview]:
    """All bytes of a state, chunk by chunk. A chunk is valid until the next one is asked for."""
    buffer = torch.empty(min(WRITE_BYTES, packed.bytes), dtype=torch.uint8)
    for start in range(0, packed.bytes, WRITE_BYTES):
        chunk = buffer[: packed.bytes - start]
        packed.copy(start, start + chunk.numel(), chunk)
        yield chunk.numpy().data


def _manifest(info: CheckpointInfo, world_size: int, files: dict[str, FileEntry]) -> Manifest:
    metrics, numerics = dict(info.metrics), dict(info.numerics)
    return Manifest(info.step, info.epoch, info.samples, world_size, metrics, files, numerics, info.config)


def _write_file(path: Path, chunks: Iterable[memoryview]) -> FileEntry:
    """Write a new file so that it survives a power cut; returns its entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)  # its name too: on a shared disk this node may be the only one that knows of it yet
    return {"bytes": size, "sha256": digest.hexdigest()}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (OSError, _WriterClosed)) else f"{type(error).__name__}: {error}"


def _stripe_start(count: int, rank: int, size: int) -> int:
    """Where the stripe of `rank` begins in `count` bytes: a multiple of ALIGNMENT."""
    return count * rank // size // ALIGNMENT * ALIGNMENT
