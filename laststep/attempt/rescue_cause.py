"""Who is at fault, as a rescue sees it: for the log, the record of the attempt and the choice of nodes."""

from __future__ import annotations

from laststep.attempt.rescue_records import Plan
from laststep.ranks.watchdog import Fault
from laststep.ranks.world import World
from laststep.say import say


def blamed_hosts(fault: Fault, plan: Plan, missing: list[int], world: World) -> list[str]:
    """The hosts whose fault it seems to be: of ranks that are stuck, that are gone without an error of their own, or
    whose GPU has failed. Any other error blames no host: it may be a bug."""
    known = [fault] if fault.blames or fault.cause else plan.failures
    hosts = ",".join(one.blames for one in known).split(",") if known else [world.hosts[rank] for rank in missing]
    return list(dict.fromkeys(filter(None, hosts)))


def explain(fault: Fault, plan: Plan, missing: list[int], world: World) -> str:
    """The root cause: the error of a rank that failed by itself; else the ranks that are gone, which are printed."""
    if fault.cause:
        return fault.text
    if plan.failures:
        return plan.failures[0].text
    if not missing:
        return fault.text
    names = "; ".join(f"rank {rank} on {world.host_of(rank)}" for rank in missing)
    lost = f"{names}: gone (killed, out of memory, or its node died)"
    say(lost)
    says_as_much = fault.text in [has_ended(rank, world) for rank in missing]
    return lost if says_as_much else f"{lost}\n{fault.text}"


def has_ended(rank: int, world: World) -> str:
    """What is reported of a rank whose process has ended."""
    return f"rank {rank} on {world.host_of(rank)} has ended"


def silent_devices(plan: Plan, world: World) -> str:
    """Why survivors could not save what they hold; a line for each whose device does not answer."""
    return "\n".join(f"rank {rank} on {world.host_of(rank)} saves nothing: {why}" for rank, why in plan.silences)


def lost_shards(plan: Plan, end_step: int, saved_step: int) -> str:
    """Why the survivors cannot save the last step."""
    names = ", ".join(map(str, plan.lost_shards))
    shards = f"shard {names} is" if len(plan.lost_shards) == 1 else f"shards {names} are"
    return f"step {end_step} cannot be saved: {shards} held by no surviving rank; the run is back at step {saved_step}"
