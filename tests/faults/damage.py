"""Faults around the ranks: the disk, the checkpoints, the clock, and a second attempt at the same run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from laststep.ranks import disk
from tests.faults.plan import Fault, Inject, Loss, Moment, Return, Shot
from tests.faults.signals import AT_WORK, WITH_RANKS, requeue
from tests.faults.victim import Missed, Victim, identity

MANIFEST = "manifest.json"


class Unrefused(Exception):
    """A second attempt at a run was not refused."""


def fill_disk(victim: Victim, shot: Shot) -> None:
    """Fill the disk, and free it a little later."""
    ballast = victim.run.path.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(b"\0")  # to the last byte
    victim.later(0.5 + 2.5 * shot.aim, ballast.unlink)


def fill_disk_at_stop(victim: Victim, shot: Shot) -> None:
    """Fill the disk before the ranks stop, and free it before their grace time ends."""
    fill_disk(victim, shot)
    requeue(victim, shot)


def damage(how: Callable[[list[Path], float], None]) -> Inject:
    """Damage the newest checkpoint while the job waits in the queue."""

    def inject(victim: Victim, shot: Shot) -> None:
        checkpoints = victim.checkpoints()
        if victim.ranks() or not checkpoints:
            raise Missed("the job is already running" if checkpoints else "there is no checkpoint yet")
        newest = max(checkpoints, key=lambda path: (identity(path) not in victim.own, path.name))
        how(sorted(path for path in newest.iterdir() if path.name != MANIFEST), shot.aim)
        victim.own.add(identity(newest))

    return inject


def truncate(files: list[Path], aim: float) -> None:
    """Cut off the end of a file."""
    path = _one_of(files, aim)
    os.truncate(path, int(path.stat().st_size * aim))


def flip(files: list[Path], aim: float) -> None:
    """Flip one bit."""
    path = _one_of(files, aim)
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * aim))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << int(8 * aim)]))


def half_delete(files: list[Path], aim: float) -> None:
    """Delete the first half of the files, at least one."""
    for path in files[: max(1, len(files) // 2)]:
        path.unlink()


def lose_manifest(files: list[Path], aim: float) -> None:
    """Delete the manifest: the other files remain, but it is impossible to check whether they are intact."""
    files[0].with_name(MANIFEST).unlink()


def _one_of(files: list[Path], aim: float) -> Path:
    return files[int(aim * 1000) % len(files)]


def step_clock(victim: Victim, shot: Shot) -> None:
    """Set the clock up to a day forwards or backwards, and back a few seconds later."""
    seconds = int((shot.aim - 0.5) * 2 * 86_400)
    victim.set_clock(seconds)
    time.sleep(1 + 3 * shot.aim)
    victim.set_clock(0)


def resume_twice(victim: Victim, shot: Shot) -> None:
    """Resume a run that is running: the command must refuse, and say why."""
    _refused(victim, "resume", victim.run.name)


def start_beside(victim: Victim, shot: Shot) -> None:
    """Resume a run on a machine without Slurm, which cannot see its job: the ranks must find the folder locked."""
    if disk.lock_holder(victim.run.lock) is None:  # Slurm has just ended the attempt once more
        raise Missed("no rank is running")
    empty = victim.aside / "no-slurm-here"
    empty.mkdir(exist_ok=True)
    _refused(victim, "resume", victim.run.name, "--local", env={"PATH": str(empty)})


def _refused(victim: Victim, *words: str, env: dict[str, str] | None = None) -> None:
    """Type a command, which must be refused as long as the attempt lasts."""
    before = len(victim.records())

    def is_over() -> bool:
        return len(victim.records()) > before

    try:
        done = victim.site.launch(*words, f"launch.root={victim.run.path.parent}", env=env, gives_up=is_over)
    except subprocess.TimeoutExpired as error:
        if is_over():
            raise Missed("Slurm has just ended the attempt once more") from None
        raise Unrefused(f"`launch.py {' '.join(words)}` was not refused in {error.timeout:.0f} s") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 or "error: " not in said:
        raise Unrefused(f"`launch.py {' '.join(words)}` was not refused, exit status {done.returncode}: {said[-500:]}")


HOLD, NEWEST, STAYS = (Moment.HOLD,), Loss.NEWEST, Return.STAYS
STEADY = (Moment.STEP, Moment.SAVE, Moment.VALIDATION)
FAULTS = [
    Fault(
        "disk-full",
        "disk full for 0.5 to 3 s",
        fill_disk,
        STEADY,
        Loss.SINCE_SAVE,
        Return.PERHAPS,
        lambda run: run.disk,
        saves_again=True,
    ),
    Fault("disk-full-at-stop", "requeue while the disk is full", fill_disk_at_stop, STEADY, needs=lambda run: run.disk),
    Fault("truncated", "newest checkpoint truncated", damage(truncate), HOLD, NEWEST),
    Fault("bit-flipped", "a bit of the newest checkpoint flipped", damage(flip), HOLD, NEWEST),
    Fault("half-deleted", "half the files of the newest checkpoint deleted", damage(half_delete), HOLD, NEWEST),
    Fault("no-manifest", "manifest of the newest checkpoint deleted", damage(lose_manifest), HOLD, NEWEST),
    Fault(
        "clock-step",
        "clock wrong by up to a day for 1 to 4 s",
        step_clock,
        AT_WORK,
        returns=STAYS,
        needs=lambda run: run.clock,
    ),
    Fault("resume-twice", "`launch.py resume` of a running run", resume_twice, WITH_RANKS, returns=STAYS),
    Fault(
        "start-beside",
        "ranks started on a running run",
        start_beside,
        (Moment.STEP,),
        returns=STAYS,
        slow=True,
    ),
]
