"""Links: a file of a checkpoint that an older one has too is linked, not written again.

Weights that training does not change, such as a frozen encoder or the model under adapters, stand in files of their own
(`laststep.checkpoint.pack`). A rank hashes what it would write. Where the checkpoint *before the last one* has a file
with this hash, the new folder gets a hard link to it; so of the two newest checkpoints each has its own copy on the
disk, and no damage takes both. A folder is as whole as before: deleting it leaves the other's files alone, and nobody
counts. Where a link is refused (EXDEV, EMLINK, EPERM; the older checkpoint is gone), the file is written.

Only checkpoints that this attempt has committed, or has read whole as it began, are linked from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from laststep.checkpoint.files import FileEntry
from laststep.checkpoint.store import CheckpointStore
from laststep.rundir import fsync

Content = tuple[int, str]  # size and SHA-256
REMEMBERED = 3  # checkpoints: the last two, and one more, as a save may replace the last


class Links:
    """What this rank may link from."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._known: list[tuple[int, dict[Content, str]]] = []  # steps, and names by contents; the oldest first

    def note(self, step: int, files: Mapping[str, FileEntry]) -> None:
        """The checkpoint of `step` is committed, or was found intact. These are files of it."""
        names = {(entry["bytes"], entry["sha256"]): name for name, entry in files.items()}
        kept = [each for each in self._known if each[0] < step]
        self._known = [*kept, (step, names)][-REMEMBERED:]

    def take(self, step: int, path: Path, chunks: Iterable[memoryview]) -> FileEntry | None:
        """Make the new file `path` of the checkpoint of `step`, which is to hold these bytes, a link to the same in an
        older one, and sync it. None if there is none, and no file. Raises what `chunks` raises."""
        older = [known for known in self._known if known[0] < step]
        if len(older) < 2:
            return None
        (source, names), (_, newest) = older[-2:]
        if names.keys().isdisjoint(newest):  # it changes all the same, such as a moving average
            return None
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
        entry: FileEntry = {"bytes": size, "sha256": digest.hexdigest()}
        name = names.get((size, entry["sha256"]))
        if name is None:
            return None
        try:
            os.link(self._store.path(source) / name, path)
            if path.stat().st_size != size:
                raise OSError("the older file was truncated")
            fsync(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return entry
