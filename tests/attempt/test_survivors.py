"""Survivors that save the last finished step together: no interleaving loses the step or commits a torn state.

The survivors are objects in this process, with real files. Each test calls their rounds and lets them work in the order
that it wants to force, so half a minute passes in milliseconds. A survivor that is not called is dead or suspended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laststep.attempt import rescue as rescue_module
from laststep.attempt.rescue import Rescue, Superseded, gone_file, read_fields
from laststep.attempt.rescue_plan import ALONE_S, GATHER_S, SILENT_S, STUCK_S, Assignment, Holding, Plan
from laststep.checkpoint import files
from laststep.checkpoint.files import CheckpointError, Patience, Stripe
from laststep.checkpoint.frozen import FrozenState
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.ranks.fault import Fault
from laststep.ranks.seal import Seal
from tests.attempt.stage import SEAL, Rounds, dies, set_clock
from tests.support.disk import refusing
from tests.support.states import frozen_state

WORDS = 4096  # 8 bytes each


def nothing() -> None:
    """Nothing happens."""


def state_of(step: int) -> dict[str, Any]:
    """The state of a step, which no other step has."""
    return {"position": {"step": step}, "weights": torch.arange(WORDS, dtype=torch.int64) * step}


class Survivor:
    """A surviving rank. It holds the whole state of `step`; with None it holds nothing."""

    def __init__(self, stage: Stage, rank: int, step: int | None, saved: bool = False) -> None:
        self.silence = ""  # why its device cannot be read
        self.stage, self.rank, self.step, self.saved = stage, rank, step, saved
        self.rescue = Rescue(stage.folder, rank, stage.size, lambda: bool(stage.recorded), SEAL)
        self.store = CheckpointStore(stage.store.folder)
        self.before: dict[str, Callable[[], None]] = {}  # what happens before it writes, commits or records
        self.written = 0  # parts
        self.suspended = False  # whether what it does hangs

    def sign_in(self) -> Survivor:
        self.rescue.sign_in(Fault("failed", f"rank {self.rank} lost contact", cause=False), began_step=True)
        self.stage.living.append(self)
        return self

    def announce(self) -> Survivor:
        if self.step is None:
            self.rescue.announce(silence=self.silence)
        else:
            self.rescue.announce(Holding((self.step, 0, False, False), self.frozen().bytes, self.saved))
        return self

    def frozen(self) -> FrozenState:
        assert self.step is not None, f"rank {self.rank} has no whole state, and was asked for it"
        info = CheckpointInfo(self.step, 1, self.step, {})
        return frozen_state(self.store, info, state_of(self.step), self.stage.size, lambda: self.meet("metrics"))

    def meet(self, place: str) -> None:
        self.before.get(place, nothing)()

    def work(self) -> None:
        """Do what is to be done now, if anything."""
        if self.suspended:
            return
        duty, plan = self.rescue.duty(), self.rescue.plan
        if isinstance(duty, Assignment):
            assert plan is not None
            self.meet("write")
            try:
                entry = self.frozen().write_part(
                    plan.generation, 0, duty.stripe, duty.file, lambda: self.after_chunk(duty)
                )
            except Superseded:
                return
            except OSError as error:
                return self.rescue.report_unable(str(error))
            self.meet("report")
            self.written += 1
            self.rescue.report_written(plan, duty, entry)
        elif isinstance(duty, Plan):
            self.act(duty)

    def after_chunk(self, assignment: Assignment) -> None:
        self.meet("chunk")
        self.rescue.check(assignment)

    def act(self, plan: Plan) -> None:
        self.meet("commit")
        if plan.assignments:
            try:
                self.frozen().commit(plan.generation, plan.written)
            except CheckpointError as error:
                return self.rescue.report_unable(str(error))
        self.meet("record")
        self.stage.recorded.append((self.rank, plan))
        self.rescue.report_acted(plan)

    def die(self) -> None:
        """From now on nothing is heard of it."""
        self.stage.living.remove(self)


class Stage(Rounds):
    """The ranks have one checkpoint store."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(folder, size)
        self.store = CheckpointStore(folder / "checkpoints")

    def survivor(self, rank: int, step: int | None, saved: bool = False) -> Survivor:
        """A rank that has signed in, and said what it holds."""
        return Survivor(self, rank, step, saved).sign_in().announce()

    def saved(self) -> list[int]:
        """The steps whose checkpoints are there; each holds exactly the state of its step."""
        for step in self.store.steps():
            state = load(self.store.path(step), self.store.verify(step))
            assert torch.equal(state["weights"], state_of(step)["weights"]), f"the state of step {step} is torn"
        return self.store.steps()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Stage]]:
    set_clock(monkeypatch)
    yield lambda size: Stage(tmp_path, size)


def test_a_rank_that_is_killed_in_the_rescue_is_named(stage: Callable[[int], Stage]) -> None:
    """Under load the second of two ranks that were killed had already noticed the death of the first, and taken part.
    The record named one of them, and blamed one node."""
    here = stage(3)
    leader, _ = here.survivor(0, 5), here.survivor(1, 5)
    plan = Plan("rescue-0-1", 0, None, present=(0, 1))
    assert leader.rescue.missing(plan) == [2]
    gone_file(here.folder, 1).write_text("-9")
    assert leader.rescue.missing(plan) == [1, 2]


def test_all_that_hold_the_step_write_a_stripe(stage: Callable[[int], Stage]) -> None:
    """One rank that writes a state of 100 GB alone does not get it done before SIGKILL."""
    s = stage(5)
    ranks = [s.survivor(0, None), s.survivor(1, 7), s.survivor(2, 8), s.survivor(3, 8), s.survivor(4, 8)]
    plan = s.end()
    assert s.saved() == [8] and len(s.store.manifest(8).shards) == 3
    assert [one.written for one in ranks] == [0, 0, 1, 1, 1]
    assert [rank for rank, _ in s.recorded] == [2] and plan.done_step == 8


def test_each_signs_in_before_it_freezes(stage: Callable[[int], Stage]) -> None:
    """A rank in the middle of an update needs seconds to complete it. It is not gone, and it may be a step ahead."""
    s = stage(2)
    s.survivor(0, 7)
    slow = Survivor(s, 1, 8).sign_in()
    s.pass_s(9)
    assert not s.recorded
    slow.announce()
    plan = s.end()
    assert s.saved() == [8] and plan.present == (0, 1)


@pytest.mark.parametrize("place", ["write", "chunk", "report"])
@pytest.mark.parametrize("others", [7, 8], ids=["others-behind", "others-equal"])
def test_a_writer_dies(stage: Callable[[int], Stage], place: str, others: int) -> None:
    """Before, while and after it writes its stripe: the others write what is missing. If nobody else holds the step,
    they save the one before."""
    s = stage(3)
    s.survivor(0, others)
    s.survivor(1, others)
    s.survivor(2, 8).before[place] = dies
    s.end()
    assert s.saved() == [others]


def test_what_a_dead_writer_completed_counts(stage: Callable[[int], Stage]) -> None:
    """Its stripe is on the disk, hashed by a rank whose state was whole. Writing it again would cost time."""
    s = stage(3)
    first, second, dying = s.survivor(0, 8), s.survivor(1, 8), s.survivor(2, 8)
    while not dying.written:
        s.rounds()
    s.rounds()
    dying.die()
    s.end()
    assert s.saved() == [8]
    assert first.written + second.written == 2


def test_a_lost_stripe_is_shared(stage: Callable[[int], Stage]) -> None:
    """It takes the others half as long as if one of them wrote all of it."""
    s = stage(3)
    first, second, dying = s.survivor(0, 8), s.survivor(1, 8), s.survivor(2, 8)
    dying.before["write"] = dies
    s.end()
    assert (first.written, second.written) == (2, 2)
    sizes = [s.store.manifest(8).files[name]["bytes"] for name in s.store.manifest(8).shards]
    assert len(sizes) == 4 and sizes[2] < 0.6 * sizes[0]


def test_the_best_survivor_is_slow(stage: Callable[[int], Stage]) -> None:
    """Its disk takes half a minute for its stripe. It lives, so nobody takes its turn."""
    s = stage(2)
    s.survivor(0, 7)
    best = s.survivor(1, 8)
    s.rounds()
    best.suspended = True  # the thread that writes; its heart beats
    s.pass_s(STUCK_S - 1)
    assert not s.recorded
    best.suspended = False
    assert s.end().present == (0, 1)
    assert s.saved() == [8] and s.recorded[0][0] == 1


def test_a_stuck_writer_is_given_up(stage: Callable[[int], Stage]) -> None:
    """Its heart beats, but its write hangs in the kernel. Somebody else writes."""
    s = stage(2)
    s.survivor(0, 8)
    s.survivor(1, 8).suspended = True
    s.end(within_s=STUCK_S + 10)
    assert s.saved() == [8]


def test_a_device_that_does_not_answer(stage: Callable[[int], Stage]) -> None:
    """Its rank says so within seconds, and nobody waits for it as for one that is stuck: SIGKILL may be near. The
    record names it."""
    s = stage(3)
    s.survivor(0, 8)
    s.survivor(2, 8)
    silent = Survivor(s, 1, None).sign_in()
    silent.silence = "its device does not answer"
    s.pass_s(5)
    assert not s.recorded, "it may be a step ahead"
    silent.announce()
    plan = s.end(within_s=1)
    assert s.saved() == [8] and plan.silences == ((1, "its device does not answer"),)


def test_a_rank_with_nothing_is_alone(stage: Callable[[int], Stage]) -> None:
    """The others notice the fault ten seconds later, on a host that is starved. It must not give the step up for
    them."""
    s = stage(2)
    s.survivor(0, None)
    s.pass_s(10)
    assert not s.recorded
    s.survivor(1, 8)
    plan = s.end()
    assert s.saved() == [8] and plan.present == (0, 1)


def test_all_hold_nothing(stage: Callable[[int], Stage]) -> None:
    """There is nothing to wait for when all have signed in; when one has not, it may have the step."""
    s = stage(2)
    s.survivor(0, None)
    s.survivor(1, None)
    assert s.end(within_s=1).moment is None and s.saved() == []


def test_nothing_can_be_lost_before_the_first_step(stage: Callable[[int], Stage]) -> None:
    """A rank is killed while the ranks start: the others need not wait long for it."""
    s = stage(2)
    only = Survivor(s, 0, None)
    only.rescue.sign_in(None, began_step=False)
    s.living.append(only)
    only.announce()
    s.end(within_s=GATHER_S + 1)


def test_signs_in_and_dies(stage: Callable[[int], Stage]) -> None:
    """Before it has said what it holds: the others wait for it no longer than its heart beats."""
    s = stage(2)
    s.survivor(0, 7)
    Survivor(s, 1, 8).sign_in().die()
    s.end(within_s=SILENT_S + 2)
    assert s.saved() == [7]


@pytest.mark.parametrize("place", ["commit", "metrics", "record"])
def test_the_committing_rank_dies(stage: Callable[[int], Stage], place: str) -> None:
    """Before the rename, in the middle of the commit, and after it: another one commits, or finds it done."""
    s = stage(3)
    s.survivor(0, 8).before[place] = dies
    s.survivor(1, 8)
    s.survivor(2, 8)
    s.end()
    assert s.saved() == [8] and [rank for rank, _ in s.recorded] == [1]


def test_the_leader_dies(stage: Callable[[int], Stage]) -> None:
    """Another one continues with its plan, and nothing is written twice."""
    s = stage(4)
    leader, *writers = s.survivor(3, None), s.survivor(0, 8), s.survivor(1, 8)
    while not all(one.written for one in writers):
        s.rounds()
    leader.die()
    s.end()
    assert s.saved() == [8] and [one.written for one in writers] == [1, 1]


def test_two_leaders(stage: Callable[[int], Stage]) -> None:
    """The first was suspended. Until it notices the second, both plan; whatever they plan can be carried out."""
    s = stage(3)
    first = s.survivor(2, None)
    s.survivor(0, 8)
    s.survivor(1, 8)
    s.rounds()
    first.die()
    follow = first.rescue._follow
    while not (s.folder / "leader_1.json").exists():
        s.rounds()
    first.rescue._follow = nothing  # type: ignore[method-assign]  # the file system does not show it the other's file yet
    s.living.append(first)
    s.rounds(3)
    first.rescue._follow = follow  # type: ignore[method-assign]
    s.end()
    assert s.saved() == [8]
    assert [read_fields(s.folder / f"leader_{term}.json", SEAL) is not None for term in (0, 1, 2)] == [
        True,
        True,
        False,
    ]


def test_files_that_appear_late(stage: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """For some rounds no rank sees another's files, as on a file system with cached folders. Two ranks may believe
    that they come first. Only one creates the leader's file."""
    s = stage(2)
    hidden, read = {"until": 10}, rescue_module.read_fields

    def stale(path: Path, seal: Seal) -> dict[str, Any] | None:
        hidden["until"] -= 1
        return read(path, seal) if hidden["until"] < 0 else None

    monkeypatch.setattr(rescue_module, "read_fields", stale)
    s.survivor(0, 7)
    s.survivor(1, 8)
    s.end()
    assert s.saved()[-1] == 8


def test_no_folder_is_listed(stage: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show the list of a folder as it was half a minute ago."""
    s = stage(2)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, lambda *_: (_ for _ in ()).throw(AssertionError("a folder is listed")))
    monkeypatch.setattr(Path, "glob", lambda *_: (_ for _ in ()).throw(AssertionError("a folder is listed")))
    s.survivor(0, 8)
    s.survivor(1, 8)
    s.end()


def test_the_disk_refuses_one_rank(stage: Callable[[int], Stage]) -> None:
    """One node's quota is used up: the others write its stripe."""
    s = stage(3)

    def refuse() -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    for rank in range(3):
        s.survivor(rank, 8).before["chunk"] = refuse if rank == 1 else nothing
    s.end()
    assert s.saved() == [8] and [one.written for one in s.living] == [2, 0, 2]


def test_the_disk_refuses_all(stage: Callable[[int], Stage]) -> None:
    """Then the end is recorded all the same, with the step that was done and is lost."""
    s = stage(2)

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for rank in (0, 1):
        s.survivor(rank, 8).before["chunk"] = refuse
    plan = s.end()
    assert s.saved() == [] and (plan.moment, plan.done_step) == (None, 8)


def test_the_commit_is_refused(stage: Callable[[int], Stage]) -> None:
    """By one rank's disk: another rank tries."""
    s = stage(2)

    def refuse() -> None:
        raise OSError(errno.EIO, "Input/output error")

    s.survivor(0, 8).before["metrics"] = refuse
    s.survivor(1, 8)
    s.end()
    assert s.saved() == [8] and [rank for rank, _ in s.recorded] == [1]


@pytest.mark.parametrize(("late", "kept"), [(None, [8]), (7, [8]), (8, [8]), (9, [8, 9])])
def test_a_late_rank(stage: Callable[[int], Stage], late: int | None, kept: list[int]) -> None:
    """It signs in when the others have left. It saves what it holds only if that is further along."""
    s = stage(3)
    s.survivor(0, 8)
    s.survivor(1, 8)
    s.end()
    before = s.store.path(8).stat().st_ino
    s.living.clear()
    s.survivor(2, late)
    s.end()
    assert s.saved() == kept
    assert s.store.path(8).stat().st_ino == before, "a checkpoint that stands is never replaced"


def test_a_better_survivor_while_the_others_write(stage: Callable[[int], Stage]) -> None:
    """Its last all-reduce reached it alone. The others' stripes are not mixed with its own."""
    s = stage(3)
    s.survivor(0, 8)
    s.survivor(1, 8)
    s.pass_s(GATHER_S / 2)
    assert not s.recorded
    s.survivor(2, 9)
    s.end()
    assert s.saved() == [9]


def test_one_step_before_and_after_its_validation(stage: Callable[[int], Stage]) -> None:
    """Both ranks hold step 8, but one has also written the epoch's line: their states differ, and are not mixed."""
    s = stage(2)
    first, second = Survivor(s, 0, 8).sign_in(), Survivor(s, 1, 8).sign_in()
    first.announce()
    second.rescue.announce(Holding((8, 8, False, False), second.frozen().bytes, saved=False))
    s.end()
    assert s.saved() == [8] and (first.written, second.written) == (0, 1)


def test_a_checkpoint_that_stands(stage: Callable[[int], Stage]) -> None:
    """Whether or not the survivors know that the step is saved, they do not replace its checkpoint."""
    s = stage(2)
    alone = Survivor(s, 0, 8).frozen()
    alone.commit("earlier", {"all": alone.write_part("earlier", 0, files.Stripe(0, 1), "all", nothing)})
    before = s.store.path(8).stat().st_ino
    for knows in (True, False):
        s.living.clear()
        s.recorded.clear()
        for path in s.folder.glob("*"):
            path.unlink()
        ranks = [s.survivor(0, 8), s.survivor(1, 8, saved=knows)]
        s.end()
        assert s.store.path(8).stat().st_ino == before
        assert not knows or not any(one.written for one in ranks)


def test_a_damaged_checkpoint_is_replaced(stage: Callable[[int], Stage]) -> None:
    """It was found damaged when the attempt began."""
    s = stage(2)
    alone = Survivor(s, 0, 8).frozen()
    alone.commit("earlier", {"all": alone.write_part("earlier", 0, files.Stripe(0, 1), "all", nothing)})
    (s.store.path(8) / "shard_0000-of-0001.bin").write_bytes(b"damaged")
    s.survivor(0, 8)
    s.survivor(1, 8)
    s.end()
    assert s.saved() == [8]


def test_operations_at_many_ranks(stage: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the leader reads the file of every rank. If all did, 1,024 ranks would read a million files."""
    s = stage(64)
    reads = dict.fromkeys(range(64), 0)
    reader = {"rank": 0}
    read = rescue_module.read_fields

    def counting(path: Path, seal: Seal) -> dict[str, Any] | None:
        reads[reader["rank"]] += 1
        return read(path, seal)

    monkeypatch.setattr(rescue_module, "read_fields", counting)
    for rank in range(64):
        reader["rank"] = rank
        s.survivor(rank, None)
    reads = dict.fromkeys(reads, 0)
    for one in s.living:
        reader["rank"] = one.rank
        one.rescue.round()
    assert reads[0] == 64 + 1 and set(list(reads.values())[1:]) == {2}


def test_alone_has_time_within_the_grace() -> None:
    """Slurm's usual KillWait is 30 s. A rank with nothing that waits for the others must leave them time to write."""
    assert SILENT_S + ALONE_S < 25 and GATHER_S < 2


def test_a_folder_that_the_disk_refuses_at_first(tmp_path: Path) -> None:
    """A survivor whose disk fails for a moment, as it signs in, takes part once the disk is back. It once waited for a
    folder that nobody made, and all steps since the last checkpoint were lost. But the folder of a run that was deleted
    does not come back."""
    folder = tmp_path / "rescue" / "job"
    rescue = Rescue(folder, 0, 1, lambda: False, SEAL)
    with refusing(folder, errno.EIO, times=1, call="mkdir") as refused:
        rescue.sign_in(None, began_step=True)
        assert refused
        rescue.round()
    assert (folder / "rank_0.json").exists()
    gone = Rescue(tmp_path / "deleted" / "rescue" / "job", 0, 1, lambda: False, SEAL)
    gone.round()
    assert not (tmp_path / "deleted").exists()


def test_a_disk_that_refuses_a_look(tmp_path: Path) -> None:
    """All is written, and a network disk says ESTALE for a moment as the committing survivor looks whether the step is
    there: a lone survivor would give up the step."""
    store = CheckpointStore(tmp_path)
    frozen = frozen_state(store, CheckpointInfo(3, 1, 24, {}), state_of(3))
    parts = {"part": frozen.write_part("test", 0, Stripe(0, 1), "part", nothing)}
    with refusing(store.path(3), errno.ESTALE, times=3) as refused:
        frozen.commit("test", parts, Patience(5.0, print))
    assert refused and store.verify(3).step == 3
