"""After a fault: the ranks that are left agree, in the run folder, on who saves the last whole step.

The store that they met over may have died with rank 0, and so may the connections between them. What is left is the
file system that they share. Survivors may stand one step apart: the dead rank's last sum may have reached some of them
only. So each writes down how far it is, the furthest one saves (the lowest rank, among equals), and should it die too,
the next one does. (Just-in-time checkpointing: Gupta et al., EuroSys 2024.)
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

# Ranks hear of a fault within half a second; the dead cannot be waited for, and Slurm may be about to end the living.
GATHER_S = 1.5
# How long the next in line waits for the one before it.
TURN_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True)
class Survivor:
    """What a rank that is left says of itself. `failure` is its own, if it had one."""

    rank: int
    step: int  # of its last whole state, -1 when it has none
    failure: Fault | None

    @classmethod
    def read(cls, file: Path) -> Survivor:
        """What a survivor wrote."""
        said = json.loads(file.read_text())
        return cls(said["rank"], said["step"], said["failure"] and Fault(**said["failure"]))


def gather(folder: Path, survivor: Survivor, size: int) -> list[Survivor]:
    """Say that this rank is left, and hear who else is; the furthest first. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"rank_{survivor.rank}.tmp"
    temporary.write_text(json.dumps(asdict(survivor)))
    temporary.replace(folder / f"rank_{survivor.rank}.json")
    deadline = time.monotonic() + GATHER_S
    while True:
        files = list(folder.glob("rank_*.json"))
        if len(files) == size or time.monotonic() > deadline:
            survivors = map(Survivor.read, files)
            return sorted(survivors, key=lambda s: (-s.step, s.rank))
        time.sleep(POLL_S)


def given_up(folder: Path) -> bool:
    """Whether any rank has said that it is left."""
    return any(folder.glob("rank_*.json"))


def explain(fault: Fault, survivors: list[Survivor], world: World) -> str:
    """What failed first: the error of a rank that had one of its own; else which ranks are gone."""
    if fault.cause:
        return fault.text
    causes = [survivor.failure.text for survivor in survivors if survivor.failure]
    if causes:
        return causes[0]
    here = {survivor.rank for survivor in survivors}
    gone = [rank for rank in range(world.size) if rank not in here]
    if not gone:
        return fault.text
    names = "; ".join(f"rank {rank} on {world.host_of(rank)}" for rank in gone)
    lost = f"{names}: gone (killed, out of memory, or its node died)"
    say(lost)
    return f"{lost}\n{fault.text}"


def take_turns(survivors: list[Survivor], rank: int, act: Callable[[], None], done: Callable[[], bool]) -> None:
    """Call `act` when it is this rank's turn, unless it is `done` by then."""
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
