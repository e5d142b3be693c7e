"""After a fault: the surviving ranks agree, through the run folder, on which of them saves the last finished step.

The key-value store may have died with rank 0, and so may the connections between the ranks. What is left is the file
system that they share. Survivors may be one step apart: the dead rank's last all-reduce may have reached only some of
them. So each writes down its step, and the rank with the latest step saves (among equals, the lowest rank). If that
rank dies too, the next one takes over. (Just-in-time checkpointing: Gupta et al., EuroSys 2024.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.say import say
from trainer.world.watchdog import Fault
from trainer.world.world import World

# All survivors notice a fault within half a second. Slurm may be about to kill them, so they wait little longer.
GATHER_S = 1.5
# How long each survivor waits for the one before it to save.
TURN_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True)
class Survivor:
    """A surviving rank, as its file in the run folder describes it."""

    rank: int
    step: int  # of its last whole state, -1 if it has none
    failure: Fault | None  # this rank's own, if it had one

    @classmethod
    def read(cls, file: Path) -> Survivor:
        """The survivor that wrote this file."""
        fields = json.loads(file.read_text())
        return cls(fields["rank"], fields["step"], fields["failure"] and Fault(**fields["failure"]))


def find_survivors(folder: Path, here: Survivor, size: int) -> list[Survivor]:
    """Add this rank to the survivors in `folder` and wait for the others; the latest step first. Raises OSError.

    Returns as soon as all `size` ranks are there, else after `GATHER_S`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"rank_{here.rank}.tmp"
    temporary.write_text(json.dumps(asdict(here)))
    temporary.replace(folder / f"rank_{here.rank}.json")
    deadline = time.monotonic() + GATHER_S
    while True:
        files = list(folder.glob("rank_*.json"))
        if len(files) == size or time.monotonic() > deadline:
            survivors = map(Survivor.read, files)
            return sorted(survivors, key=lambda survivor: (-survivor.step, survivor.rank))
        time.sleep(POLL_S)


def any_survivor(folder: Path) -> bool:
    """Whether any rank has begun its end by fault, and so given up on the others."""
    return any(folder.glob("rank_*.json"))


def explain(fault: Fault, survivors: list[Survivor], world: World) -> str:
    """The root cause: the error of a rank that failed by itself; else the ranks that are gone, which are printed."""
    if fault.cause:
        return fault.text
    causes = [survivor.failure.text for survivor in survivors if survivor.failure]
    if causes:
        return causes[0]
    alive = {survivor.rank for survivor in survivors}
    gone = [rank for rank in range(world.size) if rank not in alive]
    if not gone:
        return fault.text
    names = "; ".join(f"rank {rank} on {world.host_of(rank)}" for rank in gone)
    lost = f"{names}: gone (killed, out of memory, or its node died)"
    say(lost)
    return f"{lost}\n{fault.text}"


def take_turns(survivors: list[Survivor], rank: int, act: Callable[[], None], done: Callable[[], bool]) -> None:
    """Call `act` on the first survivor; on each other one only if those before it did not get it `done` in time."""
    for survivor in survivors:
        if survivor.rank == rank:
            if not done():
                act()
            return
        deadline = time.monotonic() + TURN_S
        while not done() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if done():
            return
