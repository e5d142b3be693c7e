"""`python -m laststep`: one rank of a run, under any launcher; see laststep.cli.rank.

--local starts the supervisors of its ranks with this folder's path instead of `-m laststep`, and `--supervised FOLDER`.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Blocked until Signals.catch can catch them: a signal that arrived earlier would kill the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT})

    folder = os.path.dirname(os.path.abspath(__file__))
    by_path = sys.path[0] == folder
    if by_path:
        sys.path[0] = os.path.dirname(folder)
    from laststep.cli.rank import main
    from laststep.config.errors import ConfigError
    from laststep.ranks.fault import ONE_LINE
    from laststep.say import note

    words = sys.argv[1:]
    if words[:1] == ["--supervised"]:
        from laststep.job.supervisor import supervise_local

        words.pop(0)
        supervise_local(words[0])
    if by_path:  # what is imported from here on is looked up in the current folder first, as with -m
        sys.path[0] = os.getcwd()
    try:
        sys.exit(main(words))
    except ONE_LINE as error:
        note(f"error: {error}")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
