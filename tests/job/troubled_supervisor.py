"""A supervisor in trouble: `python -m tests.job.troubled_supervisor WORDS...`, with the words of
laststep.job.supervisor. LASTSTEP_TEST_TROUBLE says what its trouble is:

    signalled   SIGTERM comes right after it has answered that the ranks start again, before it forks its own
    forks       the kernel has no process for it, three times in a row, at each start
    no forks    nor later
    disk        its first three operations of each kind on each file in the run's folder fail
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laststep.job import supervisor
from laststep.ranks.world import World
from laststep.records.attempts import write_answer
from laststep.rundir import RunDir

TIMES = 3
RESTART = RunDir("run").step_restart.name


def _write_answer(path: Path, world: World, again: bool) -> None:
    write_answer(path, world, again)
    os.kill(os.getpid(), signal.SIGTERM)


def failing(
    function: Callable[..., Any], number: int, applies: Callable[..., bool] = lambda *_: True, resets: bool = False
) -> Any:
    """The function, which fails with this error TIMES times before it succeeds, for each of its first arguments; with
    `resets` again after that."""
    failed: dict[str, int] = {}

    def fails(*words: Any, **more: Any) -> Any:
        about = re.sub(r"\.[0-9a-f]{16}\.tmp", ".tmp", str(words[:1]))  # temporary names are random
        if applies(*words) and failed.get(about, 0) < TIMES:
            failed[about] = failed.get(about, 0) + 1
            raise OSError(number, os.strerror(number))
        if resets:
            failed.pop(about, None)
        return function(*words, **more)

    return fails


def _in_run(path: Path, *_: Any) -> bool:
    return "/rescue/" in str(path) or path.name == "attempts.jsonl" or path.name.startswith(RESTART)


if __name__ == "__main__":
    patched: Any = supervisor
    patched.PAUSE_S, trouble = 0.05, os.environ["LASTSTEP_TEST_TROUBLE"]
    if trouble == "signalled":
        patched.write_answer = _write_answer
    elif trouble == "disk":
        for name, number in (("stat", errno.ESTALE), ("write_bytes", errno.ENOSPC), ("replace", errno.EIO)):
            setattr(Path, name, failing(getattr(Path, name), number, _in_run))
        patched.find_record = failing(patched.find_record, errno.ESTALE)
    else:
        os.fork = failing(os.fork, errno.EAGAIN, resets=True)
        if trouble == "no forks":
            patched.FORK_S = 0.0
    supervisor.main(sys.argv[1:])
