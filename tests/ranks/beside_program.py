"""A program for tests/ranks/test_beside.py to run beside a process: it notes what it is, and then waits."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Words: a folder, what to do about SIGTERM, or `die`, to end at once."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    ended = False

    def end(number: int, frame: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "ignore" else end)
    seen = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "nice": os.nice(0),
        "memory": resource.getrlimit(resource.RLIMIT_AS)[0],
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
        "more_files": [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2][1:],  # one is that of the folder
    }
    with (folder / "starts").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    print("begun", flush=True)
    while what != "die" and not ended:
        time.sleep(0.02)
    (folder / "ended").touch()


if __name__ == "__main__":
    main()
