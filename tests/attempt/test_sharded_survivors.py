"""Survivors that save a sharded state together: the newest step of which each shard is held, never a mixture of steps.

As in test_survivors.py, the survivors are objects in this process, and each test calls their rounds in the order that
it wants to force. What they write is kept in memory, so that a commit can be compared byte for byte.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from laststep.attempt import rescue as rescue_module
from laststep.attempt.rescue import Rescue, Superseded
from laststep.attempt.rescue_plan import ALONE_S, GATHER_S, SILENT_S, STUCK_S, Assignment, Holding, Plan
from laststep.ranks.fault import Fault
from laststep.ranks.world import Gathered, Moment
from tests.attempt.stage import SEAL, Rounds, dies, set_clock

BYTES = 4096


def refuses() -> None:
    raise OSError("No space left on device")


def bytes_of(step: int, shard: int) -> bytes:
    """A shard of the state of a step, as no other."""
    return random.Random(1000 * step + shard).randbytes(BYTES)


def moment_of(step: int) -> Moment:
    return (step, 0, False, False)


def gathered_at(step: int) -> Gathered:
    """What the ranks gather at the end of a step: nothing that JSON or a comparison may lose."""
    return Gathered(step, (float(step).hex(), (0.1).hex(), float("nan").hex()))


class Survivor:
    """A surviving rank that can write these shards: pairs of a step and a shard. `kept` it holds for another rank.

    The newest of its own is what it trains with. If that is of the step that it has `gathered`, it has done its update;
    if it is of the step before, it can do it.
    """

    def __init__(
        self,
        stage: Stage,
        rank: int,
        own: Iterable[tuple[int, int]],
        kept: Iterable[tuple[int, int]] = (),
        gathered: int | None = None,
    ) -> None:
        self.stage, self.rank = stage, rank
        self.own, self.kept = set(own), set(kept)
        self.gathered = None if gathered is None else gathered_at(gathered)
        self.advances = True
        self.rescue = Rescue(stage.folder, rank, stage.size, lambda: bool(stage.recorded), SEAL)
        self.before: dict[str, Callable[[], None]] = {}  # what happens before it writes, reports, commits or records
        self.suspended = False

    def sign_in(self) -> Survivor:
        self.rescue.sign_in(Fault("failed", f"rank {self.rank} lost contact", cause=False), began_step=True)
        self.stage.living.append(self)
        return self

    def announce(self) -> Survivor:
        shards = self.stage.shards
        live = max(self.own) if self.own and self.advances else None
        self.rescue.announce(
            *(
                Holding(
                    *(moment_of(step), BYTES, False, True, shard, shards),
                    *((step, shard) in self.own, (step, shard) == live),
                )
                for step, shard in sorted(self.own | self.kept)
            ),
            gathered=self.gathered,
        )
        return self

    def work(self) -> None:
        duty, plan = self.rescue.duty(), self.rescue.plan
        if self.suspended or duty is None:
            return
        assert plan is not None
        try:
            if isinstance(duty, Gathered):
                self.advance(duty)
            else:
                self.write(plan, duty) if isinstance(duty, Assignment) else self.act(duty)
        except Superseded:
            pass
        except OSError as error:
            self.rescue.report_unable(str(error))

    def advance(self, gathered: Gathered) -> None:
        """Do the update of this step. If it fails in the middle, what the rank trains with is lost."""
        live = step, shard = max(self.own)
        assert gathered == gathered_at(step + 1) and self.advances, "an update is done once, of what it follows"
        self.advances = False
        self.own.remove(live)
        self.stage.updates.append(self.rank)
        with contextlib.suppress(OSError):
            self.meet("update")
            self.own.add((gathered.step, shard))
        self.announce()

    def write(self, plan: Plan, assignment: Assignment) -> None:
        assert plan.moment is not None
        step = plan.moment[0]
        assert (step, assignment.shard) in self.own | self.kept, f"rank {self.rank} was asked for what it does not hold"
        self.meet("write")
        begin, end = assignment.stripe.bounds(BYTES)
        self.rescue.check(assignment)
        self.stage.disk[plan.generation, assignment.file] = bytes_of(step, assignment.shard)[begin:end]
        self.meet("report")
        self.rescue.report_written(plan, assignment, {"bytes": end - begin})

    def act(self, plan: Plan) -> None:
        if plan.assignments:
            self.meet("commit")
            assert plan.moment is not None and any(step == plan.moment[0] for step, _ in self.own)
            self.stage.commit(plan)
        self.meet("record")
        self.stage.recorded.append((self.rank, plan))
        self.rescue.report_acted(plan)

    def meet(self, place: str) -> None:
        self.before.get(place, lambda: None)()

    def die(self) -> None:
        """From now on nothing is heard of it."""
        self.stage.living.remove(self)


class Stage(Rounds):
    """The ranks' state has this many shards."""

    def __init__(self, folder: Path, size: int, shards: int) -> None:
        super().__init__(folder, size)
        self.shards = shards
        self.disk: dict[tuple[str, str], bytes] = {}
        self.saved: list[int] = []
        self.updates: list[int] = []  # the ranks that have begun one

    def survivor(
        self, rank: int, *own: int, kept: Iterable[tuple[int, int]] = (), gathered: int | None = None
    ) -> Survivor:
        """A rank that has announced its shard at these steps, what it keeps of its sender, and what it gathered."""
        shard = rank % self.shards
        return Survivor(self, rank, [(step, shard) for step in own], kept, gathered).sign_in().announce()

    def commit(self, plan: Plan) -> None:
        assert plan.moment is not None
        step = plan.moment[0]
        assert list(plan.written) == [assignment.file for assignment in plan.assignments], "in the order of the bytes"
        found = b"".join(self.disk[plan.generation, name] for name in plan.written)
        assert found == b"".join(bytes_of(step, shard) for shard in range(self.shards)), f"step {step} is torn"
        self.saved.append(step)

    def writers(self) -> dict[int, set[int]]:
        """Which ranks wrote stripes of which shard of the checkpoint."""
        writers: dict[int, set[int]] = {}
        for assignment in self.recorded[-1][1].assignments:
            writers.setdefault(assignment.shard, set()).add(assignment.rank)
        return writers


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Stage]]:
    set_clock(monkeypatch)
    yield lambda size, shards: Stage(tmp_path, size, shards)


Stages = Callable[[int, int], Stage]


def replicas(s: Stage, dead: Iterable[int], step: int = 8) -> None:
    """Hybrid: the ranks that live, all at one step."""
    for rank in set(range(s.size)) - set(dead):
        s.survivor(rank, step)


def copies(s: Stage, dead: Iterable[int], step: int = 8, live: int | None = None, per_node: int = 2) -> list[Survivor]:
    """Full, with copies of this step: each rank keeps that of the rank one node before it."""
    ranks = []
    for rank in sorted(set(range(s.size)) - set(dead)):
        sender = (rank - per_node) % s.size
        ranks.append(s.survivor(rank, step, *([] if live is None else [live]), kept=[(step, sender)]))
    return ranks


@pytest.mark.parametrize("dead", [[0], [1], [2], [3], [0, 1], [2, 3], [0, 3], [1, 2]], ids=str)
def test_hybrid(stage: Stages, dead: list[int]) -> None:
    """Any rank, any node: the replicas that live write what they hold; where both live, half each."""
    s = stage(4, 2)
    replicas(s, dead)
    plan = s.end()
    assert (s.saved, plan.done_step, plan.lost_shards) == ([8], 8, ())
    assert s.writers() == {shard: {shard, shard + 2} - set(dead) for shard in (0, 1)}


@pytest.mark.parametrize("dead", [[0], [1], [2], [3], [0, 1], [2, 3]], ids=str)
def test_full_with_copies(stage: Stages, dead: list[int]) -> None:
    """The keeper on the other node writes the shard of each rank that is gone."""
    s = stage(4, 4)
    copies(s, dead)
    plan = s.end()
    assert (s.saved, plan.done_step, plan.lost_shards) == ([8], 8, ())
    for rank in dead:
        assert s.writers()[rank] == {(rank + 2) % 4}


def test_full_without_copies(stage: Stages) -> None:
    """Nobody can save the step, and the record says which shard is lost."""
    s = stage(4, 4)
    for rank in (0, 1, 3):
        s.survivor(rank, 8)
    s.pass_s(ALONE_S - 1)
    assert not s.recorded, "rank 2 may only be slow: everything depends on it"
    plan = s.end(within_s=3)
    assert (s.saved, plan.moment, plan.done_step, plan.lost_shards) == ([], None, 8, (2,))


def test_slow_rounds(stage: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a round takes half a second. The end must be recorded before SIGKILL all the same."""
    s = stage(4, 4)
    clock = iter(range(10_000))
    monkeypatch.setattr(rescue_module, "monotonic", lambda: 0.5 * next(clock))
    for rank in (0, 1, 3):
        s.survivor(rank, 8)
    s.rounds(round(ALONE_S / 0.5) + 2)
    assert s.recorded, "the leader has waited for rank 2 long enough"


def test_full_while_all_live(stage: Stages) -> None:
    """An error in one rank's own code, for example: each writes its shard."""
    s = stage(4, 4)
    for rank in range(4):
        s.survivor(rank, 8)
    s.end(within_s=GATHER_S)
    assert s.saved == [8] and s.writers() == {rank: {rank} for rank in range(4)}


def test_a_rank_and_its_keeper(stage: Stages) -> None:
    """Both nodes of a pair are gone: the checkpoint stands, and nothing is mixed."""
    s = stage(4, 4)
    copies(s, [1, 3])
    plan = s.end()
    assert s.saved == [] and plan.moment is None and plan.lost_shards == (1, 3)


def test_a_rank_that_has_lost_its_state(stage: Stages) -> None:
    """A CUDA error: it lives, but cannot read its memory. Its keeper writes its shard; it still writes what it keeps
    in host memory."""
    s = stage(4, 4)
    for rank in (0, 1, 2):
        s.survivor(rank, 8, kept=[(8, (rank - 2) % 4)])
    s.survivor(3, kept=[(8, 1)])
    s.end()
    assert s.saved == [8] and s.writers()[3] == {1} and s.writers()[1] == {1, 3}


def test_one_that_only_keeps_copies_does_not_commit(stage: Stages) -> None:
    """It knows the bytes of its sender, and not the rest of the state. Rank 0 is the lowest, and writes only."""
    s = stage(2, 2)
    s.survivor(0, kept=[(8, 1), (8, 0)])
    s.survivor(1, 8)
    s.end()
    assert s.saved == [8] and [rank for rank, _ in s.recorded] == [1]


def test_copies_of_an_earlier_step(stage: Stages) -> None:
    """With a copy every ten steps: the newest copied step is saved, and the record says what is lost."""
    s = stage(4, 4)
    copies(s, [2], step=10, live=17)
    plan = s.end()
    assert (s.saved, plan.done_step, plan.lost_shards) == ([10], 17, (2,))


def test_a_slow_rank_saves_the_steps_since_the_copies(stage: Stages) -> None:
    """It notices the fault ten seconds later than the others, which could save the copied step at once."""
    s = stage(4, 4)
    copies(s, [2], step=10, live=17)
    s.pass_s(10)
    assert not s.recorded
    s.survivor(2, 10, 17, kept=[(10, 0)])
    plan = s.end()
    assert s.saved == [17] and plan.present == (0, 1, 2, 3)


@pytest.mark.parametrize("ahead", [[0], [3], [0, 1], [1, 3], [0, 1, 3]], ids=str)
def test_some_are_one_step_ahead(stage: Stages, ahead: list[int]) -> None:
    """The last collective of step 9 has reached some of them, and rank 2 has died: the step was never done on all
    ranks, and all hold a copy of the one before."""
    s = stage(4, 4)
    for rank in (0, 1, 3):
        s.survivor(rank, *([8, 9] if rank in ahead else [8]), kept=[(8, (rank - 2) % 4)])
    plan = s.end(within_s=GATHER_S + 2)  # that step is not waited for: SIGKILL nears
    assert (s.saved, plan.done_step) == ([8], 8)


@pytest.mark.parametrize(
    ("steps", "saved"),
    [
        ([8, 8, 9, 9], [9]),  # one node is ahead: it has all of step 9
        ([8, 9, 9, 8], [9]),
        ([9, 9, 9, 8], [9]),
        ([9, 8, 9, 8], []),  # shard 0 is held at step 9 alone, shard 1 at step 8 alone
        ([9, 8, 8, 8], [8]),
        ([9, None, None, 9], [9]),
        ([None, 8, None, 9], []),
    ],
    ids=str,
)
def test_hybrid_split_by_a_step(stage: Stages, steps: list[int | None], saved: list[int]) -> None:
    """The newest step of which both shards are held; where there is none, the checkpoint stands."""
    s = stage(4, 2)
    for rank, step in enumerate(steps):
        s.survivor(rank, *([] if step is None else [step]))
    s.end()
    assert s.saved == saved


def apart(s: Stage, *steps: int | None, copied: Sequence[int] = ()) -> None:
    """The ranks that live at these steps, with copies of others. Those at step 9 have done it, so they have what was
    gathered at its end; those at step 8 have their gradients of step 9, and wait for that."""
    for rank, step in enumerate(steps):
        if step is not None:
            s.survivor(rank, *copied, step, kept=[(each, (rank - 2) % 4) for each in copied], gathered=step)


@pytest.mark.parametrize(
    ("shards", "steps", "saved", "updates"),
    [
        (2, [9, 8, 9, None], [9], [1]),  # a rank has died after its update
        (2, [9, 8, 9, 8], [9], [1, 3]),
        (2, [None, 9, 8, None], [9], [2]),
        (2, [None, 8, 9, None], [9], [1]),
        (2, [9, 8, 8, 8], [8], []),  # step 8 is whole as it is
        (2, [9, None, 8, None], [], []),  # nobody is left that has shard 1
        (4, [9, 8, 8, 9], [9], [1, 2]),  # a rank has failed, and all live
        (4, [9, 8, 9, None], [], []),
        (4, [8, 8, 8, 8], [8], []),
    ],
    ids=str,
)
def test_those_behind_do_the_update(
    stage: Stages, shards: int, steps: list[int | None], saved: list[int], updates: list[int]
) -> None:
    """Where the survivors hold no step as a whole, but would hold the newest if those behind did its update. Where that
    does not help, or is not needed, nobody does."""
    s = stage(4, shards)
    apart(s, *steps)
    s.end()
    assert (s.saved, s.updates) == (saved, updates)


def test_nobody_has_done_the_update(stage: Stages) -> None:
    """All have gathered step 9 when a rank fails, and none has begun its update: step 8 is whole."""
    s = stage(4, 4)
    for rank in range(4):
        s.survivor(rank, 8, gathered=9)
    s.end()
    assert (s.saved, s.updates) == ([8], [])


def test_an_update_does_not_help_without_the_lost_shard(stage: Stages) -> None:
    """Copies of step 6 exist of all shards. A rank on step 9 has died, and its shard with it."""
    s = stage(4, 4)
    apart(s, 9, 8, 8, None, copied=[6])
    s.end()
    assert (s.saved, s.updates) == ([6], [])


def test_a_copy_of_the_lost_shard_and_an_update(stage: Stages) -> None:
    """Copies of steps 6 and 9. The rank that has died had already sent that of step 9."""
    s = stage(4, 4)
    s.survivor(1, 6, 8, kept=[(6, 3), (9, 3)], gathered=8)
    apart(s, 9, None, 8, None, copied=[6])
    s.end()
    assert (s.saved, s.updates) == ([9], [1, 2])


def test_one_that_has_gathered_comes_late(stage: Stages) -> None:
    """The others already write the copies of step 6. They begin anew."""
    s = stage(4, 4)
    apart(s, None, 8, 8, 8, copied=[6])
    s.pass_s(10)
    assert not s.recorded
    s.survivor(0, 6, 9, gathered=9)
    s.end()
    assert (s.saved, s.updates) == ([9], [1, 2, 3])


@pytest.mark.parametrize("ends", [dies, refuses])
def test_an_update_fails(stage: Stages, ends: Callable[[], None]) -> None:
    """What that rank trains with is lost, but its replica has done the same update."""
    s = stage(4, 2)
    apart(s, 9, 8, 9, 8)
    s.living[1].before["update"] = ends
    s.end()
    assert s.saved == [9] and s.writers()[1] == {3}


def test_the_only_update_fails(stage: Stages) -> None:
    """Then that shard is lost. The others fall back to the copies, nothing hangs, and nobody tries again."""
    s = stage(4, 4)
    apart(s, 9, 8, 9, 9, copied=[6])
    s.living[1].before["update"] = refuses
    plan = s.end()
    assert (s.saved, s.updates, plan.lost_shards) == ([6], [1], (1,))


def test_an_update_hangs(stage: Stages) -> None:
    """Its heart beats. It is given up like one whose write hangs."""
    s = stage(4, 4)
    apart(s, 9, 8, 9, 9, copied=[6])
    s.living[1].suspended = True
    s.end(within_s=STUCK_S + 10)
    assert (s.saved, s.updates) == ([6], [])


def test_the_leader_dies_before_the_update(stage: Stages) -> None:
    """Another one asks again, and the update is done once."""
    s = stage(4, 2)
    leader = s.survivor(3)
    apart(s, 9, 8)
    slow = s.living[2]
    slow.suspended = True
    s.pass_s(1)
    plan = leader.rescue.plan
    assert plan is not None and plan.gathered == gathered_at(9)
    leader.die()
    s.pass_s(SILENT_S + 2)
    slow.suspended = False
    s.end()
    assert (s.saved, s.updates) == ([9], [1])


def test_a_better_set_appears_late(stage: Stages) -> None:
    """While step 8 is being written, the rank that completes step 9 signs in. Their files are not mixed."""
    s = stage(4, 2)
    s.survivor(0, 9)
    slow = s.survivor(2, 8)
    s.survivor(3, 8)
    slow.suspended = True
    s.pass_s(1)
    assert not s.recorded
    slow.suspended = False
    s.survivor(1, 9)
    s.end()
    assert s.saved == [9]


@pytest.mark.parametrize("place", ["write", "report"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_replica_dies_while_it_writes(stage: Stages, rank: int, place: str) -> None:
    """The other replica of its shard writes its part as well."""
    s = stage(4, 2)
    replicas(s, [])
    s.living[rank].before[place] = dies
    s.end()
    assert s.saved == [8] and s.writers()[rank % 2] == {(rank + 2) % 4}


@pytest.mark.parametrize("place", ["write", "report"])
def test_the_only_holder_of_a_shard_dies_while_it_writes(stage: Stages, place: str) -> None:
    """Then that step is lost. The others fall back to the copies of the step before, or to the checkpoint."""
    s = stage(4, 4)
    copies(s, [], step=7, live=8)
    s.living[3].before[place] = dies
    plan = s.end()
    assert s.saved == [7] and plan.lost_shards == (3,)


def test_the_only_holder_dies_when_it_has_written(stage: Stages) -> None:
    """What it wrote is whole and hashed: it counts."""
    s = stage(4, 4)
    for rank in range(4):
        s.survivor(rank, 8)
    slow, dying = s.living[0], s.living[3]
    slow.suspended = True
    while not dying.rescue._me.written:
        s.rounds()
    s.rounds()
    dying.die()
    slow.suspended = False
    s.end()
    assert s.saved == [8]


@pytest.mark.parametrize("place", ["commit", "record"])
@pytest.mark.parametrize("shards", [2, 4])
def test_the_committing_rank_dies(stage: Stages, shards: int, place: str) -> None:
    """Its shard lives on in its replica, or in the file that it has written: another rank commits."""
    s = stage(4, shards)
    for rank in range(4):
        s.survivor(rank, 8)
    s.living[0].before[place] = dies
    s.end()
    assert s.saved[-1] == 8 and [rank for rank, _ in s.recorded] == [1]


def test_the_disk_refuses_the_only_holder(stage: Stages) -> None:
    """The end is recorded all the same, and says which shard is lost."""
    s = stage(4, 4)
    for rank in range(4):
        s.survivor(rank, 8)
    s.living[1].before["write"] = refuses
    plan = s.end()
    assert s.saved == [] and (plan.moment, plan.done_step, plan.lost_shards) == (None, 8, (1,))


def test_a_stuck_holder_is_given_up(stage: Stages) -> None:
    """Its heart beats, but its write hangs: the keeper of its shard writes it."""
    s = stage(4, 4)
    copies(s, [])
    s.living[1].suspended = True
    s.end(within_s=STUCK_S + 10)
    assert s.saved == [8] and s.writers()[1] == {3}


def test_a_stuck_holder_of_the_newest_step(stage: Stages) -> None:
    """It alone could complete step 9. Once it is given up, it must not be hoped for again as soon as the others have
    begun to write step 8: that would never end."""
    s = stage(4, 2)
    s.survivor(0, 8, 9)
    s.survivor(1, 9).suspended = True
    for rank in (2, 3):
        s.survivor(rank, 8)
    s.end(within_s=STUCK_S + 10)
    assert s.saved == [8]


def test_the_leader_dies(stage: Stages) -> None:
    """Another one continues with its plan."""
    s = stage(4, 2)
    leader = s.survivor(3)
    for rank in (0, 1):
        s.survivor(rank, 8)
    s.pass_s(1)
    leader.die()
    s.end()
    assert s.saved == [8]


def test_signs_in_and_dies(stage: Stages) -> None:
    """Before it has said what it holds. The others wait no longer than its heart beats, and then for the rank that
    has not signed in."""
    s = stage(4, 4)
    copies(s, [2, 3])
    Survivor(s, 3, [(8, 3)]).sign_in().die()
    s.end(within_s=SILENT_S + ALONE_S + 2)
    assert s.saved == [8]


@pytest.mark.parametrize(("own", "kept", "saved"), [(9, [], [8]), (9, [(9, 0)], [8, 9]), (8, [(8, 0)], [8])])
def test_a_late_rank(stage: Stages, own: int, kept: list[tuple[int, int]], saved: list[int]) -> None:
    """It signs in when the others have left. Alone it can save something only if it holds every shard of it."""
    s = stage(2, 2)
    s.survivor(0, 8, kept=[(8, 1)])
    s.end()
    s.living.clear()
    s.survivor(1, own, kept=kept)
    s.end()
    assert s.saved == saved


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens(stage: Stages, seed: int) -> None:
    """Ranks that hold this or that, that come late, die or hang at any place: what is committed is whole, nobody waits
    without limit, and no step is lost of which ranks that live to the end hold every shard."""
    draw = random.Random(seed)
    size, shards = draw.choice([(4, 2), (4, 4), (3, 3), (6, 2), (6, 3)])
    s = stage(size, shards)
    late: dict[int, list[Survivor]] = {}
    steady: set[tuple[int, int]] = set()  # what ranks hold that come in time, and to which nothing happens
    for rank in draw.sample(range(size), draw.randint(2, size)):
        own = {(step, rank % shards) for step in draw.choice([[8], [9], [8, 9], [7, 8], [7, 8, 9], []])}
        kept = {(step, (rank - 1) % shards) for step in draw.choice([[], [8], [7, 8]])}
        one = Survivor(s, rank, own, kept, gathered=max(own)[0] if own and draw.random() < 0.7 else None)
        fault = draw.choice([None, None, "write", "report", "commit", "record", "update", "suspended"])
        if fault is not None and fault != "suspended":
            one.before[fault] = draw.choice([dies, refuses]) if fault in ("write", "commit", "update") else dies
        one.suspended = fault == "suspended" and not any(each.suspended for ones in late.values() for each in ones)
        round_ = draw.choice([0, 0, 0, 1, 2, 5])
        late.setdefault(round_, []).append(one)
        steady |= own | kept if fault is None and round_ == 0 and own else set()
    late.setdefault(0, late.pop(min(late)))
    for round_ in range(max(late) + 1):
        for one in late.get(round_, []):
            one.sign_in().announce()
        s.rounds()
    for _ in range(400):
        if all(one.rescue.is_over or one.suspended for one in s.living):
            break
        s.rounds()
    else:
        raise AssertionError("the survivors are still waiting after 100 s")
    whole = [step for step in (7, 8, 9) if all((step, shard) in steady for shard in range(shards))]
    assert max(s.saved, default=0) >= max(whole, default=0), "every shard of it was held to the end"
