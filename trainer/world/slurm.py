"""What Slurm says, asked from inside a job."""

from __future__ import annotations

import signal

from trainer.world.detect import World

# Slurm checks time limits about once a minute, so `--signal=USR2@S` comes up to 60 s early (man sbatch).
EARLY_S = 60


def why_stopped(number: signal.Signals, world: World, signal_delay_s: int) -> str:
    """The reason that attempts.jsonl gives for a stop: preempted, timeout or cancelled."""
    return "preempted"
