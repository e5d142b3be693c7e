"""docs/recording.svg: the commands of README's first run on Slurm, which is preempted and resumes, as an animation."""

from __future__ import annotations

from tools.animation import animate
from tools.desk import Desk

COLUMNS = 100  # a progress line of one rank among several fits
# The commands, and the line after which Ctrl-C ends a command that follows a log.
JOURNEY: list[tuple[str, str | None]] = [
    ("python launch.py --nodes 2 --tasks-per-node 2 --name first", None),
    ("python launch.py logs first -f", r"step 1\d\d/"),
    ('sbatch -o /dev/null -p high -N4 --exclusive --wrap "sleep 5"', None),
    ("python launch.py logs first -f", r"step 2\d\d/"),
    ("python launch.py status first", None),
]


def recording(desk: Desk) -> str:
    """The animated SVG."""
    return animate([desk.types(command, COLUMNS, until) for command, until in JOURNEY], COLUMNS)
