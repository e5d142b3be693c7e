"""One attempt at a time on a run folder: a second one would tear its metrics and checkpoints apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.say import say
from trainer.world.world import World

# A killed predecessor may still be on its way out: its loader workers look for it every 5 s, and after the death of a
# node an NFS server holds its locks for a lease of 90 s.
PATIENCE_S = {True: 120.0, False: 15.0}  # on Slurm, elsewhere
POLL_S = 0.2


def hold(path: Path, world: World) -> None:
    """Lock the run for as long as this process lives. Raises ConfigError when another attempt keeps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: closing would unlock
    deadline = time.monotonic() + PATIENCE_S[world.on_slurm]
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at_work = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            if time.monotonic() > deadline:
                raise ConfigError(f"{path.parent.name}: another attempt is at work on this run ({at_work})") from None
            if not said:
                say(f"waiting for another attempt to leave this run ({at_work})")
                said = True
            time.sleep(POLL_S)
        except OSError as error:  # a file system without locks, as some Lustre mounts
            say(f"{path}: cannot be locked here ({error.strerror}); start no second attempt")
            return
        else:
            os.truncate(descriptor, 0)
            os.write(descriptor, signature(world).encode())
            return


def still_holds(path: Path, world: World) -> bool:
    """Whether the run is still this attempt's, so that a rank may stand in for rank 0: rank 0 lives and has the lock,
    or it has died and nobody else has taken the lock yet, which then is taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):  # held by rank 0 or by another attempt, or no locks here
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.pread(descriptor, 1000, 0).decode(errors="replace") == signature(world)


def signature(world: World) -> str:
    """How an attempt signs the lock that it holds."""
    return f"job {world.job_id}, restart {world.restart}, on {world.hosts[0]}"


def is_of_job(signed: str, world: World) -> bool:
    """Whether a signature is that of an attempt of this job, perhaps of an earlier start of it."""
    return signed.startswith(f"job {world.job_id}, ")


def holder(path: Path) -> str | None:
    """Who has locked the run, as "job 12, restart 0, on n1"; None when nobody has, or locks do not work here."""
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    return None
