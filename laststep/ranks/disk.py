"""The run folder on a shared disk, as the processes of a run have to use it: with patience, anew, and one at a time.

`Patience` tries again what a disk refuses: an error that passes (ESTALE, EIO, ENOSPC while a server fails over) says
nothing about what is there. Each such work must leave the same behind however often it is done.

`look_anew` and `FreshView` see what another host has changed. An NFS client remembers for up to a minute which names a
folder has, that a name does not exist, and how long a file is (nfs(5): acdirmax, lookupcache), until it changes the
folder itself. Files need no such care: opening one shows what was closed before.

`acquire_run_lock`: only one attempt at a time may use the folder. Rank 0 holds a lock (flock) on a file for as long as
it lives, and signs it for its attempt; where the file system has no locks, the signature is all there is. Any other
error is waited for and then reported: it means neither that the lock is free nor that none is needed. Once rank 0 is
dead the lock is free, but any survivor may save the last step as long as no other attempt has signed. So an attempt
that begins first looks whether the one that has signed may still save (`Before`).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from laststep.config.errors import ConfigError, DiskError
from laststep.ranks.process import identity
from laststep.ranks.world import World, hostname
from laststep.say import say

POLL_S = 0.5

LASTING = (FileExistsError, IsADirectoryError, NotADirectoryError)  # errors that do not pass

T = TypeVar("T")


class Patience:
    """Time in which a disk may come back. All looks share it, so that they do not add up. Calls `warn` with each error
    that it waits for, once."""

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError,)  # the errors that may pass

    def __init__(self, seconds: float, warn: Callable[[str], None]) -> None:
        self._seconds = seconds
        self.renew()
        self._warn = warn
        self._said: set[str] = set()

    def renew(self) -> None:
        """Give the disk all of the time again: the looks so far are long past."""
        self._deadline = time.monotonic() + self._seconds

    def insist(self, work: Callable[[], T], before_again: Callable[[], object] = lambda: None) -> T:
        """What `work` returns. While it raises an error that may pass and there is time left, do it again."""
        while True:
            try:
                return work()
            except self.passing as error:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0 or isinstance(error, LASTING):
                    raise
                if str(error) not in self._said:
                    self._said.add(str(error))
                    self._warn(f"{error}; looking again for {left_s:.0f} s")
            time.sleep(min(POLL_S, left_s))
            before_again()


NO_PATIENCE = Patience(0.0, lambda text: None)


# How often each of several ranks looks at files, and refreshes its view of a folder: more seldom where they are many,
# which would overload the file system.
S_PER_RANK = 0.001
SHORTEST_ROUND_S = 0.025
SHORTEST_PERIOD_S = 0.1
MARK = ".look-"  # how the name of the folder begins that `look_anew` makes and removes


def polling_round_s(ranks: int) -> float:
    """Seconds between two looks of each of these ranks, when they wait for each other through files."""
    return max(SHORTEST_ROUND_S, S_PER_RANK * ranks)


def look_anew(folder: Path) -> None:
    """See what other hosts have changed in a folder: from now on its names are those of the server. Makes and removes a
    folder in it, `.look-HOST`; where that is refused, nothing happens. A folder that is not there may have appeared
    elsewhere: then the one above is refreshed."""
    own = folder / f"{MARK}{hostname()}"
    try:
        with suppress(FileExistsError):  # another process of this host is here, or has died here
            own.mkdir()
    except FileNotFoundError:
        if folder.parent != folder:
            look_anew(folder.parent)
        return
    except OSError:
        return
    with suppress(OSError):
        own.rmdir()


class FreshView:
    """A view of folders that `ranks` processes poll: refreshed often enough, and not too often for the file system."""

    def __init__(self, ranks: int, *folders: Path) -> None:
        self._folders = folders
        self._period_s = max(SHORTEST_PERIOD_S, S_PER_RANK * ranks)
        self._next = 0.0

    def refresh(self) -> None:
        """Call before each look."""
        if time.monotonic() >= self._next:
            for folder in self._folders:
                look_anew(folder)
            self._next = time.monotonic() + self._period_s


# How long to wait for a killed predecessor to exit. Its loader workers check for it every 5 s; after the death of a
# node, an NFS server keeps the node's locks for a lease of 90 s.
LOCK_WAIT_S = {True: 120.0, False: 15.0}  # on Slurm and on Ray, elsewhere
LOCK_POLL_S = 0.2
# What flock fails with where there are no locks (man 2 flock, fs/locks.c), for example on some Lustre mounts.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# How long rank 0 waits, as it begins, for a disk that refuses the lock for any other reason (ENOLCK, EIO, ESTALE).
LOCK_START_S = 30.0
# The same for a batch shell, which Slurm may be about to end, and for a survivor, as SIGKILL may be near.
LOCK_LOOK_S = 5.0
# An attempt that begins holds the lock for an instant to see whether it is free, and for another until it has signed.
# So a survivor that does not get the lock tries again.
TRIES, TRY_S = 4, 0.02


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
    """The open file. Insists for `patience_s` on what the disk refuses, and then raises DiskError."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path, self._patience_s = path, patience_s
        self._descriptor = self._insist(lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o666))

    def lock(self, kind: int) -> _Found:
        """Lock it for as long as it is open, shared or exclusively, if no other process has locked it."""

        def lock() -> _Found:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return _Found.HELD
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return _Found.NO_LOCKS
                raise
            return _Found.LOCKED

        return self._insist(lock)

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


_held_locks: dict[Path, _LockFile] = {}  # that this process keeps open until it ends, as to close one would unlock it


def acquire_run_lock(path: Path, world: World, before: Before | None = None) -> None:
    """Lock the run for as long as this process lives, once no other attempt is at work on it or may save. Raises
    ConfigError when another attempt does not release it, DiskError when the disk refuses for LOCK_START_S or keeps the
    lock of a dead node."""
    before = before or Before()
    deadline = time.monotonic() + LOCK_WAIT_S[world.on_slurm or world.launcher == "ray"]
    said: set[str] = set()
    file = _LockFile(path, LOCK_START_S)
    try:
        while (obstacle := _try(file, lock_signature(world), before)) is not None:
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
            time.sleep(LOCK_POLL_S)
    except BaseException:
        file.close()
        raise
    _held_locks[path] = file


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
    if world.on_slurm and signed_by_job(signed, world):  # Slurm has ended it, so it cannot live
        return DiskError(
            f"{path}: still locked by an earlier start of this job ({signed}): a network file system may keep the lock "
            f"of a dead node; if no process of that start is left, delete this file"
        )
    return ConfigError(f"{path.parent.name}: another attempt is at work on this run ({signed})")


def lock_is_ours(path: Path, world: World) -> bool:
    """Whether the run is still locked by this attempt, so that any of its ranks may stand in for rank 0. If rank 0 has
    died and no other attempt has taken the lock, this takes it. Raises DiskError when the disk refuses for LOCK_LOOK_S:
    then nothing is known."""
    ours = lock_signature(world)
    if path not in _held_locks:
        file = _LockFile(path, LOCK_LOOK_S)
        if file.read()[0] == ours and _takes(file):
            _held_locks[path] = file
        else:
            file.close()
    found = _LockFile(path, LOCK_LOOK_S)  # opened anew: so a client of a network file system asks its server
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


def lock_signature(world: World) -> str:
    """What the attempt that holds the lock writes into it."""
    return f"{world.start}, on {world.hosts[0]}"


def signed_by_job(signed: str, world: World) -> bool:
    """Whether a signature was written by any attempt of this job."""
    return signed.startswith(f"job {world.job_id}, ")


def signed_by_start(signed: str, world: World) -> bool:
    """Whether a signature was written by an attempt of this start of the job."""
    return signed.startswith(f"job {world.job_id}, restart {world.restart}, ")


def lock_holder(path: Path) -> str | None:
    """The signature of the attempt that holds the lock, such as "job 12, restart 0, on n1". None if it is not held, if
    the file system has no locks, or if the disk refuses to say."""
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().partition("\n")[0].strip()
    return None


@contextlib.contextmanager
def no_start(path: Path, before: Before | None = None) -> Iterator[str | None]:
    """Give the signature of the attempt that holds the lock. If none does, none can take it inside the `with`, unless
    the file system has no locks. Shared: a look is not mistaken for an attempt. Raises DiskError after LOCK_LOOK_S.
    """
    file = _LockFile(path, LOCK_LOOK_S)
    try:
        found = file.lock(fcntl.LOCK_SH)
        signed, process = file.read()
        held = found is _Found.HELD or (found is _Found.NO_LOCKS and (before or Before()).lives(signed, process))
        yield signed if held else None
    finally:
        file.close()
