"""An attempt that begins while survivors of another one may be saving its last step: it leaves the lock to them, for as
long as they can be at work, and no longer."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laststep.attempt import predecessor
from laststep.attempt.predecessor import Predecessor
from laststep.attempt.rescue import leader_file
from laststep.config.schema import Launch
from laststep.ranks import disk
from laststep.ranks.world import World
from laststep.records.attempts import begin_attempt, end_attempt
from laststep.rundir import RunDir
from tests.support.commands import FakeSlurm
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

FIRST, SECOND = a_world(size=2, job_id="local-1"), a_world(size=2, job_id="local-2", attempt="8-0")
ON_SLURM = a_world(size=2, launcher="submitit-slurm")
NOTICED_S, SHOWN_S = predecessor.UNSEEN_S[False], predecessor.UNSEEN_S[True]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path)
    yield run
    disk._held_locks.pop(run.lock, None)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Call it for seconds to pass."""
    now = [1000.0]
    monkeypatch.setattr(predecessor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def dies(run: RunDir, world: World = FIRST) -> str:
    """The attempt has begun, and its rank 0 has died; returns what it has signed."""
    begin_attempt(run, world, start_step=0)
    run.lock.write_text(f"{disk.lock_signature(world)}\n4711 12\n")
    return disk.lock_signature(world)


def test_survivors_are_waited_for(run: RunDir, passes: Callable[[float], None]) -> None:
    """At first nobody has noticed the death. Then the leader shows that it lives, for as long as it writes: the last
    step of a large model takes minutes. If all are dead, the run must not stand still."""
    signed, before, leader = dies(run), Predecessor(run, SECOND), leader_file(run.rescues / FIRST.attempt, 0)
    passes(NOTICED_S - 1)
    assert before.may_save(signed)
    leader.parent.mkdir(parents=True)
    for beat in range(20):
        leader.write_text(f"beat {beat}")
        passes(NOTICED_S - 1)
        assert before.may_save(signed)
    before.holds()  # a survivor has the lock
    passes(NOTICED_S - 1)
    assert before.may_save(signed)
    passes(2)
    assert not before.may_save(signed)


@pytest.mark.parametrize("why", ["recorded", "not begun", "one rank", "the same job", "another signature"])
def test_nobody_is_waited_for(run: RunDir, why: str) -> None:
    """A start that waits in vain costs every GPU of the job seconds."""
    world = a_world(size=1 if why == "one rank" else 2, job_id="local-1")
    signed = dies(run, world)
    if why == "recorded":
        end_attempt(run, world, Launch(), "failed", 1, 1)
    elif why == "not begun":
        run.attempt_now.unlink()
    elif why == "another signature":
        signed = disk.lock_signature(a_world(job_id="local-11"))
    ours = a_world(size=2, job_id="local-1", restart=1) if why == "the same job" else SECOND
    assert not Predecessor(run, ours).may_save(signed)


@pytest.mark.parametrize(
    ("job", "waits_s", "lives"),
    [
        ({"JobState": "RUNNING", "Restarts": 0}, SHOWN_S, True),
        ({"JobState": "COMPLETING", "Restarts": 0}, SHOWN_S, True),
        ({"JobState": "FAILED", "Restarts": 0}, 0.0, False),
        ({"JobState": "RUNNING", "Restarts": 1}, 0.0, False),
        ({"JobState": "RUNNING", "Restarts": 0, "StartTime": "2099-01-01T00:00:00"}, 0.0, False),
        ("Invalid job id specified", 0.0, False),
        (None, NOTICED_S, False),
    ],
    ids=["runs", "is ending", "has ended", "was requeued", "the id is another's", "forgotten", "Slurm is away"],
)
def test_what_slurm_knows(
    run: RunDir,
    passes: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, Any] | str | None,
    waits_s: float,
    lives: bool,
) -> None:
    """Ranks of a job that has ended are dead, whatever the run folder says: a node that loses power records nothing.
    Without locks it is all that is known of another host; what is not known to live must not stop the user."""
    slurm = FakeSlurm("n1")
    slurm.job = None if isinstance(job, str) else job

    def answer(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", job) if isinstance(job, str) else slurm.answer(words, **more)

    monkeypatch.setattr(subprocess, "run", answer)
    signed = dies(run, ON_SLURM)
    before = Predecessor(run, a_world(size=2, launcher="submitit-slurm", job_id="8"))
    if waits_s:
        passes(waits_s - 1)
        assert before.may_save(signed)
        passes(2)
    assert not before.may_save(signed)
    assert before.lives(signed, "") is lives


@contextmanager
def a_newcomer(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """Another attempt, which looks all the time whether the lock is free."""
    monkeypatch.setattr(disk, "LOCK_POLL_S", 0.0)
    monkeypatch.setattr(predecessor, "LOOK_S", 0.0)
    monkeypatch.setattr(predecessor, "UNSEEN_S", {True: DEADLINE_S, False: DEADLINE_S})
    thread = threading.Thread(
        target=disk.acquire_run_lock, args=(run.lock, SECOND, Predecessor(run, SECOND)), name="newcomer", daemon=True
    )
    thread.start()
    yield thread
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it waits although the end is recorded, and nobody holds the lock"


def test_a_survivor_saves_while_another_attempt_waits(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newcomer holds the lock for an instant whenever it looks, so a survivor may find it held. Nor must the shell
    of the first job mistake the newcomer for its own rank 0: it would wait for a record that nobody writes."""
    signed = dies(run)
    with a_newcomer(run, monkeypatch):
        wait_until(lambda: "waiting for survivors" in capsys.readouterr().out, "the newcomer does not wait")
        for _ in range(100):
            with disk.no_start(run.lock) as holder:
                assert holder is None
        for _ in range(20):
            assert disk.lock_is_ours(run.lock, FIRST)
        wait_until(lambda: disk.lock_is_ours(run.lock, FIRST) and run.lock in disk._held_locks, "it got no lock")
        end_attempt(run, FIRST, Launch(), "failed", 5, 5)
        assert disk.lock_holder(run.lock) == signed, "the newcomer has taken the lock from a survivor"
        disk._held_locks.pop(run.lock).close()  # the survivor exits
    assert disk.lock_holder(run.lock) == disk.lock_signature(SECOND)
    disk._held_locks.pop(run.lock).close()
    assert not disk.lock_is_ours(run.lock, FIRST), "a survivor that wakes up late must not commit any more"
