"""The lock of a run folder: only one attempt at a time may use it. Two would corrupt its metrics and checkpoints.

Rank 0 holds a lock (flock) on a file for as long as it lives, and signs the file for its attempt. Where the file system
has no locks, the signature is all there is. Any other error of the disk is waited for and then reported: it means
neither that the lock is free nor that none is needed.

Once rank 0 is dead the lock is free, but its survivors may be saving the last step. Any of them may, as long as no
other attempt has signed the file. So an attempt that begins first looks whether the one that has signed may still save
(`Before`).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from laststep.config.errors import ConfigError, DiskError
from laststep.ranks.patience import Patience
from laststep.ranks.process import identity
from laststep.ranks.world import World
from laststep.say import say

# How long to wait for a killed predecessor to exit. Its loader workers check for it every 5 s; after the death of a
# node, an NFS server keeps the node's locks for a lease of 90 s.
WAIT_S = {True: 120.0, False: 15.0}  # on Slurm and on Ray, elsewhere
POLL_S = 0.2
# What flock fails with where there are no locks (man 2 flock, fs/locks.c), for example on some Lustre mounts.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# How long rank 0 waits, as it begins, for a disk that refuses the lock for any other reason (ENOLCK, EIO, ESTALE).
START_S = 30.0
# The same for a batch shell, which Slurm may be about to end, and for a survivor, as SIGKILL may be near.
LOOK_S = 5.0
# An attempt that begins holds the lock for an instant to see whether it is free, and for another until it has signed.
# So a survivor that does not get the lock tries again.
TRIES, TRY_S = 4, 0.02

T = TypeVar("T")


class Before:
    """What is known about the attempt that has signed the lock: here nothing. See laststep.attempt.predecessor."""

    def may_save(self, signed: str) -> bool:
        """Whether its survivors may be about to save its last step, although its rank 0 does not hold the lock."""
        return False

    def holds(self) -> None:
        """At this moment a process of it holds the lock."""

    def lives(self, signed: str, process: str) -> bool:
        """Whether its rank 0 lives, for file systems without locks: False in doubt. `process`: see
        laststep.ranks.process."""
        return False


class _Found(enum.Enum):
    """What came of an attempt to lock."""

    LOCKED = enum.auto()
    HELD = enum.auto()  # by another process
    NO_LOCKS = enum.auto()


class _LockFile:
    """The open file. Insists for some seconds on what the disk refuses, and then raises DiskError."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path, self._patience_s = path, patience_s
        self._descriptor = self._insist(lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o666))

    def lock(self, kind: int) -> _Found:
        """Lock it for as long as it is open, shared or exclusively, if no other process has locked it."""
        return self._insist(lambda: _lock(self._descriptor, kind))

    def unlock(self) -> None:
        """The opposite."""
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def read(self) -> tuple[str, str]:
        """The signature, and what names the process of the rank 0 that has signed."""
        text = self._insist(lambda: os.pread(self._descriptor, 1000, 0)).decode(errors="replace")
        signed, _, process = text.partition("\n")
        return signed.strip(), process.strip()

    def sign(self, signature: str) -> None:
        """Write the signature."""

        def write() -> None:
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{signature}\n{identity()}\n".encode(), 0)
            os.fsync(self._descriptor)  # the file stays open, and a network file system would keep this on its host

        self._insist(write)

    def close(self) -> None:
        """Unlocks, too."""
        os.close(self._descriptor)

    def _insist(self, look: Callable[[], T]) -> T:
        try:
            return Patience(self._patience_s, say).insist(look)
        except OSError as error:
            raise DiskError(f"{self.path}: the disk refuses the run's lock: {error.strerror or error}") from error


_held: dict[Path, _LockFile] = {}  # that this process keeps open until it ends, as to close one would unlock it


def acquire(path: Path, world: World, before: Before | None = None) -> None:
    """Lock the run for as long as this process lives, once no other attempt is at work on it or may save.

    Raises ConfigError when another attempt does not release it, DiskError when the disk refuses for START_S or keeps
    the lock of a dead node.
    """
    before = before or Before()
    deadline = time.monotonic() + WAIT_S[world.on_slurm or world.launcher == "ray"]
    said: set[str] = set()
    file = _LockFile(path, START_S)
    try:
        while (obstacle := _try(file, signature(world), before)) is not None:
            if obstacle.at_work and time.monotonic() > deadline:
                raise _refusal(path, world, obstacle.signed)
            waiting = (
                f"waiting for another attempt to release this run ({obstacle.signed})"
                if obstacle.at_work
                else f"waiting for survivors of another attempt, which may be saving its last step ({obstacle.signed})"
            )
            if waiting not in said:
                said.add(waiting)
                say(waiting)
            time.sleep(POLL_S)
    except BaseException:
        file.close()
        raise
    _held[path] = file


class _Obstacle(NamedTuple):
    """Why the lock is not taken."""

    signed: str  # by this attempt
    at_work: bool  # its rank 0 lives, or a survivor holds the lock; else survivors may be about to take it


def _try(file: _LockFile, ours: str, before: Before) -> _Obstacle | None:
    """Take the lock, unless another attempt needs it."""
    # Shared, like those who only look: an attempt's own batch shell must not mistake this process for its rank 0.
    found = file.lock(fcntl.LOCK_SH)
    signed, process = file.read()
    if found is _Found.HELD:
        before.holds()
        return _Obstacle(signed, at_work=True)
    if signed not in ("", ours):
        if found is _Found.NO_LOCKS and before.lives(signed, process):
            return _Obstacle(signed, at_work=True)
        if before.may_save(signed):
            file.unlock()
            return _Obstacle(signed, at_work=False)
    if found is _Found.LOCKED:
        # This gives the shared lock up for an instant, in which another attempt may take it, sign, and die.
        found = file.lock(fcntl.LOCK_EX)
        if found is _Found.HELD or file.read()[0] != signed:
            file.unlock()
            return _Obstacle(file.read()[0], at_work=True)
    else:
        say(f"{file.path}: this file system has no locks; do not start a second attempt")
    file.sign(ours)
    return None


def _refusal(path: Path, world: World, signed: str) -> Exception:
    """Another attempt does not release the run."""
    if world.on_slurm and signed.startswith(f"job {world.job_id}, "):  # Slurm has ended it, so it cannot live
        return DiskError(
            f"{path}: still locked by an earlier start of this job ({signed}): a network file system may keep the lock "
            f"of a dead node; if no process of that start is left, delete this file"
        )
    return ConfigError(f"{path.parent.name}: another attempt is at work on this run ({signed})")


def still_ours(path: Path, world: World) -> bool:
    """Whether the run is still locked by this attempt, so that any of its ranks may stand in for rank 0.

    If rank 0 has died and no other attempt has taken the lock, this takes it. Raises DiskError when the disk refuses
    for LOOK_S: then nothing is known.
    """
    ours = signature(world)
    if path not in _held:
        file = _LockFile(path, LOOK_S)
        if file.read()[0] == ours and _takes(file):
            _held[path] = file
        else:
            file.close()
    found = _LockFile(path, LOOK_S)  # opened anew: so a client of a network file system asks its server
    try:
        return found.read()[0] == ours
    finally:
        found.close()


def _takes(file: _LockFile) -> bool:
    """Whether this process, a survivor of rank 0, now holds the lock. Else rank 0 or another survivor does, or the file
    system refuses: the signature says whose it is all the same."""
    for _ in range(TRIES):
        try:
            if file.lock(fcntl.LOCK_EX) is not _Found.HELD:
                return True
        except DiskError:
            return False
        time.sleep(TRY_S)
    return False


def signature(world: World) -> str:
    """What the attempt that holds the lock writes into it."""
    return f"{world.start}, on {world.hosts[0]}"


def belongs_to_job(signed: str, world: World) -> bool:
    """Whether a signature was written by any attempt of this job, the current start or an earlier one."""
    return signed.startswith(f"job {world.job_id}, ")


def belongs_to_start(signed: str, world: World) -> bool:
    """Whether a signature was written by an attempt of this start of the job."""
    return signed.startswith(f"job {world.job_id}, restart {world.restart}, ")


def current_holder(path: Path) -> str | None:
    """The signature of the attempt that holds the lock, such as "job 12, restart 0, on n1".

    None if it is not held, if the file system has no locks, or if the disk refuses to say.
    """
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().partition("\n")[0].strip()
    return None


@contextlib.contextmanager
def no_start(path: Path, before: Before | None = None) -> Iterator[str | None]:
    """Give the signature of the attempt that holds the lock. If none does, none can take it inside the `with`, unless
    the file system has no locks.

    The lock is shared, as in `current_holder`: a look at the run is not mistaken for an attempt. Raises DiskError
    when the disk refuses for LOOK_S.
    """
    file = _LockFile(path, LOOK_S)
    try:
        found = file.lock(fcntl.LOCK_SH)
        signed, process = file.read()
        held = found is _Found.HELD or (found is _Found.NO_LOCKS and (before or Before()).lives(signed, process))
        yield signed if held else None
    finally:
        file.close()


def _lock(descriptor: int, kind: int) -> _Found:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Found.HELD
    except OSError as error:
        if error.errno in NO_LOCKS:
            return _Found.NO_LOCKS
        raise
    return _Found.LOCKED
