"""The checkpoints of a run: each whole or absent.

    checkpoints/step_000001234/shard_0000-of-0002.bin   the bytes of all tensors, striped over as many files as ranks
    checkpoints/step_000001234/structure.pt             what they make up: `trainer.checkpoint.pack`
    checkpoints/step_000001234/manifest.json            step, epoch, ..., and each file's size and SHA-256

How a checkpoint is committed, so that a crash, a kill or a power cut at any moment leaves the old or the new one:
    1. every rank writes its shard into a folder whose name no reader takes for a checkpoint, and fsyncs it
    2. rank 0 hears of every shard, and writes the manifest there; fsync of the file and of the folder
    3. rename it to its final name: the commit
    4. fsync the parent folder
Only then may an older one be deleted. A checkpoint of the same step is first moved aside to `*.replaced`; when the
crash comes between that and the commit, `recover` moves it back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST = "manifest.json"
STRUCTURE = "structure.pt"
HASHED_AT_ONCE = 4  # files
CHUNK = 4 << 20  # bytes read at a time


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or could not be written."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `metrics` are those of the validation that it followed, if any; `numerics` is
    what the last bits of its steps depend on."""

    step: int
    epoch: int
    samples: int
    world_size: int
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    numerics: dict[str, str | int] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(int(f["bytes"]) for f in self.files.values())

    @property
    def shards(self) -> list[str]:
        """Names of the files that hold the run of bytes, in order."""
        size = len(self.files) - 1
        return [shard_name(rank, size) for rank in range(size)]


class CheckpointStore:
    """The folder of a run's checkpoints. One process commits; any may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` stands."""
        return self.folder / f"step_{step:09d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged ones too, oldest first."""
        names = (p.name for p in self.folder.glob("step_*"))
        return sorted(int(n[5:]) for n in names if n[5:].isdigit())

    def recover(self) -> None:
        """Clean up after a writer that was cut off. Call before writing, in the one process that writes."""
        for aside in self.folder.glob("step_*.replaced"):
            final = aside.with_suffix("")
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(final)
        for unfinished in self.folder.glob(".writing-*"):
            self.discard(unfinished)

    def writing(self, step: int, tag: str) -> Path:
        """Where a checkpoint stands until it is committed.

        `tag` tells it from every other try at the same step: an earlier one may have a writer that is stuck, not dead.
        """
        return self.folder / f".writing-{self.path(step).name}-{tag}"

    def begin(self, step: int, tag: str) -> Path:
        """Make that folder; every rank that writes calls it. Raises OSError."""
        writing = self.writing(step, tag)
        writing.mkdir(parents=True, exist_ok=True)
        return writing

    def commit(self, writing: Path, manifest: Manifest) -> Path:
        """Make what was written, and fsynced, the checkpoint of its step. One process calls it.

        Raises CheckpointError when the disk refuses; what was there before then still stands, and `writing` is gone.
        """
        final = self.path(manifest.step)
        replaced = final.with_suffix(".replaced")
        try:
            for name, said in manifest.files.items():
                if (writing / name).stat().st_size != said["bytes"]:
                    raise OSError(errno.EIO, "was cut short after it was written", name)
            (writing / MANIFEST).write_text(json.dumps(vars(manifest), indent=1) + "\n")
            for path in (writing / MANIFEST, writing):
                fsync(path)
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            try:
                writing.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
            fsync(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            self.discard(writing)
            raise self.failure(manifest.step, error) from error
        return final

    def failure(self, step: int, why: object) -> CheckpointError:
        """What there is to say when the checkpoint of `step` could not be written."""
        return CheckpointError(f"{self.path(step)}: could not be written: {why}")

    def discard(self, writing: Path) -> None:
        """Remove what will not be committed: on a full disk half a checkpoint is in everybody's way."""
        shutil.rmtree(writing, ignore_errors=True)

    def verify(self, step: int) -> Manifest:
        """Read the whole checkpoint and compare it with its manifest. Raises CheckpointError with what is wrong."""
        manifest = self.manifest(step)
        for name, said in manifest.files.items():  # at once, before anything long is read
            with _explained(name):
                size = (self.path(step) / name).stat().st_size
            if size != said["bytes"]:
                raise CheckpointError(f"{name} has {size} bytes, its manifest says {said['bytes']}")
        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            for _ in pool.map(lambda name: self._compare(step, name, manifest.files[name]), manifest.files):
                pass
        return manifest

    def stands(self, step: int) -> bool:
        """Whether there is a whole checkpoint of that step, not merely one that was found damaged."""
        with contextlib.suppress(CheckpointError):
            self.verify(step)
            return True
        return False

    def _compare(self, step: int, name: str, said: Mapping[str, Any]) -> None:
        with _explained(name):
            found = _sha256(self.path(step) / name)
        if found != said["sha256"]:
            raise CheckpointError(f"{name} differs from its SHA-256 in the manifest")

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint says of itself. Raises CheckpointError."""
        try:
            manifest = Manifest(**json.loads((self.path(step) / MANIFEST).read_text()))
        except FileNotFoundError:
            raise CheckpointError("manifest.json is missing") from None
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"manifest.json cannot be read: {error}") from None
        if manifest.format != FORMAT:
            raise CheckpointError(f"format {manifest.format}, this Laststep reads {FORMAT}")
        described = isinstance(manifest.files, dict) and all(
            isinstance(said, dict) and {"bytes", "sha256"} <= said.keys() for said in manifest.files.values()
        )
        complete = described and manifest.shards and manifest.files.keys() == {STRUCTURE, *manifest.shards}
        if manifest.step != step or not complete:
            raise CheckpointError(f"manifest.json is not that of step {step}")
        return manifest

    def newest(self, warn: Callable[[str], None]) -> Manifest | None:
        """The newest checkpoint that verifies; `warn` hears of each newer one that was skipped, and why."""
        for step in reversed(self.steps()):
            try:
                return self.verify(step)
            except CheckpointError as error:
                warn(f"skipped {self.path(step).name}: {error}")
        return None

    def prune(self, step: int, keep_last: int, keep_best: int, best_by: str = "val_loss") -> None:
        """Delete all but the newest `keep_last` and the `keep_best` with the lowest `best_by`; `step` is what was just
        written.

        Only what was written up to `step` counts as kept: a newer checkpoint is one that a resume has found damaged.
        What cannot be read does not count either, and is deleted once `keep_last` newer ones stand.
        """
        readable: dict[int, Manifest] = {}
        for found in self.steps():
            with contextlib.suppress(CheckpointError):
                if found <= step:
                    readable[found] = self.manifest(found)
        newest = sorted(readable)[-keep_last:]
        if len(newest) < keep_last:
            return
        measured = [s for s in readable if math.isfinite(readable[s].metrics.get(best_by, math.nan))]
        best = sorted(measured, key=lambda s: (readable[s].metrics[best_by], s))[:keep_best]
        for old in self.steps():
            if old < newest[0] and old not in best:
                shutil.rmtree(self.path(old), ignore_errors=True)


def shard_name(rank: int, size: int) -> str:
    """The file that rank `rank` of `size` writes: a checkpoint says by itself how many it must have."""
    return f"shard_{rank:04d}-of-{size:04d}.bin"


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise CheckpointError for what the disk has to say of this file."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK, 1 + os.fstat(file.fileno()).st_size)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
