"""How long the ranks live after a signal: a wrong deadline is either a lost step or one given up too early."""

from __future__ import annotations

import time
from collections.abc import Callable
from signal import SIGINT, SIGTERM, SIGUSR2
from signal import Signals as Number
from types import SimpleNamespace
from typing import Any, cast

import pytest

from laststep.attempt import grace
from laststep.attempt.ending import AttemptState
from laststep.attempt.grace import LAST_MOMENT_S, UNSAVED_END_S, GracePeriod, LimitWarning, seconds_left
from laststep.config.schema import Launch
from laststep.ranks import process
from laststep.ranks.process import SIGNALLED, Signals, run_time
from laststep.ranks.slurm import NEVER, Job, KillLimits
from laststep.ranks.world import World
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

NOW = 1_800_000_000.0
LIMITS = KillLimits(kill_wait_s=30, over_s=120)
IN_A_JOB = a_world(launcher="submitit-slurm")
LOCAL = a_world(supervised=True)


def at(seconds: float) -> str:
    """As Slurm prints it, in local time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def job(state: str, left_s: float = 3600, preempted: bool = False, restarts: int = 0) -> dict[str, str]:
    """The fields of `scontrol show job` that matter, of a job with so long until EndTime."""
    end, preempt = at(NOW + left_s), at(NOW) if preempted else "None"
    return {"JobState": state, "Restarts": str(restarts), "Reason": "None", "EndTime": end, "PreemptTime": preempt}


@pytest.mark.parametrize(
    ("shown", "since_term_s", "left_s"),
    [
        pytest.param(job("RUNNING", left_s=90), None, 90 + 120 + 30, id="the warning of the time limit"),
        pytest.param(job("RUNNING") | {"EndTime": "Unknown"}, None, NEVER, id="no limit"),
        pytest.param(job("RUNNING"), 4, 30 - 4, id="SIGTERM to a job that runs on"),
        pytest.param(job("RUNNING", left_s=-100), None, 30 - 100 + 120, id="within OverTimeLimit"),
        pytest.param(job("RUNNING", left_s=600, preempted=True), 4, 600 + 30, id="a GraceTime begins"),
        pytest.param(job("SIGNALING", left_s=600, preempted=True), 1, 600 + 30, id="a GraceTime begins, quickly"),
        pytest.param(job("COMPLETING", left_s=-1), 1, 30 - 1, id="scancel"),
        pytest.param(job("COMPLETING", restarts=1), 1, 30 - 1, id="scontrol requeue"),
        pytest.param(job("PENDING", restarts=1), None, 30, id="requeued before SIGTERM was seen"),
    ],
)
def test_what_slurm_says(shown: Job, since_term_s: float | None, left_s: float) -> None:
    """The deadline is the cluster's own: with a GraceTime of ten minutes a save of nine is no lost save, and with a
    time limit that is over there is none to come."""
    assert seconds_left(shown, 0, LIMITS, NOW, since_term_s) == left_s


@pytest.fixture(autouse=True)
def suspend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clocks on, as for a process that was suspended: it has run for none of that time, or a second."""
    monotonic, now, passed_s = time.monotonic, time.time, 0.0
    monkeypatch.setattr(process, "_clocks", [])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s)
    monkeypatch.setattr(time, "time", lambda: now() + passed_s)

    def pause(seconds: float) -> None:
        nonlocal passed_s
        before = run_time()
        passed_s += seconds
        assert run_time() - before < min(seconds, 2)

    return pause


def grace_of(launch: Launch, world: World, *received: tuple[Number, float]) -> GracePeriod:
    """The grace period of a rank that has received these signals, with the seconds since each."""
    times = [(number, time.monotonic() - ago_s) for number, ago_s in received]
    state = SimpleNamespace(
        config=SimpleNamespace(launch=launch),
        world=world,
        signals=SimpleNamespace(received=times),
        signal=times[0][0] if times else None,
        cause_signal=times[0][0] if times else None,
        signalled_at=times[0][1] if times else None,
        group=None,
    )
    return GracePeriod(cast(AttemptState, state))


def test_deadlines() -> None:
    """At half of the grace time the step is given up; just before its end no rank waits for anything."""
    for passed_s, gives_up, unsaved, over in (
        (9.5, False, False, False),
        (10.5, True, True, False),
        (16.5, True, True, False),
        (20.5 - LAST_MOMENT_S, True, True, True),
    ):
        found = grace_of(Launch(grace_s=20), IN_A_JOB, (SIGTERM, passed_s))
        assert found.seconds() == pytest.approx(20)
        assert (found.gives_up_step(), found.gives_up_step(saves=False), found.is_over()) == (gives_up, unsaved, over)
    late = grace_of(Launch(grace_s=60), IN_A_JOB, (SIGTERM, 60 - UNSAVED_END_S - 1))
    assert late.gives_up_step() and not late.gives_up_step(saves=False), "to give it up early would only lose it"


@pytest.mark.parametrize(
    ("world", "number", "grace_s", "seconds"),
    [
        (IN_A_JOB, SIGTERM, 20, 20.0),
        (IN_A_JOB, SIGTERM, None, 30.0),
        (IN_A_JOB, SIGUSR2, 20, 90.0),
        (IN_A_JOB, SIGINT, 20, NEVER),
        (LOCAL, SIGTERM, 20, NEVER),
        (LOCAL, SIGINT, 20, NEVER),
        (LOCAL, SIGUSR2, 20, NEVER),
        (a_world(launcher="python"), SIGTERM, None, NEVER),
        (a_world(launcher="python"), SIGTERM, 20, 20.0),
        (a_world(launcher="torchrun"), SIGINT, None, 30.0),
        (a_world(launcher="env"), SIGTERM, None, 30.0),
        (a_world(launcher="env"), SIGINT, None, NEVER),
    ],
)
def test_without_an_answer(world: World, number: Number, grace_s: int | None, seconds: float) -> None:
    """Outside Slurm, or where it does not answer. After Ctrl-C nobody kills the ranks but the user, and a save that is
    given up all the same loses every step since the last one."""
    found = grace_of(Launch(grace_s=grace_s, signal_delay_s=90), world, (number, 1e6))
    assert found.seconds() == pytest.approx(seconds)
    assert found.is_over() == (seconds < NEVER)


def test_a_second_signal_sets_a_deadline() -> None:
    """A run that is being cancelled has all the time that it needs, until Slurm ends its job."""
    assert not grace_of(Launch(grace_s=20), IN_A_JOB, (SIGINT, 500)).is_over()
    assert grace_of(Launch(grace_s=20), IN_A_JOB, (SIGINT, 500), (SIGTERM, 18)).is_over()
    assert not grace_of(Launch(grace_s=20), IN_A_JOB, (SIGINT, 500), (SIGTERM, 2)).gives_up_step()


def test_rank_0_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GraceTime begins with a SIGTERM, and ends with another one: only that one is followed by SIGKILL. The clock of
    the node is an hour behind the controller's."""
    shown: dict[str, Any] = {}
    monkeypatch.setattr(grace, "show_job", lambda _: shown)
    monkeypatch.setattr(grace, "kill_limits", lambda _: LIMITS._replace(clock_ahead_s=3600.0))
    found = grace_of(Launch(grace_s=30), IN_A_JOB, (SIGTERM, 100))
    shown.update(job("RUNNING", preempted=True) | {"EndTime": at(time.time() + 3600 + 500)})
    found._ask(time.monotonic())
    assert not found.gives_up_step() and found.seconds() == pytest.approx(100 + 500 + 30, abs=3)
    assert found.cause.reason == "preempted" and found.cause.requeue
    found._state.signals.received.append((SIGTERM, time.monotonic()))
    assert found.seconds() == pytest.approx(30, abs=3), "until Slurm has answered, this one may be the last"
    shown.update(JobState="COMPLETING", EndTime=at(time.time() + 3600))
    found._ask(time.monotonic())
    assert found.seconds() == pytest.approx(30, abs=3) and not found.gives_up_step() and not found.is_over()


@pytest.mark.parametrize(
    ("left_s", "signalled", "warned"), [(85, False, True), (3600, False, False), (85, True, False)]
)
def test_a_warning_that_nobody_received(
    left_s: float, signalled: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has sent it between two starts of the ranks, and does not repeat it. Without it the job is killed at its
    time limit, with every step since the last save."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(grace, "show_job", lambda _: {"EndTime": at(time.time() + 3600 + left_s)})
    monkeypatch.setattr(grace, "kill_limits", lambda: LIMITS._replace(clock_ahead_s=3600.0))
    signals = Signals()
    signals.first = SIGUSR2 if signalled else None
    warning = LimitWarning(IN_A_JOB, Launch(signal_delay_s=90), signals)
    if warned:
        wait_until(lambda: sent, "the time limit is near, and the ranks train on")
    warning.close()
    warning._thread.join(DEADLINE_S)
    assert sent == [SIGUSR2] * warned


def test_a_signal_during_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch shell has received it a moment before it started the ranks, so they have not."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(number))
    monkeypatch.setenv(SIGNALLED, "1")
    LimitWarning(IN_A_JOB, Launch(), Signals())._thread.join(DEADLINE_S)
    assert sent == [SIGUSR2]


def running(left_s: float) -> dict[str, str]:
    """A job that runs, with so long until its time limit."""
    return job("RUNNING") | {"EndTime": at(time.time() + left_s)}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `scontrol show job` shows from now on; nothing: it does not answer. KillWait is 30 s."""
    shown: dict[str, str] = {}
    monkeypatch.setattr(grace, "show_job", lambda _: dict(shown) or None)
    monkeypatch.setattr(grace, "kill_limits", lambda _: LIMITS._replace(over_s=0.0))
    return shown


@pytest.mark.parametrize("answers", [True, False])
def test_suspended_before_the_time_limit(
    answers: bool, shown: dict[str, str], suspend: Callable[[float], None]
) -> None:
    """The warning has come, and the job is suspended during the step or the save. Slurm moves EndTime by as long. By
    the clock the time was over as the ranks woke, and they exited without saving: every step since the last checkpoint
    was lost. The deadline that counts is the one that Slurm tells next."""
    found = grace_of(Launch(signal_delay_s=90), IN_A_JOB, (SIGUSR2, 5))
    if answers:
        shown.update(running(left_s=60))
        found._ask(time.monotonic())
    suspend(3600)
    assert not found.is_over() and not found.gives_up_step(), "nothing of the time has been used"
    assert found.seconds() == pytest.approx(5 + 60 + 30 if answers else 90, abs=3)
    shown.update(running(left_s=60))
    found._ask(time.monotonic())
    assert not found.is_over() and not found.gives_up_step()
    shown.update(running(left_s=-29))
    found._ask(time.monotonic())
    assert found.is_over(), "a machine was frozen, of which Slurm knows nothing: it kills the job at its time limit"


@pytest.mark.parametrize("answers", [True, False])
def test_paused_within_the_kill_wait(answers: bool, shown: dict[str, str], suspend: Callable[[float], None]) -> None:
    """Slurm suspends no job that it has ended, and counts KillWait by the clock: a rank in which C code has held the
    interpreter's lock must not believe that it has more time. But if SIGKILL has not come in time, what sends it was
    frozen with the rank, which still has the time to save."""
    found = grace_of(Launch(grace_s=30), IN_A_JOB, (SIGTERM, 0))

    def ask() -> None:
        shown.update(job("COMPLETING") if answers else {})
        found._ask(time.monotonic())

    ask()
    suspend(20)
    assert found.gives_up_step() and not found.is_over()
    ask()
    suspend(8)
    assert found.is_over(), "SIGKILL comes in 2 s"
    suspend(3600)
    assert not found.is_over()
    ask()
    assert not found.is_over()


def test_a_signal_by_hand_and_a_suspension(shown: dict[str, str], suspend: Callable[[float], None]) -> None:
    """`kill` has sent SIGTERM to a job that runs on. It may have been srun, after whose SIGTERM the ranks are killed;
    but srun is suspended with the job."""
    found = grace_of(Launch(grace_s=30), IN_A_JOB, (SIGTERM, 0))
    for _ in range(2):
        shown.update(running(left_s=9000))
        found._ask(time.monotonic())
        assert not found.is_over() and not found.gives_up_step()
        suspend(3600)
        assert not found.is_over() and not found.gives_up_step()


def test_the_other_ranks_wake_first(shown: dict[str, str], suspend: Callable[[float], None]) -> None:
    """They know the deadline from rank 0, which has not told the new one yet. One rank that exits ends the attempt."""
    told: dict[str, str] = {}
    store: Any = SimpleNamespace(set=told.__setitem__, get=told.__getitem__, check=lambda keys: keys[0] in told)
    first = grace_of(Launch(), IN_A_JOB, (SIGUSR2, 0))
    shown.update(running(left_s=60))
    first._ask(time.monotonic())
    first._exchange(store)
    other = grace_of(Launch(), a_world(rank=1, size=2, launcher="submitit-slurm"), (SIGUSR2, 0))
    other._exchange(store)
    assert other.seconds() == pytest.approx(60 + 30, abs=3)
    suspend(3600)
    assert not other.is_over() and not other.gives_up_step()
    first._exchange(store)
    other._exchange(store)
    assert not other.is_over() and not other.gives_up_step(), "nor after rank 0 has told what it knew before"


def test_rank_0_asks_at_once_when_it_wakes(
    shown: dict[str, str], suspend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may come a moment before the job is suspended, and be read when it wakes: by it the time limit is long
    over. And after a pause that Slurm does not know of, its next answer shows how little time is left."""
    asked: list[float] = []

    def answer(_: str) -> dict[str, str]:
        asked.append(time.monotonic())
        answered = running(left_s=60)
        if len(asked) == 1:
            suspend(3600)
        return answered

    monkeypatch.setattr(grace, "ASK_S", 1e9)
    monkeypatch.setattr(grace, "show_job", answer)
    found = grace_of(Launch(), IN_A_JOB, (SIGUSR2, 0))
    found._ask(time.monotonic())
    assert not found.is_over() and not found.gives_up_step()
    found.follow()
    try:
        wait_until(lambda: len(asked) == 2, "it does not ask")
        suspend(4)
        wait_until(lambda: len(asked) == 3, "it waits for its next turn")
    finally:
        found.close()
