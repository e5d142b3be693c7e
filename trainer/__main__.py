"""`python -m trainer`: one rank of a run, under any launcher; see trainer.commands.rank."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Blocked until Signals.catch can catch them: a signal that arrived earlier would kill the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT})

    from trainer.commands.rank import main
    from trainer.config.errors import ConfigError
    from trainer.world.world import MeetingError

    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, MeetingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
