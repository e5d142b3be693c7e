"""The checkpoints of a run: each whole or absent.

    checkpoints/step_000001234/state.pt        everything that outlives an attempt
    checkpoints/step_000001234/manifest.json   step, epoch, ..., and each file's size and SHA-256

How a checkpoint is committed, so that a crash, a kill or a power cut at any moment leaves the old or the new one:
    1. write both files into a folder whose name no reader takes for a checkpoint, and fsync each
    2. fsync that folder
    3. rename it to its final name: the commit
    4. fsync the parent folder
Only then may an older one be deleted. A checkpoint of the same step is first moved aside to `*.replaced`; when the
crash comes between that and the commit, `recover` moves it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or could not be written."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `metrics` are those of the validation that it followed, if any."""

    step: int
    epoch: int
    samples: int
    world_size: int
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(int(f["bytes"]) for f in self.files.values())


class CheckpointStore:
    """The folder of a run's checkpoints. One process writes; any may read."""

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
                shutil.rmtree(aside)
            else:
                aside.rename(final)
        for unfinished in self.folder.glob(".writing-*"):
            shutil.rmtree(unfinished)

    def write(
        self,
        step: int,
        epoch: int,
        samples: int,
        world_size: int,
        metrics: Mapping[str, float],
        write_state: Callable[[BinaryIO], None],
    ) -> Path:
        """Commit a checkpoint whose state `write_state` writes to the file that it is given.

        Raises CheckpointError when the disk refuses; what was there before then still stands.
        """
        final, writing = self.path(step), self.folder / f".writing-{self.path(step).name}"
        try:
            if writing.exists():
                shutil.rmtree(writing)
            writing.mkdir(parents=True)
            state = writing / "state.pt"
            with state.open("wb") as file:
                write_state(file)
            files = {state.name: {"bytes": state.stat().st_size, "sha256": _sha256(state)}}
            manifest = Manifest(step, epoch, samples, world_size, dict(metrics), files)
            (writing / "manifest.json").write_text(json.dumps(vars(manifest), indent=1) + "\n")
            for path in (state, writing / "manifest.json", writing):
                fsync(path)
            replaced = final.with_suffix(".replaced")
            if final.exists():
                final.rename(replaced)
            try:
                writing.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
            fsync(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(writing, ignore_errors=True)  # on a full disk half a checkpoint is in everybody's way
            # torch.save covers the disk's error with one of its own.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(f"{final}: could not be written: {cause}") from error
        return final

    def verify(self, step: int) -> Manifest:
        """Read the whole checkpoint and compare it with its manifest. Raises CheckpointError with what is wrong."""
        manifest = self.manifest(step)
        for name, said in manifest.files.items():
            path = self.path(step) / name
            try:
                size = path.stat().st_size
                if size != said["bytes"]:
                    raise CheckpointError(f"{name} has {size} bytes, its manifest says {said['bytes']}")
                if _sha256(path) != said["sha256"]:
                    raise CheckpointError(f"{name} differs from its SHA-256 in the manifest")
            except FileNotFoundError:
                raise CheckpointError(f"{name} is missing") from None
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        return manifest

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint says of itself. Raises CheckpointError."""
        try:
            manifest = Manifest(**json.loads((self.path(step) / "manifest.json").read_text()))
        except FileNotFoundError:
            raise CheckpointError("manifest.json is missing") from None
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"manifest.json cannot be read: {error}") from None
        if manifest.format != FORMAT:
            raise CheckpointError(f"format {manifest.format}, this Laststep reads {FORMAT}")
        described = all(isinstance(f, dict) and {"bytes", "sha256"} <= set(f) for f in manifest.files.values())
        if manifest.step != step or "state.pt" not in manifest.files or not described:
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


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
