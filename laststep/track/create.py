"""Makes a tracker's run, for a script that sends to it: `RUN TRACKER` -> prints its id. See laststep/track/hooks.py."""

from __future__ import annotations

import sys

from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.track.section import wish_of
from laststep.track.sender import Sender


def main() -> int:
    """Returns the exit status."""
    run = RunDir(sys.argv[1])
    sender = Sender(run, wish_of(run_config.as_submitted(run), sys.argv[2]), lambda text: None)
    print(sender.create())
    return 0
