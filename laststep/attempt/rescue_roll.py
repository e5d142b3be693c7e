"""The survivors of a fault, as the leader of a rescue sees them: who lives, who works, and what they hold together.

Nothing here touches a file or a clock. Time is counted in rounds of the leader, so a process that was suspended does
not make a rank look dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from laststep.attempt.rescue_records import Place, Plan, Survivor
from laststep.ranks.shard_place import Gathered

# Ranks that have not signed in are waited for this long after the last one that did, before anything is committed: they
# may be a step ahead. All survivors notice a fault within half a second.
GATHER_S = 1.5
# The same while steps depend on the ranks that are missing: the survivors do not hold all of the newest state. So long
# a wait is measured in seconds: on a busy machine a round may take ten times as long as it should, and SIGKILL nears.
ALONE_S = 15.0
LONGEST_ROUND_S = 1.0  # a round that takes longer counts as this much: the process may have been suspended
# Writing begins this long after the last rank has said what it holds.
SETTLE_S = 0.3
# A survivor whose heartbeat stands still for this long counts as dead; if it comes back, it takes part again.
SILENT_S = 5.0
# A survivor that is alive but gets nothing done for this long, because its disk hangs, is given up. One whose device
# does not answer says so itself, much earlier.
STUCK_S = 30.0

Held = dict[Place, dict[int, list[int]]]


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

    def held(self) -> Held:
        """Which of them can write which shard of the state at which place; the lowest rank first."""
        return _held(self.able)

    def committers(self, place: Place) -> list[int]:
        """Which of them can commit the state at this place; the lowest rank first."""
        return _committers(self.able, place)

    @property
    def best(self) -> Place | None:
        """The newest place of which all shards are held."""
        return self._best(self.able)

    def to_advance(self) -> Gathered | None:
        """What those that are one step behind need to do its update, if that completes the newest step. None where the
        step before can be saved as it is: no step that all ranks have done is lost then, and no update can fail."""
        gathered = max((one.gathered for one in self.found.values() if one.gathered), default=None)
        if gathered is None:
            return None
        best, able = self.best, self.able
        if best is not None and best[0] >= gathered.step - 1:
            return None
        best = self._best([one.advanced(gathered) for one in able])
        return gathered if best is not None and best[0] == gathered.step else None

    def _best(self, able: Sequence[Survivor]) -> Place | None:
        count = self.shards
        whole = (p for p, shards in _held(able).items() if len(shards) == count and _committers(able, p))
        return max(whole, default=None)

    @property
    def all_frozen(self) -> bool:
        """Whether each survivor has said what it holds, as far as it ever will."""
        return all(one.frozen or self._is_stuck(one.rank) for one in self.alive)

    @property
    def has_settled(self) -> bool:
        """Whether writing should begin with the holders known so far."""
        everybody = self.all_frozen and self._is_complete
        return everybody or self._unannounced * self._round_s >= SETTLE_S

    def has_gathered(self, place: Place | None) -> bool:
        """Whether nobody is waited for any more, neither survivors that freeze nor ranks that did not sign in, when the
        state at this place can be saved."""
        if not self.all_frozen:
            return False
        newest = max(self.held(), default=None)
        # A step that not even the survivors have all done is none of these: SIGKILL may be nearer than the wait for it.
        steps_at_stake = place is None or (newest is not None and min(newest[0], self.done_step) > place[0])
        if steps_at_stake and any(one.began_step for one in self.found.values()):
            return self._is_complete or self._unjoined_s >= ALONE_S
        return self._is_complete or self._unjoined * self._round_s >= GATHER_S

    @property
    def done_step(self) -> int:
        """The last step that all ranks have done, as far as the survivors know; -1 if they hold nothing.

        Ranks are at most one step apart. So a shard of which there is only an older copy has come further than that.
        """
        steps: dict[int, int] = {}
        for one in self.found.values():
            for holding in one.holdings:
                steps[holding.shard] = max(steps.get(holding.shard, -1), holding.place[0])
        newest = max(steps.values(), default=-1)
        return min((step for step in steps.values() if step >= newest - 1), default=-1)

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


def _held(able: Iterable[Survivor]) -> Held:
    held: Held = {}
    for one in able:
        for holding in one.holdings if one.unable is None else ():
            held.setdefault(holding.place, {}).setdefault(holding.shard, []).append(one.rank)
    return held


def _committers(able: Iterable[Survivor], place: Place) -> list[int]:
    return [
        one.rank
        for one in able
        if one.unable is None and any(holding.place == place and holding.commits for holding in one.holdings)
    ]


def _has_work(one: Survivor, plan: Plan | None) -> bool:
    """Whether the rescue waits for this survivor to do something."""
    if plan is None or not one.frozen:
        return not one.frozen
    if plan.gathered is not None:
        return one.can_advance(plan.gathered)
    if plan.act:
        return plan.actor == one.rank
    written = one.written if one.generation == plan.generation else {}
    return any(part.rank == one.rank and part.file not in written for part in plan.parts)
