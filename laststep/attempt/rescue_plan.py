"""What the leader of a rescue decides: which survivors write which part of the last finished step, and who commits it.

The newest place is saved at which the survivors hold every shard. Those that hold a shard share its bytes. Survivors
may be one step apart, so that they hold no step as a whole; those behind then do the update of the newest step, if that
completes it. Nothing here touches a file or a clock, as in laststep.attempt.rescue_roll.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from laststep.attempt.rescue_records import Holding, Part, Place, Plan
from laststep.attempt.rescue_roll import Roll
from laststep.checkpoint.pack import Stripe, stripe_count


def next_plan(plan: Plan | None, roll: Roll, new_generation: Callable[[], str]) -> Plan | None:
    """What to do now, given the plan so far. None: wait."""
    gathered = roll.to_advance()
    if gathered is not None and plan is not None and plan.gathered == gathered:
        return plan
    if gathered is not None and roll.has_settled:
        return Plan(new_generation(), roll.able[0].rank, None, gathered=gathered)
    if plan is None or plan.gathered is not None or _is_obsolete(plan, roll):
        plan = _with_another_actor(plan, roll) or _begin(roll, new_generation)
    if plan is None or plan.act:
        return plan
    plan = _share_anew(plan, roll)
    written = _written(plan, roll)
    if len(written) < len(plan.parts) or not roll.has_gathered(plan.place):
        return plan
    failures = tuple(one.failure for one in roll.found.values() if one.failure)
    return replace(
        plan,
        act=True,
        written=written,
        present=tuple(sorted(roll.found)),
        failures=failures,
        done_step=roll.done_step,
        lost_shards=_lost_shards(plan.place, roll),
        silences=tuple((rank, one.silence) for rank, one in sorted(roll.found.items()) if one.silence),
    )


def is_behind(plan: Plan, holdings: Iterable[Holding]) -> bool:
    """Whether these are all shards of a state that is further along than the one that the plan saves."""
    newer = [holding for holding in holdings if plan.place is None or holding.place > plan.place]
    return any(sum(other.place == one.place for other in newer) == one.shards for one in newer)


def _is_obsolete(plan: Plan, roll: Roll) -> bool:
    """Whether the plan cannot be carried out as it is, or a better state has been found."""
    best = roll.best
    if plan.place is None:
        return best is not None or plan.actor not in [one.rank for one in roll.able]
    if plan.actor not in roll.committers(plan.place) or (best is not None and best > plan.place):
        return True
    return not _is_complete(plan, plan.place, roll)


def _is_complete(plan: Plan, place: Place, roll: Roll) -> bool:
    """Whether each part of the plan is written, or can be."""
    written, shards = _written(plan, roll), roll.held().get(place, {})
    return all(part.file in written or part.shard in shards for part in plan.parts)


def _with_another_actor(plan: Plan | None, roll: Roll) -> Plan | None:
    """The plan with another actor, where the first is lost and its shard lives on in what it has written; else None:
    the survivors begin anew, in a folder where the first writes nothing if it comes back."""
    if plan is None or plan.place is None:
        return None
    committers, best = roll.committers(plan.place), roll.best
    can_begin_anew = best is not None and best >= plan.place
    if plan.actor in committers or not committers or can_begin_anew or not _is_complete(plan, plan.place, roll):
        return None
    return replace(plan, actor=committers[0], act=False)


def _begin(roll: Roll, new_generation: Callable[[], str]) -> Plan | None:
    held, place = roll.held(), roll.best
    if place is None:
        able = roll.able
        return Plan(new_generation(), able[0].rank, None) if able and roll.has_gathered(None) else None
    if not roll.has_settled:
        return None
    plan = Plan(new_generation(), roll.committers(place)[0], place)
    holdings = [holding for one in roll.able for holding in one.holdings if holding.place == place]
    if any(holding.saved or not holding.savable for holding in holdings):
        return plan
    sizes = {holding.shard: holding.bytes for holding in holdings}
    shares = (_shared(shard, Stripe(0, 1), sizes[shard], held[place][shard]) for shard in range(roll.shards))
    return replace(plan, parts=tuple(part for parts in shares for part in parts))


def _shared(shard: int, stripe: Stripe, count: int, ranks: Sequence[int]) -> Iterable[Part]:
    """A stripe of a shard of `count` bytes, cut into parts for the ranks that hold it. Where there are fewer parts than
    ranks, they go to ranks far apart, so to different nodes."""
    parts = stripe_count(count // stripe.of, len(ranks))
    for number in range(parts):
        yield Part(shard, stripe.number * parts + number, stripe.of * parts, ranks[number * len(ranks) // parts])


def _share_anew(plan: Plan, roll: Roll) -> Plan:
    """The plan in which the others write what a lost writer has not completed."""
    if plan.place is None:
        return plan
    held, written = roll.held().get(plan.place, {}), _written(plan, roll)
    parts: list[Part] = []
    for part in plan.parts:
        if part.file in written or part.rank in held.get(part.shard, ()):
            parts.append(part)
        else:
            size = _size(plan.place, part.shard, roll)
            parts.extend(_shared(part.shard, part.stripe, size, held[part.shard]))
    return replace(plan, parts=tuple(parts))


def _size(place: Place, shard: int, roll: Roll) -> int:
    """The bytes of a shard that a survivor holds."""
    holdings = (holding for one in roll.able for holding in one.holdings)
    return next(holding.bytes for holding in holdings if (holding.place, holding.shard) == (place, shard))


def _written(plan: Plan, roll: Roll) -> dict[str, Any]:
    """The parts that are written and hashed, with their entries in the manifest, in the order of their bytes."""
    found = {}
    for part in plan.parts:
        writer = roll.found.get(part.rank)
        if writer and writer.generation == plan.generation and part.file in writer.written:
            found[part.file] = writer.written[part.file]
    return found


def _lost_shards(place: Place | None, roll: Roll) -> tuple[int, ...]:
    """The shards that no survivor can write of the newest step that any of them holds, if that step is not saved."""
    held = roll.held()
    newest = max(held, default=None)
    if newest is None or (place is not None and place >= newest):
        return ()
    return tuple(shard for shard in range(roll.shards) if shard not in held[newest])
