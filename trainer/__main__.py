"""One rank of a run on this machine: `python -m trainer RUN_FOLDER`. The local launcher starts these."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from trainer.config import Config, ConfigError
from trainer.trainer import Trainer
from trainer.world.signals import die_with_parent


def main(folder: str) -> int:
    """Train; returns the exit status, unless a stop's SystemExit carries it."""
    die_with_parent(signal.SIGTERM)  # when the launcher is killed its ranks stop, rather than train on unseen
    try:
        Trainer(Config.load(Path(folder) / "config.yaml"))()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
