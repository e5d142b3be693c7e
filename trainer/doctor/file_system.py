"""The folder of all runs: on which file system it is, and whether that will do."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs")
# Mount options of NFS and Lustre with which a lock is one of this machine alone.
LONELY = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock")


@dataclass(frozen=True)
class Place:
    """A folder, and what was found out about its file system."""

    path: Path
    kind: str  # as /proc/mounts names it, e.g. nfs4
    no_locks: str | None  # why flock does not protect a run there
    free_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether it is, as far as the file system's kind tells, a disk of this machine."""
        return self.kind in LOCAL

    @classmethod
    def look(cls, root: Path) -> Place:
        """Find out about the folder, or where it is to be the nearest that exists. Raises OSError."""
        path = root.expanduser().absolute()
        existing = path
        while not existing.exists():
            existing = existing.parent
        kind, options = mount_of(existing.resolve(), Path("/proc/self/mounts").read_text())
        lonely = [option for option in options.split(",") if option in LONELY]
        no_locks = f"mounted with {lonely[0]}" if lonely else _try_lock(existing)
        return cls(path, kind, no_locks, shutil.disk_usage(existing).free)


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Kind and options of the file system that a folder is on, from /proc/mounts."""
    found, depth = ("unknown", ""), -1
    for line in mounts.splitlines():
        _, point, kind, options = line.split()[:4]
        folder = Path(point.encode().decode("unicode_escape"))  # a blank is \040
        # Of several on one folder the last lies on top.
        if path.is_relative_to(folder) and len(folder.parts) >= depth:
            found, depth = (kind, options), len(folder.parts)
    return found


def _try_lock(folder: Path) -> str | None:
    """Why a lock that one holds there does not keep out another; None when it does."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as held, open(held.name, "rb") as second:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            return "one was granted twice"
    except OSError as error:
        return str(error.strerror)
