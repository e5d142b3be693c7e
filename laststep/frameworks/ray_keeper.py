"""`python ray_keeper.py COMMAND...`: starts one rank for a worker of Ray, and outlives that worker.

Ray kills a worker without notice, and with it the processes that the worker has started. So the keeper detaches itself
from the worker. When the worker closes the keeper's input, or dies, the keeper sends the rank a signal to stop: the
rank saves its last step, together with the other ranks. When the rank has ended, the keeper writes its exit status to
its output.

Python runs this file alone, without Laststep.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Start the rank, and wait for its end."""
    if os.fork():
        os._exit(0)
    os.setsid()
    # The keeper never unblocks them, the rank does when it can catch them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT})
    rank = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=2)

    def stop() -> None:
        os.read(0, 1)
        rank.send_signal(signal.SIGUSR2)  # recorded as a preemption

    threading.Thread(target=stop, daemon=True).start()
    status = rank.wait()
    with contextlib.suppress(OSError):  # the worker is gone
        os.write(1, str(status).encode())


if __name__ == "__main__":
    main()
