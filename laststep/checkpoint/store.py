"""CheckpointStore: the folder on disk that holds a run's checkpoints, each of them either complete or absent.

    checkpoints/step_000001234/shard_0000-of-0002.bin   the bytes of all tensors, split into one file per writing rank
    checkpoints/step_000001234/structure.pt             how to rebuild the state from them: `laststep.checkpoint.pack`
    checkpoints/step_000001234/opaque/                  what a framework has written: `laststep.checkpoint.opaque`
    checkpoints/step_000001234/manifest.json            step, epoch, ..., and the size and SHA-256 of each file

The commit protocol. A crash, a kill or a power cut at any moment leaves the old checkpoint or the new one:

    1. Every rank writes its shard into the folder `.writing-step_000001234-TAG` and fsyncs it, and also its name, that
       is the folder, except on Lustre (`syncs_names`). No reader takes that folder's name for a checkpoint, so an
       unfinished save is never loaded. The tag is unique to the save, so a writer that hangs from an earlier attempt
       cannot write into the files of this one.
    2. Every rank reports the size and SHA-256 of what it wrote. Rank 0 waits for all reports and compares the sizes
       with the files, so a shard that is missing or truncated prevents the commit.
    3. Rank 0 writes manifest.json and fsyncs the file and the folder, so that after a power cut the commit cannot be
       on the disk without the files that belong to it.
    4. A checkpoint of the same step is renamed to `step_000001234.replaced`. It remains until the new one is
       committed: after a crash in between, `recover` renames it back.
    5. Rank 0 renames the folder to `step_000001234`. This rename is the commit; it is atomic.
    6. Rank 0 fsyncs the parent folder, so that a power cut cannot undo the commit.
    7. Only now may the replaced checkpoint and older ones be deleted, so at least one complete checkpoint exists at
       every moment. A checkpoint is renamed before it is deleted, so a reader never meets half of one under its name.

Reading does not trust any of this: `newest` compares every file with its hash and falls back to an older checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from laststep.checkpoint.files import (
    NO_PATIENCE,
    CheckpointError,
    CheckpointMissing,
    CheckpointUnreadable,
    FileEntry,
    Patience,
    disk_errors_explained,
    verify_files,
)
from laststep.config.errors import DiskError
from laststep.config.keep import NO_ANCHORS, Anchors, Ranking
from laststep.ranks.disk import MARK, look_anew
from laststep.records import kept_files
from laststep.records.attempts import recorded_step
from laststep.rundir import RunDir, fsync

MANIFEST = "manifest.json"
REPLACED = ".replaced"
LUSTRE = 0x0BD00BD0  # linux/magic.h does not have it, lustre_user.h does: LL_SUPER_MAGIC
STATFS_BYTES = 256  # more than any struct statfs has
BY_LOSS = Ranking("val_loss", lower_is_better=True)


class CheckpointGone(CheckpointError):
    """The checkpoint was deleted or replaced by the run itself while it was read. It was not damaged."""


class CheckpointStore:
    """The folder of a run's checkpoints. One process commits and deletes; any process may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[int] = set()  # the steps whose checkpoints this process has found to be damaged

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`. An interrupted commit may have left it under its other name."""
        path = self.folder / folder_name(step)
        with contextlib.suppress(OSError):
            if not is_there(path) and is_there(path.with_suffix(REPLACED)):
                return path.with_suffix(REPLACED)
        return path

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, intact or damaged, oldest first. Raises DiskError if it cannot be seen."""
        numbers = (name[5:].removesuffix(REPLACED) for name in self._names() if name.startswith("step_"))
        return sorted({int(number) for number in numbers if number.isdigit()})

    def _names(self) -> list[str]:
        """The names in the folder; none if there is no folder yet. Raises DiskError."""
        # Not Path.glob: it takes a folder that it may not list, from Python 3.13 any error, for an empty one.
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            if not os.path.islink(self.folder):
                return []
            target = os.readlink(self.folder)
            raise DiskError(f"{self.folder}: leads to {target}, which is not there") from None
        except OSError as error:
            raise DiskError(f"{self.folder}: cannot be listed: {error.strerror or error}") from error

    def look_anew(self) -> None:
        """See what other hosts have committed, see `laststep.ranks.disk`."""
        look_anew(self.folder)

    # Writing

    def recover(self) -> None:
        """Undo or complete what an interrupted writer left behind. The one process that commits calls this first.

        Raises OSError if the disk refuses: then a checkpoint may still be hidden.
        """
        for name in self._names():
            left = self.folder / name
            if name.startswith("step_") and name.endswith(REPLACED):
                final = left.with_suffix("")
                if is_there(final):
                    self.discard(left)
                else:
                    left.rename(final)
            elif name.startswith((".writing-", ".deleting-", MARK)):
                self.discard(left)

    def writing_folder(self, step: int, tag: str) -> Path:
        """The folder that holds the files of a checkpoint until it is committed.

        `tag` must differ between all attempts to save the same step: the writer of an earlier one may hang rather
        than be dead.
        """
        return self.folder / f".writing-{folder_name(step)}-{tag}"

    def create_writing_folder(self, step: int, tag: str) -> Path:
        """Create the writing folder unless it exists; every rank that writes calls this.

        Raises OSError, also when the run's folder is gone: a deleted run must not come back as a folder of checkpoints.
        """
        writing = self.writing_folder(step, tag)
        try:
            writing.mkdir(exist_ok=True)
        except FileNotFoundError:
            self.folder.mkdir(exist_ok=True)
            writing.mkdir(exist_ok=True)
        return writing

    def commit(
        self, writing: Path, manifest: Manifest, replaces: bool = True, patience: Patience = NO_PATIENCE
    ) -> Path:
        """Turn the folder `writing`, whose files are fsynced, into the checkpoint of its step: steps 2 to 7 of the
        protocol. Only one process calls this. In doubt, several may without `replaces`: one of them succeeds.

        Raises CheckpointError if the disk refuses for longer than the `patience`, or without `replaces` if there is a
        checkpoint of that step, which then remains; `writing` is deleted.
        """
        final = self.folder / folder_name(manifest.step)
        replaced = final.with_suffix(REPLACED)
        renamed = False

        def write() -> None:
            nonlocal renamed
            for name, entry in manifest.files.items():
                if (writing / name).stat().st_size != entry["bytes"]:
                    raise OSError(errno.EIO, "was truncated after it was written", name)
            (writing / MANIFEST).write_text(manifest.text() + "\n")
            for path in (writing / MANIFEST, writing):
                fsync(path)
            if replaces and is_there(final):
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            try:
                writing.rename(final)  # refused where there is one already: that folder is not empty
            except OSError as error:
                if is_there(replaced):
                    replaced.rename(final)
                if error.errno == errno.ENOTEMPTY:  # which does not pass
                    raise FileExistsError(error.errno, error.strerror, error.filename, None, final) from None
                raise
            renamed = True

        def commit() -> None:
            if not renamed and not self._has_happened(writing, final, manifest):
                write()
            fsync(self.folder)

        try:
            patience.insist(commit)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            self.discard(writing)
            raise self.write_error(manifest.step, error) from error
        self.damaged.discard(manifest.step)
        return final

    def _has_happened(self, writing: Path, final: Path, manifest: Manifest) -> bool:
        """Whether a commit that was reported as failed has happened. Raises OSError."""
        if is_there(writing) or not is_there(final):
            return False
        with contextlib.suppress(FileNotFoundError):
            return (final / MANIFEST).read_text() == manifest.text() + "\n"
        return False

    def discard(self, writing: Path) -> None:
        """Delete a folder that will not be committed: on a full disk its files would take space that a retry needs."""
        shutil.rmtree(writing, ignore_errors=True)

    def write_error(self, step: int, reason: object) -> CheckpointError:
        """The error to raise when the checkpoint of `step` could not be written."""
        return CheckpointError(f"{self.folder / folder_name(step)}: could not be written: {reason}")

    def prune(
        self,
        step: int,
        keep_last: int,
        keep_best: int,
        ranking: Ranking = BY_LOSS,
        anchors: Anchors = NO_ANCHORS,
    ) -> None:
        """Delete all checkpoints but the newest `keep_last`, the `keep_best` that rank best, and the `anchors`.

        `step` is the checkpoint just committed. Newer ones do not count as kept: the resume of this attempt skipped
        them as damaged. Nor do those that are known to be damaged; they are deleted once there are `keep_last` newer
        ones. One that the disk does not show right now does not count, and stays: it may be the best. Raises DiskError.
        """
        listed = self.steps()
        intact: dict[int, Manifest] = {}
        unreadable: set[int] = set()
        for found in listed:
            if found <= step and found not in self.damaged:
                try:
                    intact[found] = self.inspect(found)
                except CheckpointUnreadable:
                    unreadable.add(found)
                except CheckpointError:
                    pass
        newest = sorted(intact)[-keep_last:]
        if len(newest) < keep_last:
            return
        kept = {*newest, *ranked(intact, ranking)[:keep_best]}
        kept |= anchors.kept(self._sizes(intact, intact.keys() - kept), step)
        for old in listed:
            if old < newest[0] and old not in kept and old not in unreadable:
                self._delete(old)

    def make_room(self, keep_best: int, ranking: Ranking = BY_LOSS, anchors: Anchors = NO_ANCHORS) -> int:
        """On a full disk: delete all checkpoints but the newest and the `keep_best` that rank best; `anchors` only
        where there is nothing else. Returns how many bytes they had. The newest is read whole first: none is deleted
        unless it is intact. Raises DiskError."""
        intact: dict[int, Manifest] = {}
        for step in set(self.steps()) - self.damaged:
            with contextlib.suppress(CheckpointError):
                intact[step] = self.inspect(step)
        spare = set(sorted(intact)[:-1]) - set(ranked(intact, ranking)[:keep_best])
        spare = spare - anchors.kept(self._sizes(intact, spare), max(intact, default=0)) or spare
        if not spare or not self.is_intact(max(intact)):
            return 0
        return sum(self._delete(step) for step in spare)

    def _sizes(self, intact: Mapping[int, Manifest], steps: Iterable[int]) -> dict[int, int]:
        """How many bytes these checkpoints take, with their manifests."""
        return {step: intact[step].bytes + (self.path(step) / MANIFEST).stat().st_size for step in steps}

    def _delete(self, step: int) -> int:
        """Delete a checkpoint; returns the bytes of its files that no other one links to. Renamed first, it is complete
        or absent for any process that reads meanwhile."""
        deleting = self.folder / f".deleting-{folder_name(step)}"
        with contextlib.suppress(OSError):  # the next `prune` tries again
            self.discard(deleting)
            self.path(step).rename(deleting)
            files = [path.stat() for path in deleting.iterdir()]
            self.discard(deleting)
            return sum(found.st_size for found in files if found.st_nlink == 1)
        return 0

    # Reading

    def newest(self, warn: Callable[[str], None]) -> Manifest | None:
        """The newest intact checkpoint, or None. Calls `warn` with the reason for each damaged one that it skips.
        Raises DiskError if the disk does not show them.

        Reads whole checkpoints. The ranks of an attempt share that work: `laststep.checkpoint.restore`.
        """
        for candidate in self.candidates(warn):
            try:
                return self.verify(candidate.step)
            except CheckpointError as error:
                if isinstance(error, CheckpointGone) and self.steps()[-1:] > [candidate.step]:
                    return self.newest(warn)  # a run that trains has deleted it, and has newer ones
                self.skip(candidate.step, error, warn)
        return None

    def candidates(
        self, warn: Callable[[str], None], kept: int = 0, patience: Patience = NO_PATIENCE
    ) -> Iterator[Manifest]:
        """The checkpoints that are intact by their manifests and the sizes of their files, newest first: what takes no
        time to see. Calls `warn` with the reason for each that is not.

        By the run's records the newest one is of step `kept`, or a later one. While the disk does not show that, or a
        file, it is looked at again as long as there is `patience`; then DiskError is raised.
        """

        def list_them() -> list[int]:
            steps = self.steps()
            if max(steps, default=0) < kept:
                found = f"only goes up to step {steps[-1]}" if steps else "has no checkpoint"
                raise DiskError(
                    f"{self.folder}: {found}, but the run's records say that step {kept} is saved: is another disk "
                    "mounted there, or was it deleted? `submit --from` starts a new run from what is there"
                )
            return steps

        for step in reversed(steps := patience.insist(list_them, self.look_anew)):
            try:
                manifest = patience.insist(lambda step=step: self._inspect_anew(step), self.look_anew)  # type: ignore[misc]
            except CheckpointError as error:
                if isinstance(error, CheckpointGone) and self.steps()[-1:] > steps[-1:]:
                    yield from self.candidates(warn, kept, patience)  # a run that trains has deleted it, and has newer
                    return
                self.skip(step, error, warn)
            else:
                yield manifest
                patience.renew()  # it was read meanwhile, for minutes perhaps

    def skip(self, step: int, error: CheckpointError, warn: Callable[[str], None]) -> None:
        """Take note that the checkpoint of `step` is damaged, and `warn`. Raises DiskError if it may be intact."""
        if isinstance(error, CheckpointUnreadable) and not error.is_damaged:
            raise DiskError(f"{self.path(step)}: {error}") from error
        if not isinstance(error, CheckpointGone):
            self.damaged.add(step)
        warn(f"skipped {folder_name(step)}: {error}")

    def is_intact(self, step: int) -> bool:
        """Whether there is a checkpoint of `step` and it verifies."""
        with contextlib.suppress(CheckpointError):
            self.verify(step)
            return True
        return False

    def inspect(self, step: int) -> Manifest:
        """The manifest of the checkpoint of `step`, whose files have the right sizes. Raises CheckpointError."""
        with self.reading(step):
            manifest = self.manifest(step)
            _check_sizes(self.path(step), manifest)
            return manifest

    def _inspect_anew(self, step: int) -> Manifest:
        """`inspect`, with a second look where a file is missing: see CheckpointMissing."""
        try:
            return self.inspect(step)
        except CheckpointMissing:
            look_anew(self.path(step))
            return self.inspect(step)

    def verify(self, step: int) -> Manifest:
        """Read the whole checkpoint and compare it with its manifest.

        Raises CheckpointError, which says what is wrong, and CheckpointGone if the run has deleted it.
        """
        with self.reading(step):
            manifest = self.inspect(step)
            verify_files(self.path(step), manifest.files)
            return manifest

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """While a checkpoint is read: if that fails and the run has deleted or replaced the checkpoint meanwhile, raise
        CheckpointGone instead. A run that trains may do so at any moment."""
        name = folder_name(step)
        before = _identity(self.path(step))
        if before is None:
            raise CheckpointGone(f"{name} has been deleted")
        try:
            yield
        except Exception as error:
            if _identity(self.path(step)) != before:
                raise CheckpointGone(f"{name} was deleted while it was read") from error
            raise

    def manifest(self, step: int) -> Manifest:
        """The manifest of the checkpoint of `step`. Raises CheckpointError if it cannot be read or is incomplete."""
        try:
            text = (self.path(step) / MANIFEST).read_text()
        except FileNotFoundError:
            raise CheckpointMissing("manifest.json is missing") from None
        except OSError as error:
            raise CheckpointUnreadable(MANIFEST, error) from None
        except ValueError as error:
            raise CheckpointError(f"manifest.json cannot be read: {error}") from None
        return Manifest.parse(text, step)


def ranked(manifests: Mapping[int, Manifest], ranking: Ranking) -> list[int]:
    """The steps whose checkpoints can be ranked, the best first; of equals the earlier."""
    badness = {step: ranking.badness(manifest.metrics) for step, manifest in manifests.items()}
    return sorted((step for step in badness if not math.isnan(badness[step])), key=lambda step: (badness[step], step))


def folder_name(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step_{step:09d}"


def syncs_names(file: Path) -> bool:
    """Whether the sync of a new file makes its name survive a power cut, too: on Lustre.

    There the sync of a file asks the metadata server, too, to commit the transaction that made the file, of which its
    name is a part. The sync of a folder asks it to commit everything, each time (`ll_fsync` in lustre/llite/file.c,
    `mdt_object_sync` in lustre/mdt/mdt_handler.c; read in the sources of 2.12 and earlier, not tried). A thousand ranks
    need not do that; the one that commits does. POSIX promises nothing of the kind, and elsewhere a file's name may be
    known to one node alone.
    """
    return _kind(file) == LUSTRE


def _kind(path: Path) -> int:
    """The number of the kind of the file system that holds a path, see man 2 statfs; 0 if it is not known."""
    found = ctypes.create_string_buffer(STATFS_BYTES)
    if sys.platform != "linux" or ctypes.CDLL(None).statfs(os.fsencode(path), found):
        return 0
    return ctypes.c_long.from_buffer(found).value


def is_there(path: Path) -> bool:
    """Whether there is something at a path. Raises OSError if that cannot be seen; `Path.exists` says no, from Python
    3.14 on."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """What changes when the checkpoint in a folder is replaced; None if there is none. Raises CheckpointUnreadable."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointUnreadable(path.name, error) from error
    return found.st_ino, found.st_mtime_ns


def _check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless all files are there and as long as the manifest says: that takes no time."""
    for name, entry in manifest.files.items():
        with disk_errors_explained(name):
            size = (path / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, its manifest says {entry['bytes']}")


FORMAT = 2
SHARDED_FORMAT = 3  # of a checkpoint with a `sharding`
FIXED_FORMAT = 4  # of one with tensors that training does not change in files of their own; perhaps with a `sharding`
STRUCTURE = "structure.pt"
OPAQUE = "opaque"


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    `metrics` are those of the validation right before the save, empty if there was none. `numerics` is what the last
    bits of a step depend on, see `laststep.ranks.device.describe_numerics`. `config` is the resolved configuration as
    YAML, a copy of the run's config.yaml; empty in a checkpoint of an older version. `sharding` has the number of files
    of each shard of the state; it is empty when every rank held all of the state.
    """

    step: int
    epoch: int
    samples: int
    world_size: int
    metrics: dict[str, float]
    files: dict[str, FileEntry]
    numerics: dict[str, str | int] = field(default_factory=dict)
    config: str = ""
    format: int = FORMAT
    sharding: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, step: int) -> Manifest:
        """The manifest with this text, of the checkpoint of `step`. Raises CheckpointError."""
        try:
            manifest = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"manifest.json cannot be read: {error}") from None
        if manifest.format not in (FORMAT, SHARDED_FORMAT, FIXED_FORMAT):
            readable = f"formats {FORMAT} to {FIXED_FORMAT}"
            raise CheckpointError(f"its format is {manifest.format}, this version of Laststep reads {readable}")
        if manifest.step != step or not manifest._is_complete():
            raise CheckpointError(f"manifest.json does not describe step {step}")
        return manifest

    def text(self) -> str:
        """The contents of the file."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "sharding" or value}, indent=1)

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def shards(self) -> list[str]:
        """Names of the shard files, in the order of their bytes."""
        size = len(self.files) - len(self.opaque) - 1
        return [shard_name(rank, size) for rank in range(size)]

    @property
    def shards_of_state(self) -> list[list[str]]:
        """The names of the files of each shard of the state, in the order of their bytes."""
        names = iter(self.shards)
        return [list(islice(names, count)) for count in self.sharding or [len(self.shards)]]

    @property
    def opaque(self) -> dict[str, FileEntry]:
        """The files that a framework has written in its own format; empty in any other checkpoint."""
        return {name: entry for name, entry in self.files.items() if name.startswith(f"{OPAQUE}/")}

    def _is_complete(self) -> bool:
        """Whether it describes all files of a checkpoint."""
        described = isinstance(self.files, dict) and all(
            isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in self.files.values()
        )
        if not described or not self.shards or self.files.keys() - self.opaque.keys() != {STRUCTURE, *self.shards}:
            return False
        if self.format == FORMAT or (self.format == FIXED_FORMAT and self.sharding == []):
            return self.sharding == []
        counts = self.sharding if isinstance(self.sharding, list) else []
        return all(type(count) is int and count > 0 for count in counts) and sum(counts) == len(self.shards)


def shard_name(number: int, of: int) -> str:
    """The name of a shard file. It says how many a complete checkpoint has."""
    return f"shard_{number:04d}-of-{of:04d}.bin"


# How long an attempt that begins looks again at a disk that does not show its checkpoints. The ranks that wait for rank
# 0 have twice that.
START_S = 30.0
# The same for a batch shell or a launcher, which only counts lost steps. Slurm may be about to end it.
COUNT_S = 3.0


def recover(
    store: CheckpointStore, run: RunDir, warn: Callable[[str], None], patience: Patience | None = None
) -> Iterator[Manifest]:
    """Clean up the folder of an attempt that begins; returns the run's checkpoints that seem intact, newest first. The
    first of them is found before this returns.

    Never begins below the step that the records say is saved, unless that checkpoint is there and damaged. Raises
    DiskError if the disk does not show it while there is `patience`, by default START_S.
    """
    patience = patience or Patience(START_S, warn)
    kept = patience.insist(lambda: recorded_step(run))
    try:
        patience.insist(store.recover, store.look_anew)
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{store.folder}: cannot be cleaned up: {error}") from error
    candidates = store.candidates(warn, kept, patience)
    return itertools.chain(list(itertools.islice(candidates, 1)), candidates)


def newest_step(run: RunDir, warn: Callable[[str], None]) -> int:
    """The step that the next attempt begins at, as far as manifests and sizes show; 0 without a checkpoint. What the
    records say is saved, if the disk does not show it. Raises OSError if there are records that cannot be read."""
    if (steps := kept_files.kept(run)) is not None:
        return steps
    kept = recorded_step(run)
    try:
        patience = Patience(COUNT_S, warn)
        newest = next(CheckpointStore(run.checkpoints).candidates(warn, kept, patience), None)
    except DiskError as error:
        warn(f"WARNING: {error}")
        return kept
    return newest.step if newest else 0
