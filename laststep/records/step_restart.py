"""restart.json: whether the ranks of an attempt start again within their Slurm step.

The supervisor of rank 0 writes it, those of the other ranks wait for it, and the batch shell reads from it how
often the ranks were started without its knowledge.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from laststep.ranks.world import World
from laststep.rundir import aside


class Answer(NamedTuple):
    """What follows an attempt."""

    after: str  # the attempt's name, see World
    again: bool  # whether the ranks start again
    job_id: str
    restart: int
    starts: int  # how often ranks were started again within a step, in this start of the job


def write_answer(path: Path, world: World, again: bool) -> None:
    """Answer the supervisors of all ranks; repeated, it changes nothing. Raises OSError when the disk refuses."""
    before = _read(path)
    starts = before.starts if before and (before.job_id, before.restart) == (world.job_id, world.restart) else 0
    if before and before.after == world.attempt:
        starts -= before.again
    answer = Answer(world.attempt, again, world.job_id, world.restart, starts + again)
    temporary = aside(path)
    temporary.write_text(json.dumps(answer._asdict()))
    temporary.replace(path)


def read_answer(path: Path) -> Answer | None:
    """The newest answer, None if there is none that can be read."""
    with contextlib.suppress(OSError):
        return _read(path)
    return None


def _read(path: Path) -> Answer | None:
    """The newest answer, None if there is none. Raises OSError when the disk does not say."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return Answer(**json.loads(path.read_text()))
    return None


def count_in_steps(path: Path, world: World) -> int:
    """How often ranks were started again within a step, in this start of the job."""
    answer = read_answer(path)
    return answer.starts if answer and (answer.job_id, answer.restart) == (world.job_id, world.restart) else 0
