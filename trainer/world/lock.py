"""One attempt at a time on a run folder: a second one would tear its metrics and checkpoints apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from trainer.config import ConfigError
from trainer.world.detect import World

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
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            if time.monotonic() > deadline:
                raise ConfigError(f"{path.parent.name}: another attempt is at work on this run ({holder})") from None
            if not said:
                print(f"[laststep] waiting for another attempt to leave this run ({holder})", flush=True)
                said = True
            time.sleep(POLL_S)
        except OSError as error:  # a file system without locks, as some Lustre mounts
            print(f"[laststep] {path}: cannot be locked here ({error.strerror}); start no second attempt", flush=True)
            return
        else:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"job {world.job_id} on {world.hosts[0]}\n".encode())
            return


def holder(path: Path) -> str | None:
    """Who has locked the run, as "job 12 on n1"; None when nobody has, or locks do not work here."""
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    return None
