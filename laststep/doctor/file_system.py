"""The folder of all runs (launch.root): which file system it is on, and whether runs are safe there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laststep.config.schema import Launch
from laststep.doctor.problem import Problem
from laststep.doctor.slurm_settings import SlurmSettings
from laststep.say import command

LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs")
# Mount options of NFS and Lustre with which other machines do not see a lock.
LOCAL_LOCK_OPTIONS = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock")
MIN_FREE_GB = 10


@dataclass(frozen=True)
class RunRoot:
    """The folder of all runs, and the properties of its file system."""

    path: Path
    kind: str  # as /proc/mounts names it, e.g. nfs4
    lock_error: str | None  # why flock does not protect a run there; None when it does
    free_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether it is probably a disk of this machine, going by the kind of the file system."""
        return self.kind in LOCAL_KINDS

    @classmethod
    def inspect(cls, root: Path) -> RunRoot:
        """Inspect the folder, or its nearest existing parent. Raises OSError."""
        path = Path(os.path.expanduser(root)).absolute()
        existing = path
        while not existing.exists():
            existing = existing.parent
        kind, options = mount_of(existing.resolve(), Path("/proc/self/mounts").read_text())
        local_lock = next((option for option in options.split(",") if option in LOCAL_LOCK_OPTIONS), None)
        lock_error = f"mounted with {local_lock}" if local_lock else _try_lock(existing)
        return cls(path, kind, lock_error, shutil.disk_usage(existing).free)


def check_run_root(root: RunRoot, slurm: SlurmSettings | None, launch: Launch, host: str) -> Iterator[Problem]:
    """Anything about the folder of all runs that could break a run; `host` is this machine's name."""
    others = sorted({node.get("NodeHostName", host) for node in slurm.nodes} - {host}) if slurm else []
    if root.is_local and others:
        yield Problem(
            f"launch.root={root.path} is on {root.kind}, usually a disk that only {host} can see, but jobs run on "
            f"other machines, e.g. {others[0]}",
            "choose a folder that all nodes share; "
            f"`{command(f'doctor --nodes {max(2, launch.node_counts[-1])}')}` tests it",
        )
    if root.lock_error is not None:
        yield Problem(
            f"launch.root={root.path}: locks do not work ({root.lock_error}), so two attempts of a run may be active "
            "at once",
            "choose a folder where flock works between nodes (Lustre: mounted with flock), or never start a run twice",
        )
    if root.free_bytes < MIN_FREE_GB * 1e9:
        yield Problem(
            f"launch.root={root.path}: only {root.free_bytes / 1e9:.1f} GB free",
            "make room, lower checkpoint.keep_last and keep_best, or choose another folder",
        )


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Kind and mount options of the file system that holds `path`; `mounts` is the text of /proc/mounts."""
    found, depth = ("unknown", ""), -1
    for line in mounts.splitlines():
        _, mount_point, kind, options = line.split()[:4]
        folder = Path(mount_point.encode().decode("unicode_escape"))  # a blank is written as \040
        # Of several mounts on one folder, the last is on top.
        if path.is_relative_to(folder) and len(folder.parts) >= depth:
            found, depth = (kind, options), len(folder.parts)
    return found


def _try_lock(folder: Path) -> str | None:
    """Why a file that is locked in this folder can be locked again; None when it cannot, as it should be."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as held, open(held.name, "rb") as second:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            return "the same lock was granted twice"
    except OSError as error:
        return str(error.strerror)
