"""What the leader of a rescue decides: which survivors write which part of the last finished step, and who commits it.

Nothing here touches a file or a clock. Time is counted in rounds of the leader, so neither a clock that was set nor a
process that was suspended makes a rank look dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.checkpoint.stripes import Stripe, stripe_count
from trainer.world.watchdog import Fault

# Ranks that have not signed in are waited for this long after the last one that did, before anything is committed: they
# may be a step ahead. All survivors notice a fault within half a second.
GATHER_S = 1.5
# The same while no survivor has a whole state, so that everything depends on the ranks that are missing.
ALONE_S = 15.0
# Writing begins this long after the last rank has said what it holds.
SETTLE_S = 0.3
# A survivor whose heartbeat stands still for this long is taken for dead; if it comes back, it takes part again.
SILENT_S = 5.0
# A survivor that is alive but gets nothing done for this long, because its device or its disk hangs, is given up.
STUCK_S = 30.0

Place = tuple[int, int, bool, bool]  # see `Position.place`


@dataclass(frozen=True)
class Holding:
    """The whole state that a survivor has frozen."""

    place: Place
    bytes: int
    saved: bool  # whether there is a checkpoint of it
    savable: bool = True  # whether a rank alone has all of it


@dataclass(frozen=True)
class Survivor:
    """A surviving rank, as it describes itself."""

    rank: int
    began_step: bool = False  # in this attempt: only then can a step be lost
    failure: Fault | None = None  # this rank's own, if it had one
    beat: int = 0
    progress: int = 0  # counts what it has done, to the chunk
    frozen: bool = False  # whether it knows what it holds
    holding: Holding | None = None  # None: no whole state
    unable: str | None = None  # why it could not save its state
    generation: str = ""  # of the plan that `written` and `acted` belong to
    written: dict[str, Any] = field(default_factory=dict)  # the manifest's entry of each part that it wrote, by file
    acted: bool = False  # it has committed and recorded, as the plan asked

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Survivor:
        """The survivor with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        holding = fields["holding"] and Holding(**{**fields["holding"], "place": tuple(fields["holding"]["place"])})
        return cls(**{**fields, "failure": fields["failure"] and Fault(**fields["failure"]), "holding": holding})


@dataclass(frozen=True)
class Part:
    """A stripe of the state, and the rank that writes it."""

    number: int
    of: int
    rank: int

    @property
    def stripe(self) -> Stripe:
        """The bytes that it covers."""
        return Stripe(self.number, self.of)

    @property
    def file(self) -> str:
        """The name of its file until the commit. No two ranks write to one file."""
        return f"part_{self.number}-of-{self.of}-by-{self.rank}.bin"


@dataclass(frozen=True)
class Plan:
    """Who does what. A plan with another `generation` has nothing in common with the one before it, not even files."""

    generation: str
    actor: int  # the rank that commits and records the end; the lowest of those that write
    place: Place | None  # of the state to save; None: nobody has one
    parts: tuple[Part, ...] = ()  # in the order of their bytes; empty if the state is saved already, or cannot be saved
    act: bool = False  # everything is written, and nobody is waited for: the actor acts
    written: dict[str, Any] = field(default_factory=dict)  # with `act`: the manifest's entry of each part, by file
    present: tuple[int, ...] = ()  # with `act`: the ranks that signed in
    failures: tuple[Fault, ...] = ()  # with `act`: theirs
    done_step: int = -1  # with `act`: the highest step that any of them said it has whole

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Plan:
        """The plan with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        return cls(
            **{
                **fields,
                "place": fields["place"] and tuple(fields["place"]),
                "parts": tuple(Part(**part) for part in fields["parts"]),
                "present": tuple(fields["present"]),
                "failures": tuple(Fault(**failure) for failure in fields["failures"]),
            }
        )


class Roll:
    """The survivors, as the leader has seen them in its rounds."""

    def __init__(self, size: int, round_s: float) -> None:
        self.size = size
        self.found: dict[int, Survivor] = {}
        self.gone: set[int] = set()  # ranks whose process has ended
        self._round_s = round_s
        self._silent: dict[int, int] = {}  # rounds without a new heartbeat
        self._idle: dict[int, int] = {}  # rounds without anything done
        self._unjoined = self._unannounced = 0  # rounds since the last rank signed in, or said what it holds

    def observe(self, survivors: Iterable[Survivor], plan: Plan | None) -> None:
        """One round: the survivors whose files could be read, while this plan is in force."""
        before, self.found = self.found, {**self.found, **{one.rank: one for one in survivors}}
        joined = announced = False
        for rank, one in self.found.items():
            old = before.get(rank)
            joined |= old is None
            announced |= one.frozen and not (old and old.frozen)
            self._silent[rank] = self._silent[rank] + 1 if old and old.beat == one.beat else 0
            idle = old is not None and replace(old, beat=one.beat) == one and _has_work(one, plan)
            self._idle[rank] = self._idle[rank] + 1 if idle else 0
        self._unjoined = 0 if joined else self._unjoined + 1
        self._unannounced = 0 if joined or announced else self._unannounced + 1

    @property
    def alive(self) -> list[Survivor]:
        """Those whose heart beats, the lowest rank first."""
        return [self.found[rank] for rank in sorted(self.found) if self._silent[rank] * self._round_s < SILENT_S]

    @property
    def able(self) -> list[Survivor]:
        """Those of them that get something done."""
        return [one for one in self.alive if not self._is_stuck(one.rank)]

    @property
    def holders(self) -> list[Survivor]:
        """Those of them that can save the state that is furthest along."""
        holders = [one for one in self.able if one.holding and one.unable is None]
        best = max((one.holding.place for one in holders if one.holding), default=None)
        return [one for one in holders if one.holding and one.holding.place == best]

    @property
    def all_frozen(self) -> bool:
        """Whether each survivor has said what it holds, as far as it ever will."""
        return all(one.frozen or self._is_stuck(one.rank) for one in self.alive)

    @property
    def has_settled(self) -> bool:
        """Whether writing should begin with the holders known so far."""
        everybody = self.all_frozen and self._is_complete
        return everybody or self._unannounced * self._round_s >= SETTLE_S

    @property
    def has_gathered(self) -> bool:
        """Whether nobody is waited for any more: neither survivors that freeze nor ranks that did not sign in."""
        if not self.all_frozen:
            return False
        all_at_stake = not self.holders and any(one.began_step for one in self.found.values())
        patience_s = ALONE_S if all_at_stake else GATHER_S
        return self._is_complete or self._unjoined * self._round_s >= patience_s

    @property
    def _is_complete(self) -> bool:
        """Whether no rank is left that could still sign in."""
        return not self.unseen

    @property
    def unseen(self) -> set[int]:
        """The ranks that may live, but have not signed in."""
        return set(range(self.size)) - self.found.keys() - self.gone

    def _is_stuck(self, rank: int) -> bool:
        return self._idle[rank] * self._round_s >= STUCK_S


def next_plan(plan: Plan | None, roll: Roll, new_generation: Callable[[], str]) -> Plan | None:
    """What to do now, given the plan so far. None: wait."""
    if plan is None or _is_obsolete(plan, roll):
        plan = _begin(roll, new_generation)
    if plan is None or plan.act:
        return plan
    plan = _share_anew(plan, roll)
    written = _written(plan, roll)
    if len(written) < len(plan.parts) or not roll.has_gathered:
        return plan
    steps = [one.holding.place[0] for one in roll.found.values() if one.holding]
    failures = tuple(one.failure for one in roll.found.values() if one.failure)
    return replace(
        plan,
        act=True,
        written=written,
        present=tuple(sorted(roll.found)),
        failures=failures,
        done_step=max(steps, default=-1),
    )


def is_behind(plan: Plan, holding: Holding | None) -> bool:
    """Whether this state is further along than the one that the plan saves."""
    return holding is not None and (plan.place is None or holding.place > plan.place)


def _has_work(one: Survivor, plan: Plan | None) -> bool:
    """Whether the rescue waits for this survivor to do something."""
    if plan is None or not one.frozen:
        return not one.frozen
    if plan.act:
        return plan.actor == one.rank
    written = one.written if one.generation == plan.generation else {}
    return any(part.rank == one.rank and part.file not in written for part in plan.parts)


def _is_obsolete(plan: Plan, roll: Roll) -> bool:
    """Whether the plan's actor is lost, or a better state has been found."""
    holders = roll.holders
    lost = plan.actor not in [one.rank for one in (roll.able if plan.place is None else holders)]
    return lost or any(is_behind(plan, one.holding) for one in holders)


def _begin(roll: Roll, new_generation: Callable[[], str]) -> Plan | None:
    holders = roll.holders
    if not holders:
        able = roll.able
        return Plan(new_generation(), able[0].rank, None) if able and roll.has_gathered else None
    if not roll.has_settled:
        return None
    first = holders[0]
    assert first.holding is not None
    plan = Plan(new_generation(), first.rank, first.holding.place)
    if any(one.holding and (one.holding.saved or not one.holding.savable) for one in holders):
        return plan
    return replace(plan, parts=tuple(_shared(Stripe(0, 1), first.holding.bytes, holders)))


def _shared(stripe: Stripe, count: int, holders: list[Survivor]) -> Iterable[Part]:
    """A stripe of a state of `count` bytes, cut into parts for the holders. Where there are fewer parts than holders,
    they go to ranks far apart, so to different nodes."""
    parts = stripe_count(count // stripe.of, len(holders))
    for number in range(parts):
        rank = holders[number * len(holders) // parts].rank
        yield Part(stripe.number * parts + number, stripe.of * parts, rank)


def _share_anew(plan: Plan, roll: Roll) -> Plan:
    """The plan in which the others write what a lost writer has not completed."""
    holders = [one for one in roll.holders if one.holding and one.holding.place == plan.place]
    able, written = {one.rank for one in holders}, _written(plan, roll)
    parts: list[Part] = []
    for part in plan.parts:
        if part.file in written or part.rank in able:
            parts.append(part)
        else:
            assert holders[0].holding is not None
            parts.extend(_shared(part.stripe, holders[0].holding.bytes, holders))
    return replace(plan, parts=tuple(parts))


def _written(plan: Plan, roll: Roll) -> dict[str, Any]:
    """The parts that are written and hashed, with their entries in the manifest, in the order of their bytes."""
    found = {}
    for part in plan.parts:
        writer = roll.found.get(part.rank)
        if writer and writer.generation == plan.generation and part.file in writer.written:
            found[part.file] = writer.written[part.file]
    return found
