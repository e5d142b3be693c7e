"""Where and how a run is to start: what each room's `check(config, machine)` knows besides the configuration."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class Way(enum.Enum):
    """Where the ranks run, and whether the command stays."""

    SLURM = "slurm"  # in a job; the command returns
    FOLLOW = "follow"  # in a job; the command prints rank 0's log until the run ends
    LOCAL = "local"  # all on this machine, as processes of the command
    DEBUG = "debug"  # one rank, in the process of the command
    DRY_RUN = "dry_run"  # nowhere: what would be submitted is printed
    RANK = "rank"  # this process is a rank, started by another launcher (torchrun, srun, mpirun)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Way:
        """The way chosen by the options of submit and resume; each option is named like its way. With --local or
        --debug, --dry-run shows what that would do."""
        optional = (cls.LOCAL, cls.DEBUG, cls.DRY_RUN, cls.FOLLOW)
        return next((way for way in optional if getattr(args, way.value)), cls.SLURM)


@dataclass(frozen=True)
class Machine:
    """What a start is checked against."""

    way: Way
    new: bool = True  # else the run exists, and keeps what it was submitted with
    sweep: bool = False  # launch.name names a sweep of new runs, which may exist
    search: Sequence[Path] = ()  # the folders where the ranks look for modules first; by default the current one
    words: Sequence[str] = ()  # the `key=value` words that the user typed
    source: str | None = None  # the YAML file that the user named

    @property
    def submits(self) -> bool:
        """Whether a job is handed to Slurm."""
        return self.way in (Way.SLURM, Way.FOLLOW)

    @property
    def is_here(self) -> bool:
        """Whether all ranks run on this machine, started by this command."""
        return self.way in (Way.LOCAL, Way.DEBUG)

    @property
    def places(self) -> list[Path]:
        """The folders where the ranks look for modules first."""
        return list(self.search) or [Path.cwd()]
