"""Saving beside the training: the loop pays the copy of its rank's stripe, a thread does the rest.

All ranks hold the same state, so each writes its stripe of it. The ranks' threads talk over the ranks' key-value
store, under "save/":

    token           rank 0's, once: so that a folder is never shared with a stuck writer of an earlier attempt
    <n>/<rank>      what became of a rank's part of the n-th save: each file's {"bytes", "sha256"}, or an "error"
    <n>/result      empty when rank 0 committed it, else why not

Only rank 0 waits for the reports, and commits. When a rank dies, the save that it owed a part of is never committed:
`wait` returns False, and `close` lets the process end. A save that failed left nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.pack import ALIGNMENT, Packed, dumped
from trainer.checkpoint.store import STRUCTURE, CheckpointError, CheckpointStore, Manifest, fsync, shard_name

CHUNK = 16 << 20  # bytes hashed and written at a time
LONGEST_PAUSE_S = 0.1  # between two looks at the key-value store
FAREWELL_S = 5.0


@dataclass(frozen=True)
class CheckpointInfo:
    """What is saved, as in `Manifest`."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    numerics: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Save:
    """One save, as its thread needs it."""

    number: int
    about: CheckpointInfo
    structure: Any
    stripe: memoryview
    before_commit: Callable[[], None]
    keep: tuple[int, int]


class CheckpointWriter:
    """Saves in the background: the caller pays the copy of its rank's stripe into a kept buffer, nothing more."""

    def __init__(self, store: CheckpointStore, keys: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.saved: CheckpointInfo | None = None  # the newest that was committed
        self.error: CheckpointError | None = None  # why the save that ended last was not committed
        self.missing: list[int] = []  # on rank 0, while it waits: ranks whose report has not come
        self._store, self._rank, self._size, self._device = store, rank, size, device
        # A client of TCPStore serves one caller at a time, so the thread needs a connection of its own.
        self._keys = dist.PrefixStore("save", keys.clone())
        if rank == 0:
            self._keys.set("token", secrets.token_hex(4))
        self._number = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._saves: SimpleQueue[_Save | None] = SimpleQueue()
        self._ended, self._closed = threading.Event(), threading.Event()
        self._ended.set()
        # Kept, since on a busy machine it takes long until a new thread runs, and `start` would have to wait for that.
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()

    def start(
        self, about: CheckpointInfo, state: Any, before_commit: Callable[[], None], keep: tuple[int, int]
    ) -> None:
        """Save `state`, which may change as soon as this returns. Waits first for the save before it.

        All ranks call it at the same step with the same state. `before_commit` is called on rank 0, in the writer's
        thread; when it raises, the save fails. `keep` is (keep_last, keep_best).
        """
        self._ended.wait()
        # No tensor of the copying is left here to be freed: that would hand Python's lock to the thread for long.
        structure, stripe = self._copied(state)
        self._number += 1
        about = replace(about, metrics=dict(about.metrics))
        save = _Save(self._number, about, structure, stripe, before_commit, keep)
        self._ended.clear()
        self._saves.put(save)

    def _copied(self, state: Any) -> tuple[Any, memoryview]:
        """The state's structure, and this rank's stripe of it, copied into the kept buffer."""
        packed = Packed(state)
        start, stop = (_boundary(packed.bytes, rank, self._size) for rank in (self._rank, self._rank + 1))
        if self._buffer.numel() < stop - start:
            self._buffer = _kept_buffer(stop - start, self._device)
        stripe = self._buffer[: stop - start]
        packed.copy(start, stop, stripe)
        return packed.structure, stripe.numpy().data

    def wait(self, timeout_s: float) -> bool:
        """Until the save started last has ended, well or not; False when it has not by then: a peer may be dead."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """End the thread, and with it a save under way."""
        self._closed.set()
        self._saves.put(None)
        self._thread.join(FAREWELL_S)

    def _work(self) -> None:
        """The thread."""
        while save := self._saves.get():
            try:
                self._run(save)
            finally:
                self._ended.set()

    def _run(self, save: _Save) -> None:
        """One save, in the thread."""
        error: CheckpointError | None
        try:
            tag = f"{self._await('token')}-{save.number}"
            self._report(save, tag)
            if self._rank == 0:
                self._keys.set(f"{save.number}/result", self._finish(save, tag))
            result = self._await(f"{save.number}/result")
            error = CheckpointError(result) if result else None
        except Exception as cause:  # such as a dist.DistError: the key-value store dies with rank 0
            error = self._store.failure(save.about.step, _told(cause))
        if error is None:
            self.saved = save.about
        self.error = error

    def _report(self, save: _Save, tag: str) -> None:
        """Write this rank's part and tell rank 0 what became of it."""
        report: dict[str, Any] = {}
        try:
            writing = self._store.begin(save.about.step, tag)
            if self._rank == 0:
                save.before_commit()
                report[STRUCTURE] = _write_file(writing / STRUCTURE, [dumped(save.structure)])
            name = shard_name(self._rank, self._size)
            report[name] = _write_file(writing / name, self._chunks(save.stripe))
        except Exception as error:  # whatever it is: rank 0 waits for this report
            report = {"error": _told(error)}
        self._keys.set(f"{save.number}/{self._rank}", json.dumps(report))
        # This rank has heard how the save before this one ended, so rank 0 has read its report of that.
        self._keys.delete_key(f"{save.number - 1}/{self._rank}")

    def _finish(self, save: _Save, tag: str) -> str:
        """On rank 0: commit what all ranks wrote. Returns what went wrong, or nothing."""
        about, writing = save.about, self._store.writing(save.about.step, tag)
        try:
            reports = self._reports(save.number)
        except _GivenUp:
            self._store.discard(writing)
            raise
        # Every rank has reported of this save, so it has read the result of the one before.
        self._keys.delete_key(f"{save.number - 1}/result")
        problems = [report["error"] for report in reports if "error" in report]
        if problems:
            self._store.discard(writing)
            return str(self._store.failure(about.step, problems[0]))
        files = {name: said for report in reports for name, said in report.items()}
        try:
            self._store.commit(writing, _manifest(about, self._size, files))
        except CheckpointError as error:
            return str(error)
        with suppress(OSError):  # what should have been deleted is there at the next save too
            self._store.prune(about.step, *save.keep)
        return ""

    def _reports(self, number: int) -> list[dict[str, Any]]:
        """What became of each rank's part, in rank order. Waits for all: no rank writes any more when it returns."""
        self.missing = list(range(self._size))

        def all_came() -> bool:
            self.missing = [rank for rank in self.missing if not self._keys.check([f"{number}/{rank}"])]
            return not self.missing

        self._until(all_came)
        return [json.loads(self._keys.get(f"{number}/{rank}")) for rank in range(self._size)]

    def _await(self, key: str) -> str:
        """The value of a key, once it has one."""
        self._until(lambda: self._keys.check([key]))
        return self._keys.get(key).decode()

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait for something, looking less often the longer it takes. Raises _GivenUp.

        The key-value store's own `wait` sleeps in C: a thread that wakes there while Python shuts down aborts the
        process. And it cannot be called off but by a time-out, which torch prints warnings about.
        """
        began = time.monotonic()
        while not done():
            if self._closed.wait(min(LONGEST_PAUSE_S, 0.001 + (time.monotonic() - began) / 10)):
                raise _GivenUp("the attempt ends")

    def _chunks(self, stripe: memoryview) -> Iterator[memoryview]:
        for start in range(0, len(stripe), CHUNK):
            if self._closed.is_set():
                raise _GivenUp("the attempt ends")
            yield stripe[start : start + CHUNK]


class _GivenUp(Exception):
    """The Saver was closed while it waited or wrote."""


def save_alone(
    store: CheckpointStore,
    about: CheckpointInfo,
    state: Any,
    world_size: int,
    before_commit: Callable[[], None],
    tag: str,
) -> Manifest:
    """Save from this process alone, and wait for it: as one shard, without the other ranks or their key-value store.

    It streams, so the memory holds no second copy of the state. `tag` as for `CheckpointStore.writing`. Raises
    CheckpointError.
    """
    writing, name = store.writing(about.step, tag), shard_name(0, 1)
    try:
        store.begin(about.step, tag)
        before_commit()
        packed = Packed(state)
        files = {STRUCTURE: _write_file(writing / STRUCTURE, [dumped(packed.structure)])}
        files[name] = _write_file(writing / name, _stream(packed))
    except Exception as error:  # whatever it is, the caller asks only whether it is saved
        store.discard(writing)
        raise store.failure(about.step, _told(error)) from error
    manifest = _manifest(about, world_size, files)
    store.commit(writing, manifest)
    return manifest


def _stream(packed: Packed) -> Iterator[memoryview]:
    """The run of bytes, chunk by chunk; each chunk lives until the next is asked for."""
    buffer = torch.empty(min(CHUNK, packed.bytes), dtype=torch.uint8)
    for start in range(0, packed.bytes, CHUNK):
        chunk = buffer[: packed.bytes - start]
        packed.copy(start, start + chunk.numel(), chunk)
        yield chunk.numpy().data


def _manifest(about: CheckpointInfo, world_size: int, files: dict[str, dict[str, Any]]) -> Manifest:
    metrics, numerics = dict(about.metrics), dict(about.numerics)
    return Manifest(about.step, about.epoch, about.samples, world_size, metrics, files, numerics)


def _write_file(path: Path, chunks: Iterable[memoryview]) -> dict[str, Any]:
    """Write a new file so that it survives a power cut; returns what the manifest says of it."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)  # its name too, should this node be the only one that knows of it
    return {"bytes": size, "sha256": digest.hexdigest()}


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, (OSError, _GivenUp)) else f"{type(error).__name__}: {error}"


def _boundary(count: int, rank: int, size: int) -> int:
    """Where the stripe of `rank` begins in a run of `count` bytes, a multiple of ALIGNMENT itself."""
    return count * rank // size // ALIGNMENT * ALIGNMENT


def _kept_buffer(count: int, device: torch.device) -> Tensor:
    """Memory for the stripe that every later save copies into: no page of it is new to the system then.

    On the CPU it is kept from processes forked meanwhile, such as loader workers. Otherwise each page would have to be
    copied for them at the next save, which makes that save ten times as slow.
    """
    if device.type == "cuda":
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
