"""The lock of a run folder: only one attempt at a time may use it. Two would corrupt its metrics and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.say import say
from trainer.world.world import World

# How long to wait for a killed predecessor to exit. Its loader workers check for it every 5 s; after the death of a
# node, an NFS server keeps the node's locks for a lease of 90 s.
WAIT_S = {True: 120.0, False: 15.0}  # on Slurm and on Ray, elsewhere
POLL_S = 0.2


def acquire(path: Path, world: World) -> None:
    """Lock the run for as long as this process lives. Raises ConfigError when another attempt does not release it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: closing would unlock
    deadline = time.monotonic() + WAIT_S[world.on_slurm or world.launcher == "ray"]
    logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor).strip()
            if time.monotonic() > deadline:
                raise ConfigError(f"{path.parent.name}: another attempt is at work on this run ({holder})") from None
            if not logged:
                say(f"waiting for another attempt to release this run ({holder})")
                logged = True
            time.sleep(POLL_S)
        except OSError as error:  # a file system without locks, for example some Lustre mounts
            say(f"{path}: this file system has no locks ({error.strerror}); do not start a second attempt")
            return
        else:
            os.truncate(descriptor, 0)
            os.write(descriptor, signature(world).encode())
            os.fsync(descriptor)  # the file stays open, and a network file system would keep this on its host
            return


def still_ours(path: Path, world: World) -> bool:
    """Whether the run is still locked by this attempt, so that any of its ranks may stand in for rank 0.

    If rank 0 has died and no other attempt has taken the lock, this takes it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # never closed, as above
    with contextlib.suppress(OSError):  # locked by rank 0 or by another attempt, or no locks on this file system
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return _read(descriptor) == signature(world)


def signature(world: World) -> str:
    """The text that the attempt that holds the lock writes into it."""
    return f"{world.start}, on {world.hosts[0]}"


def belongs_to_job(signed: str, world: World) -> bool:
    """Whether a signature was written by any attempt of this job, the current start or an earlier one."""
    return signed.startswith(f"job {world.job_id}, ")


def current_holder(path: Path) -> str | None:
    """The signature of the attempt that holds the lock, such as "job 12, restart 0, on n1".

    None if it is not held, or if the file system has no locks.
    """
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    return None


@contextlib.contextmanager
def no_start(path: Path) -> Iterator[str | None]:
    """Give the signature of the attempt that holds the lock. If none does, none can take it inside the `with`.

    The lock is shared, as in `current_holder`: nobody who looks at the run is taken for an attempt.
    """
    with path.open("a+") as file:
        holder = None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
        except OSError:  # a file system without locks
            pass
        yield holder


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace")
