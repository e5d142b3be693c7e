"""Saving beside the training: the loop pays the copy of its rank's stripe, a thread does the rest.

All ranks hold the same state, so each writes its stripe of it. The threads of one save talk over the ranks' key-value
store, under "save/":

    token           rank 0's, once: so that a folder is never shared with a stuck writer of an earlier attempt
    <n>/<rank>      what became of a rank's shard of the n-th save: {"bytes", "sha256"} or {"error"}
    <n>/result      empty when rank 0 committed it, else why not

Nobody but rank 0 waits for the reports, and only it commits. When a rank dies, the save it owed a shard is never
committed; `wait` then returns False, and the process may end.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.state.pack import ALIGNMENT, Packed
from trainer.state.store import STRUCTURE, CheckpointError, CheckpointStore, Manifest, fsync, shard_name

CHUNK = 16 << 20  # bytes hashed and written at a time
LONGEST_PAUSE_S = 0.1  # between two looks at the key-value store
FAREWELL_S = 5.0


@dataclass(frozen=True)
class About:
    """What is saved. `metrics` are those of the validation that it followed, if any."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Save:
    """One save, as its thread needs it."""

    number: int
    about: About
    structure: Any
    stripe: memoryview
    before_commit: Callable[[], None]
    keep: tuple[int, int]


class Saver:
    """Saves in the background: the caller pays the copy of its rank's stripe into a kept buffer, nothing more."""

    def __init__(self, store: CheckpointStore, keys: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.saved: About | None = None  # the newest that was committed
        self.error: CheckpointError | None = None  # why the save that ended last was not committed
        self.missing: list[int] = []  # on rank 0, while it waits: ranks whose report has not come
        self._store, self._rank, self._size, self._device = store, rank, size, device
        # A client of TCPStore serves one caller at a time, so the thread needs a connection of its own.
        self._keys = dist.PrefixStore("save", keys.clone())
        if rank == 0:
            self._keys.set("token", secrets.token_hex(4))
        self._number = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self, about: About, state: Any, before_commit: Callable[[], None], keep: tuple[int, int]) -> None:
        """Save `state`, which may change as soon as this returns. Waits first for the save before it.

        All ranks call it at the same step with the same state. `before_commit` is called on rank 0, in the writer's
        thread; when it raises, the save fails. `keep` is (keep_last, keep_best).
        """
        self._join(None)
        packed = Packed(state)
        start, stop = (_boundary(packed.bytes, rank, self._size) for rank in (self._rank, self._rank + 1))
        if self._buffer.numel() < stop - start:
            self._buffer = _kept_buffer(stop - start, self._device)
        stripe = self._buffer[: stop - start]
        packed.copy(start, stop, stripe)
        self._number += 1
        about = replace(about, metrics=dict(about.metrics))
        save = _Save(self._number, about, packed.structure, memoryview(stripe.numpy()), before_commit, keep)
        self._thread = threading.Thread(target=self._run, args=(save,), name="saver", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the save that was started last has ended, well or not; False when it has not: a peer may be dead."""
        return self._join(timeout_s)

    def close(self) -> None:
        """End the thread, and with it a save under way."""
        self._closed.set()
        self._join(FAREWELL_S)

    def _join(self, timeout_s: float | None) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, save: _Save) -> None:
        """The thread of one save."""
        final = self._store.path(save.about.step)
        try:
            problem = self._save(save)
        except (CheckpointError, dist.DistError) as error:
            problem = f"{final}: could not be written: {error}"
        if problem:
            self.error = CheckpointError(problem)
        else:
            self.saved, self.error = save.about, None

    def _save(self, save: _Save) -> str:
        """Write this rank's shard, and learn what became of the checkpoint: empty, or what went wrong."""
        tag = f"{self._await('token')}-{save.number}"
        report = self._attempt(lambda: self._write_shard(save, tag))
        self._keys.set(f"{save.number}/{self._rank}", json.dumps(report))
        # Every rank has heard how the save before this one ended, so rank 0 has read what they reported of it.
        self._keys.delete_key(f"{save.number - 1}/{self._rank}")
        if self._rank == 0:
            self._keys.set(f"{save.number}/result", self._finish(save, tag))
            # Every rank has reported of this save, so each has read the result of the one before.
            self._keys.delete_key(f"{save.number - 1}/result")
        return self._await(f"{save.number}/result")
