"""A stand-in for a rank: `python -m tests.job.supervised LOGS` writes down each start and its signals, then waits.

It does so in the folder LASTSTEP_TEST_RANKS. It ends with the status in the file `end.RANK.RESTARTS`, or by the signal
whose negative number is there. Once there is a FIFO `stuck.RANK.RESTARTS`, it waits in the kernel (state D of man 5
proc) until something opens that for writing. Meanwhile rank 1 holds the file LASTSTEP_TEST_HELD open, if there is such
a variable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from laststep.ranks.launchers import detect_world
from laststep.ranks.process import STOP_SIGNALS

if __name__ == "__main__":
    world = detect_world()
    me = f"{world.rank}.{world.step_restarts}"
    folder = Path(os.environ["LASTSTEP_TEST_RANKS"])

    if world.rank == 1 and (path := os.environ.get("LASTSTEP_TEST_HELD")):
        held = Path(path).open("w")  # noqa: SIM115

    def caught(number: int, _: object) -> None:
        (folder / f"signal.{me}").write_text(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, caught)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    (folder / f"began.{me}.tmp").write_text(str(os.getpid()))
    (folder / f"began.{me}.tmp").rename(folder / f"began.{me}")
    fifo, opens = folder / f"stuck.{me}", os.O_RDONLY
    while not (folder / f"end.{me}").exists():
        if fifo.exists():  # a parent waits in the kernel until its child has opened what its program begins with
            os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 3, fifo, opens, 0)])
            fifo.unlink()
        time.sleep(0.01)
    status = int((folder / f"end.{me}").read_text())
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
