"""A supervisor that receives SIGTERM right after it has answered that the ranks start again, before it forks its own:
`python -m tests.support.signalled_supervisor WORDS...`, with the words of trainer.cluster.supervisor."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from trainer.cluster import supervisor
from trainer.records.step_restart import write_answer
from trainer.world.world import World


def _write_answer(path: Path, world: World, again: bool) -> None:
    write_answer(path, world, again)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    supervisor.write_answer = _write_answer  # type: ignore[attr-defined]
    supervisor.main(sys.argv[1:])
