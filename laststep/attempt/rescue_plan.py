"""What the leader of a rescue decides: which survivors write which stripe of the last step, and who commits it.

A state consists of shards: one that is not sharded is a single shard, of which each rank has a replica. A survivor may
hold several shards, and one shard of several steps: what it trains with, and copies in host memory. The newest moment
is saved at which the survivors hold every shard; those that hold a shard share its bytes. Where they hold no step as a
whole, those one step behind do the update of the newest step, if that completes it.

Nothing here touches a file or a clock. Time is counted in rounds of the leader, so a process that was suspended does
not make a rank look dead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from laststep.checkpoint.files import Stripe, stripe_count
from laststep.ranks.fault import Fault
from laststep.ranks.world import Gathered, Moment


@dataclass(frozen=True)
class Holding:
    """A shard of a state that a survivor can write. It has at most one with this moment and shard."""

    moment: Moment
    bytes: int  # of the shard
    saved: bool  # whether there is a checkpoint of this state
    savable: bool = True  # whether the ranks that hold the shards have all of the state
    shard: int = 0
    shards: int = 1  # that the state consists of
    commits: bool = True  # whether this rank can also write what is no part of a shard, and so commit
    advances: bool = False  # whether this rank can do the update after it, given what others have gathered


@dataclass(frozen=True)
class Survivor:
    """A surviving rank, as it describes itself."""

    rank: int
    began_step: bool = False  # in this attempt: only then can a step be lost
    failure: Fault | None = None  # this rank's own, if it had one
    beat: int = 0
    progress: int = 0  # counts what it has done, to the chunk
    frozen: bool = False  # whether it knows what it holds
    holdings: tuple[Holding, ...] = ()
    gathered: Gathered | None = None  # by all ranks, at the end of the last step of which it knows that
    silence: str = ""  # why its device cannot be read; the holdings are those in host memory
    unable: str | None = None  # why it could not save its state
    generation: str = ""  # of the plan that `written` and `acted` belong to
    written: dict[str, Any] = field(default_factory=dict)  # the manifest's entry of each stripe that it wrote, by file
    acted: bool = False  # it has committed and recorded, as the plan asked

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Survivor:
        """The survivor with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        holdings = tuple(Holding(**{**one, "moment": tuple(one["moment"])}) for one in fields["holdings"])
        failure, gathered = fields["failure"] and Fault(**fields["failure"]), _gathered(fields)
        return cls(**{**fields, "failure": failure, "holdings": holdings, "gathered": gathered})

    def can_advance(self, gathered: Gathered) -> bool:
        """Whether it holds the state before this step, and can do the step's update."""
        return self.unable is None and any(_is_before(holding, gathered) for holding in self.holdings)

    def advanced(self, gathered: Gathered) -> Survivor:
        """What it will be once it has done that."""
        if not self.can_advance(gathered):
            return self
        holdings = (
            replace(one, moment=(gathered.step, *one.moment[1:])) if _is_before(one, gathered) else one
            for one in self.holdings
        )
        return replace(self, holdings=tuple(holdings))


def _is_before(holding: Holding, gathered: Gathered) -> bool:
    return holding.advances and holding.moment[0] == gathered.step - 1


def _gathered(fields: Mapping[str, Any]) -> Gathered | None:
    if (found := fields["gathered"]) is None:
        return None
    step, values = found
    return Gathered(step, tuple(values))


@dataclass(frozen=True)
class Assignment:
    """A stripe of a shard of the state, and the rank that writes it."""

    shard: int
    number: int
    of: int
    rank: int

    @property
    def stripe(self) -> Stripe:
        """The bytes of the shard that it covers."""
        return Stripe(self.number, self.of)

    @property
    def file(self) -> str:
        """The name of its file until the commit. No two ranks write to one file."""
        return f"shard_{self.shard}-part_{self.number}-of-{self.of}-by-{self.rank}.bin"


@dataclass(frozen=True)
class Plan:
    """Who does what. A plan with another `generation` has nothing in common with the one before it, not even files."""

    generation: str
    actor: int  # the rank that commits and records the end; the lowest of those that can
    moment: Moment | None  # of the state to save; None: the survivors do not hold all of any
    # By shard, in the order of their bytes; empty if the state is saved or not savable.
    assignments: tuple[Assignment, ...] = ()
    gathered: Gathered | None = None  # nothing is saved yet: those that hold the step before do this update
    act: bool = False  # everything is written, and nobody is waited for: the actor acts
    written: dict[str, Any] = field(default_factory=dict)  # with `act`: the manifest's entry of each stripe, by file
    present: tuple[int, ...] = ()  # with `act`: the ranks that signed in
    failures: tuple[Fault, ...] = ()  # with `act`: theirs
    done_step: int = -1  # with `act`: the last step that is done, as far as they know
    lost_shards: tuple[int, ...] = ()  # with `act`: the shards of that step that no survivor can write
    silences: tuple[tuple[int, str], ...] = ()  # with `act`: the ranks whose device cannot be read, and why

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Plan:
        """The plan with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        return cls(
            **{
                **fields,
                "moment": fields["moment"] and tuple(fields["moment"]),
                "assignments": tuple(Assignment(**one) for one in fields["assignments"]),
                "gathered": _gathered(fields),
                "present": tuple(fields["present"]),
                "failures": tuple(Fault(**failure) for failure in fields["failures"]),
                "lost_shards": tuple(fields["lost_shards"]),
                "silences": tuple((rank, why) for rank, why in fields["silences"]),
            }
        )


@dataclass(frozen=True)
class Board:
    """What a leader publishes."""

    leader: int
    beat: int = 0
    progress: int = 0  # of all survivors together
    plan: Plan | None = None
    over: bool = False  # the end is recorded, and there is nothing left to save


# Ranks that have not signed in, which may be a step ahead, are waited for this long after the last one that did, before
# anything is committed. All survivors notice a fault within half a second.
GATHER_S = 1.5
# The same while the survivors do not hold all of the newest state. So long a wait is measured in seconds: on a busy
# machine a round may take ten times as long as it should, and SIGKILL nears.
ALONE_S = 15.0
LONGEST_ROUND_S = 1.0  # a round that takes longer counts as this much: the process may have been suspended
# Writing begins this long after the last rank has said what it holds.
SETTLE_S = 0.3
# A survivor whose heartbeat stands still for this long counts as dead; if it comes back, it takes part again.
SILENT_S = 5.0
# A survivor that is alive but gets nothing done for this long, because its disk hangs, is given up. One whose device
# does not answer says so itself, much earlier.
STUCK_S = 30.0

Holders = dict[Moment, dict[int, list[int]]]


class Roll:
    """The survivors, as the leader has seen them in its rounds."""

    def __init__(self, size: int, round_s: float) -> None:
        self.size = size
        self.found: dict[int, Survivor] = {}
        self.gone: set[int] = set()  # ranks whose process has ended
        self._round_s = round_s
        self._silent: dict[int, int] = {}  # rounds without a new heartbeat
        self._idle: dict[int, int] = {}  # rounds in which it should have done something
        self._unjoined = self._unannounced = 0  # rounds since the last rank signed in, or said what it holds
        self._unjoined_s = 0.0  # the same in seconds

    def observe(self, survivors: Iterable[Survivor], plan: Plan | None, passed_s: float = 0.0) -> None:
        """One round: the survivors whose files could be read, while this plan is in force. `passed_s`: how long the
        round took."""
        before, self.found = self.found, {**self.found, **{one.rank: one for one in survivors}}
        joined = announced = False
        for rank, one in self.found.items():
            old = before.get(rank)
            joined |= old is None
            announced |= one.frozen and not (old and old.frozen)
            self._silent[rank] = self._silent[rank] + 1 if old and old.beat == one.beat else 0
            if old is None or replace(old, beat=one.beat) != one:
                self._idle[rank] = 0
            elif _has_work(one, plan):  # a rank that was given up stays so until it does something
                self._idle[rank] += 1
        self._unjoined = 0 if joined else self._unjoined + 1
        self._unjoined_s = 0.0 if joined else self._unjoined_s + min(max(passed_s, self._round_s), LONGEST_ROUND_S)
        self._unannounced = 0 if joined or announced else self._unannounced + 1

    @property
    def shards(self) -> int:
        """Of how many shards the state consists."""
        return max((holding.shards for one in self.found.values() for holding in one.holdings), default=1)

    @property
    def alive(self) -> list[Survivor]:
        """Those whose heart beats, the lowest rank first."""
        return [self.found[rank] for rank in sorted(self.found) if self._silent[rank] * self._round_s < SILENT_S]

    @property
    def able(self) -> list[Survivor]:
        """Those of them that get something done."""
        return [one for one in self.alive if not self._is_stuck(one.rank)]

    def held(self, able: Iterable[Survivor] | None = None) -> Holders:
        """Which of them can write which shard of the state at which moment; the lowest rank first."""
        held: Holders = {}
        for one in self.able if able is None else able:
            for holding in one.holdings if one.unable is None else ():
                held.setdefault(holding.moment, {}).setdefault(holding.shard, []).append(one.rank)
        return held

    def committers(self, moment: Moment, able: Iterable[Survivor] | None = None) -> list[int]:
        """Which of them can commit the state at this moment; the lowest rank first."""
        return [
            one.rank
            for one in (self.able if able is None else able)
            if one.unable is None and any(holding.moment == moment and holding.commits for holding in one.holdings)
        ]

    def best(self, able: Sequence[Survivor] | None = None) -> Moment | None:
        """The newest moment of which all shards are held, by all who get something done or by these."""
        able, count = self.able if able is None else able, self.shards
        whole = (p for p, shards in self.held(able).items() if len(shards) == count and self.committers(p, able))
        return max(whole, default=None)

    def to_advance(self) -> Gathered | None:
        """What those that are one step behind need to do its update, if that completes the newest step. None where the
        step before can be saved as it is: no step that all ranks have done is lost then, and no update can fail."""
        gathered = max((one.gathered for one in self.found.values() if one.gathered), default=None)
        if gathered is None:
            return None
        best = self.best()
        if best is not None and best[0] >= gathered.step - 1:
            return None
        best = self.best([one.advanced(gathered) for one in self.able])
        return gathered if best is not None and best[0] == gathered.step else None

    @property
    def all_frozen(self) -> bool:
        """Whether each survivor has said what it holds, as far as it ever will."""
        return all(one.frozen or self._is_stuck(one.rank) for one in self.alive)

    @property
    def has_settled(self) -> bool:
        """Whether writing should begin with the holders known so far."""
        everybody = self.all_frozen and not self.unseen
        return everybody or self._unannounced * self._round_s >= SETTLE_S

    def has_gathered(self, moment: Moment | None) -> bool:
        """Whether nobody is waited for any more, neither survivors that freeze nor ranks that did not sign in, when the
        state at this moment can be saved."""
        if not self.all_frozen:
            return False
        newest = max(self.held(), default=None)
        # A step that not even the survivors have all done is none of these: SIGKILL may be nearer than the wait for it.
        steps_at_stake = moment is None or (newest is not None and min(newest[0], self.done_step) > moment[0])
        if steps_at_stake and any(one.began_step for one in self.found.values()):
            return not self.unseen or self._unjoined_s >= ALONE_S
        return not self.unseen or self._unjoined * self._round_s >= GATHER_S

    @property
    def done_step(self) -> int:
        """The last step that all ranks have done, as far as the survivors know; -1 if they hold nothing. Ranks are at
        most one step apart. So a shard of which there is only an older copy has come further than that."""
        steps: dict[int, int] = {}
        for one in self.found.values():
            for holding in one.holdings:
                steps[holding.shard] = max(steps.get(holding.shard, -1), holding.moment[0])
        newest = max(steps.values(), default=-1)
        return min((step for step in steps.values() if step >= newest - 1), default=-1)

    @property
    def unseen(self) -> set[int]:
        """The ranks that may live, but have not signed in."""
        return set(range(self.size)) - self.found.keys() - self.gone

    def _is_stuck(self, rank: int) -> bool:
        return self._idle[rank] * self._round_s >= STUCK_S


def _has_work(one: Survivor, plan: Plan | None) -> bool:
    """Whether the rescue waits for this survivor to do something."""
    if plan is None or not one.frozen:
        return not one.frozen
    if plan.gathered is not None:
        return one.can_advance(plan.gathered)
    if plan.act:
        return plan.actor == one.rank
    written = one.written if one.generation == plan.generation else {}
    return any(assignment.rank == one.rank and assignment.file not in written for assignment in plan.assignments)


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
    if len(written) < len(plan.assignments) or not roll.has_gathered(plan.moment):
        return plan
    failures = tuple(one.failure for one in roll.found.values() if one.failure)
    return replace(
        plan,
        act=True,
        written=written,
        present=tuple(sorted(roll.found)),
        failures=failures,
        done_step=roll.done_step,
        lost_shards=_lost_shards(plan.moment, roll),
        silences=tuple((rank, one.silence) for rank, one in sorted(roll.found.items()) if one.silence),
    )


def is_behind(plan: Plan, holdings: Iterable[Holding]) -> bool:
    """Whether these are all shards of a state that is further along than the one that the plan saves."""
    newer = [holding for holding in holdings if plan.moment is None or holding.moment > plan.moment]
    return any(sum(other.moment == one.moment for other in newer) == one.shards for one in newer)


def _is_obsolete(plan: Plan, roll: Roll) -> bool:
    """Whether the plan cannot be carried out as it is, or a better state has been found."""
    best = roll.best()
    if plan.moment is None:
        return best is not None or plan.actor not in [one.rank for one in roll.able]
    if plan.actor not in roll.committers(plan.moment) or (best is not None and best > plan.moment):
        return True
    return not _is_complete(plan, plan.moment, roll)


def _is_complete(plan: Plan, moment: Moment, roll: Roll) -> bool:
    """Whether each stripe of the plan is written, or can be."""
    written, shards = _written(plan, roll), roll.held().get(moment, {})
    return all(one.file in written or one.shard in shards for one in plan.assignments)


def _with_another_actor(plan: Plan | None, roll: Roll) -> Plan | None:
    """The plan with another actor, where the first is lost and its shard lives on in what it has written; else None:
    the survivors begin anew, in a folder where the first writes nothing if it comes back."""
    if plan is None or plan.moment is None:
        return None
    committers, best = roll.committers(plan.moment), roll.best()
    can_begin_anew = best is not None and best >= plan.moment
    if plan.actor in committers or not committers or can_begin_anew or not _is_complete(plan, plan.moment, roll):
        return None
    return replace(plan, actor=committers[0], act=False)


def _begin(roll: Roll, new_generation: Callable[[], str]) -> Plan | None:
    held, moment = roll.held(), roll.best()
    if moment is None:
        able = roll.able
        return Plan(new_generation(), able[0].rank, None) if able and roll.has_gathered(None) else None
    if not roll.has_settled:
        return None
    plan = Plan(new_generation(), roll.committers(moment)[0], moment)
    holdings = [holding for one in roll.able for holding in one.holdings if holding.moment == moment]
    if any(holding.saved or not holding.savable for holding in holdings):
        return plan
    sizes = {holding.shard: holding.bytes for holding in holdings}
    whole = Assignment(0, 0, 1, plan.actor).stripe
    shares = (_shared(shard, whole, sizes[shard], held[moment][shard]) for shard in range(roll.shards))
    return replace(plan, assignments=tuple(itertools.chain.from_iterable(shares)))


def _shared(shard: int, stripe: Stripe, count: int, ranks: Sequence[int]) -> Iterable[Assignment]:
    """A stripe of a shard of `count` bytes, cut again for the ranks that hold it. Where there are fewer stripes than
    ranks, they go to ranks far apart, so to different nodes."""
    into = stripe_count(count // stripe.of, len(ranks))
    for number in range(into):
        rank = ranks[number * len(ranks) // into]
        yield Assignment(shard, stripe.number * into + number, stripe.of * into, rank)


def _share_anew(plan: Plan, roll: Roll) -> Plan:
    """The plan in which the others write what a lost writer has not completed."""
    if plan.moment is None:
        return plan
    held, written = roll.held().get(plan.moment, {}), _written(plan, roll)
    assignments: list[Assignment] = []
    for old in plan.assignments:
        if old.file in written or old.rank in held.get(old.shard, ()):
            assignments.append(old)
        else:
            holdings = (holding for one in roll.able for holding in one.holdings)
            size = next(one.bytes for one in holdings if (one.moment, one.shard) == (plan.moment, old.shard))
            assignments.extend(_shared(old.shard, old.stripe, size, held[old.shard]))
    return replace(plan, assignments=tuple(assignments))


def _written(plan: Plan, roll: Roll) -> dict[str, Any]:
    """The stripes that are written and hashed, with their entries in the manifest, in the order of their bytes."""
    found = {}
    for assignment in plan.assignments:
        writer = roll.found.get(assignment.rank)
        if writer and writer.generation == plan.generation and assignment.file in writer.written:
            found[assignment.file] = writer.written[assignment.file]
    return found


def _lost_shards(moment: Moment | None, roll: Roll) -> tuple[int, ...]:
    """The shards that no survivor can write of the newest step that any of them holds, if that step is not saved."""
    held = roll.held()
    newest = max(held, default=None)
    if newest is None or (moment is not None and moment >= newest):
        return ()
    return tuple(shard for shard in range(roll.shards) if shard not in held[newest])
