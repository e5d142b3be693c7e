"""FrozenState: a state that no longer changes, as a rescue saves it: one survivor alone, or several together.

Unlike a `CheckpointWriter` it needs no key-value store and no thread: what the survivors agree on stands in files
(laststep/attempt/rescue.py). It reads the state chunk by chunk through a small buffer, as memory may be short.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from laststep.checkpoint.files import NO_PATIENCE, CheckpointError, FileEntry, Patience, StateChanged, Stripe
from laststep.checkpoint.pack import WHOLE, Layout, Packed, serialized_structure
from laststep.checkpoint.store import STRUCTURE, CheckpointStore, is_there, shard_name
from laststep.checkpoint.writer import CheckpointInfo, Part, make_manifest, reason_of, write_file
from laststep.ranks.world import ShardPlace

# A writer whose sync takes as long as that of a whole stripe would look stuck to those that wait for it.
SYNC_BYTES = 256 << 20


class ChunkBuffers:
    """Host memory for one chunk of a state, for each thread that reads: a read that was given up may still end, in the
    thread that is stuck with it, and must not write into a chunk that another thread has read since."""

    def __init__(self, first: Tensor) -> None:
        """`first` is the memory of the first thread: uint8, on the CPU."""
        self.bytes = len(first)
        self._spare: Tensor | None = first
        self._of: dict[threading.Thread, Tensor] = {}

    def here(self) -> Tensor:
        """The memory of this thread."""
        thread = threading.current_thread()
        if thread not in self._of:
            spare, self._spare = self._spare, None
            self._of[thread] = torch.empty(self.bytes, dtype=torch.uint8) if spare is None else spare
        return self._of[thread]


class FrozenState:
    """A state that no longer changes, as far as this rank holds it. It references the tensors.

    `before_commit` runs before a commit; if it raises, the save fails. The state is read chunk by chunk through
    `buffers`; after each, `is_whole` says whether a GPU that was stuck has changed it after all.
    """

    def __init__(
        self,
        store: CheckpointStore,
        info: CheckpointInfo,
        state: Any,
        world_size: int,
        before_commit: Callable[[], None],
        buffers: ChunkBuffers,
        is_whole: Callable[[], bool],
        place: ShardPlace = WHOLE,
        copies: Mapping[int, memoryview] = MappingProxyType({}),
        structure: Any = None,
        read: Callable[[Callable[[], Tensor | None]], Tensor | None] = lambda work: work(),
    ) -> None:
        """`place` says which shard of the state this rank holds. `copies` has the bytes of shards in host memory, by
        their numbers: what `Packed.copy` has copied here or on another rank. If `state` is None, only these can be
        written, and this rank can commit only with the `structure` of the state that they were copied from. `read`
        calls what reads the device's memory, and may raise what it likes.
        """
        self._store, self._info, self._world_size, self._before_commit = store, info, world_size, before_commit
        self._buffers, self._is_whole, self._read = buffers, is_whole, read
        self._place, self._copies = place, copies
        self._packed = None if state is None else Packed(state, place)
        self._structure = structure if self._packed is None else self._packed.structure

    @property
    def bytes(self) -> int:
        """The size of this rank's shard."""
        return self.bytes_of(self._place.shard)

    def bytes_of(self, shard: int) -> int:
        """The size of a shard that this rank can write."""
        if shard in self._copies:
            return len(self._copies[shard])
        assert self._packed is not None and shard == self._place.shard, f"shard {shard} is held elsewhere"
        return self._packed.bytes

    def write_part(self, tag: str, shard: int, stripe: Stripe, name: str, after_chunk: Callable[[], None]) -> FileEntry:
        """Write a stripe of a shard into the file `name` of the writing folder; returns its entry in the manifest.

        `tag` as for `CheckpointStore.writing_folder`. What `after_chunk` raises ends the write. Raises StateChanged,
        and OSError.
        """
        path = self._store.create_writing_folder(self._info.step, tag) / name
        path.unlink(missing_ok=True)  # what this rank left unfinished
        try:
            return write_file(path, self._chunks(shard, stripe, after_chunk), SYNC_BYTES)
        except Exception:
            with suppress(OSError):  # on a full disk it would take space that others need
                path.unlink(missing_ok=True)
                path.parent.rmdir()  # unless others write there
            raise

    def commit(self, tag: str, parts: Mapping[str, FileEntry], patience: Patience = NO_PATIENCE) -> None:
        """Commit the parts, files in the writing folder, by shard and in the order of their bytes. One rank calls this,
        once all parts are written. An intact checkpoint of this step remains. Raises CheckpointError when the disk
        refuses for longer than the `patience`.
        """
        step, store = self._info.step, self._store
        store.look_anew()  # a rank on another host may have committed this step
        writing = store.writing_folder(step, tag)
        try:
            exists = patience.insist(partial(is_there, store.path(step)))
            if exists and store.is_intact(step):
                return store.discard(writing)
            sharding = self._sharding([entry["bytes"] for entry in parts.values()])
            files = {STRUCTURE: patience.insist(lambda: self._write_structure(writing / STRUCTURE))}
            for number, (name, entry) in enumerate(parts.items()):
                shard = shard_name(number, len(parts))
                patience.insist(partial(_rename, writing / name, writing / shard))
                files[shard] = entry
            patience.insist(self._before_commit)
        except Exception as error:  # of any kind: the caller only asks whether the state is saved
            store.discard(writing)
            raise store.write_error(step, reason_of(error)) from error
        try:
            manifest = make_manifest(self._info, self._world_size, files, Part(self._structure, sharding))
            store.commit(writing, manifest, replaces=exists, patience=patience)
        except CheckpointError:
            if exists or not store.is_intact(step):  # the save that all ranks had begun together may have come first
                raise

    def _write_structure(self, path: Path) -> FileEntry:
        path.unlink(missing_ok=True)  # what this rank left unfinished
        return write_file(path, [serialized_structure(self._structure)])

    def _sharding(self, sizes: list[int]) -> list[int]:
        """How many of these files, in their order, each shard has; see `Manifest`. Raises OSError when they are not the
        whole state. The last file of a shard is never empty, unless the shard is."""
        layout, left = Layout.of(self._structure, self._place.shards), iter(sizes)
        counts = []
        for shard in range(layout.shards):
            missing, count = layout.shard_bytes(shard), 0
            while missing > 0 or not count:
                missing, count = missing - next(left, missing + 1), count + 1
            if missing:
                raise OSError(errno.EIO, "its parts are not the whole state")
            counts.append(count)
        if next(left, None) is not None:
            raise OSError(errno.EIO, "its parts are not the whole state")
        return counts if layout.shards > 1 else []

    def _chunks(self, shard: int, stripe: Stripe, after_chunk: Callable[[], None]) -> Iterator[memoryview]:
        """The bytes of a stripe, chunk by chunk. A chunk is valid until the next one is asked for."""
        begin, end = stripe.bounds(self.bytes_of(shard))
        copy = self._copies.get(shard)
        for start in range(begin, end, self._buffers.bytes):
            stop = min(start + self._buffers.bytes, end)
            if copy is not None:
                yield copy[start:stop]
            else:
                assert self._packed is not None
                chunk = self._read(partial(self._whole_chunk, self._packed, start, stop))
                if chunk is None:
                    raise StateChanged
                yield chunk.numpy().data
            after_chunk()

    def _whole_chunk(self, packed: Packed, start: int, stop: int) -> Tensor | None:
        """Bytes of the state; None if it has changed."""
        chunk = self._buffers.here()[: stop - start]
        packed.copy(start, stop, chunk)
        return chunk if self._is_whole() else None


def _rename(before: Path, after: Path) -> None:
    """Rename a file, unless that has happened and was reported as failed. Raises OSError."""
    try:
        before.rename(after)
    except FileNotFoundError:
        after.stat()
