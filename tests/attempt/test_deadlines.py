"""No end of an attempt hangs: whatever hangs there, the process ends with the right exit status.

NCCL's destructors may hang, so may a store that no longer answers, and a disk that went away.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from laststep.attempt import attempt as attempt_module
from laststep.attempt import end_by_fault
from laststep.attempt.attempt import Attempt, Stopped
from laststep.attempt.end_by_fault import EndByFault
from laststep.attempt.ending import print_stacks
from laststep.attempt.grace import GracePeriod
from laststep.attempt.rescue import gone_file
from laststep.ranks import disk
from laststep.ranks.fault import Fault
from laststep.ranks.process import Signals
from laststep.ranks.watchdog import Neighbour
from laststep.ranks.world import ShardPlace, World
from laststep.records.attempts import begin_attempt
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.say import flush_output
from tests.support.commands import FakeSlurm
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.ranks import reasons, train
from tests.support.records import a_world
from tests.support.runs import config


def python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that must end by itself."""
    words = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=DEADLINE_S)


HANGS_AT_EXIT = """
    import atexit, sys, time
    from laststep.attempt.ending import LastExit, run_for
    last = LastExit()
    atexit.register(print, "the user's own handler ran")
    class Connection:
        def __del__(self):
            time.sleep(1000)
    sys.modules["held"] = Connection()
"""


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("last.needed = True", 0),
        ("last.needed, last.status = True, 143; sys.exit(143)", 143),
        ("last.needed = True; raise ValueError('the result could not be written')", 1),
    ],
)
def test_a_destructor_that_hangs(then: str, status: int) -> None:
    """A process group that could not be destroyed is still there when Python ends, and its destructor hangs too. The
    launcher must see the status of the attempt, and the user's own handlers must have run."""
    done = python(f"{HANGS_AT_EXIT}\n    {then}")
    assert done.returncode == status, done.stderr
    assert "the user's own handler ran" in done.stdout


def test_an_end_that_hangs_anywhere() -> None:
    """In the record, on a disk that went away: the deadline ends the process, with stacks that show where it hung."""
    done = python(
        """
        import time
        from laststep.attempt.ending import Deadline
        Deadline(0.2, status=1).status = 143
        time.sleep(1000)
        """
    )
    assert done.returncode == 143
    assert "takes longer than 0 s; exiting with status 143" in done.stdout and "time.sleep" not in done.stdout
    assert "Thread 0x" in done.stderr


@pytest.mark.parametrize("closed", [False, True])
def test_stacks_in_a_notebook(closed: bool) -> None:
    """Its stderr is an object without a descriptor, as under contextlib.redirect_stderr: the thread that ends a rank by
    fault used to fail there, before it saved anything."""
    cell = io.StringIO()
    if closed:
        cell.close()
    with contextlib.redirect_stderr(cell):
        print_stacks()
        flush_output()
    assert closed or "in print_stacks" in cell.getvalue()


def test_training_in_a_notebook(root: Path) -> None:
    """`Trainer(config)()` in a cell: it used to fail as its watchdog started."""
    run = train(config(root, "notebook", 1, ("launch.hang_timeout_s=60",)), before=in_a_notebook)
    assert reasons(run) == ["finished"]


def in_a_notebook() -> None:
    """Give this process a stderr that has no descriptor."""
    sys.stderr = io.StringIO()


class Ended(Exception):
    """The process would have ended here."""


def an_attempt(root: Path, name: str, launcher: str = "submitit-local") -> tuple[Attempt, Any, Any]:
    """An attempt that has trained, its loop and its group."""
    small = config(root, name, 1, ())
    run = RunDir(root / name)
    run.path.mkdir()
    small.save(run.config)
    signals = cast(Signals, SimpleNamespace(first=None, first_at=None, received=[], requeue=None))
    attempt = Attempt(small, run, a_world(launcher=launcher), signals)
    engine, group = Mock(name="engine"), Mock(name="group")
    engine.position.step, engine.position.metrics, engine.rescuable = 5, {"val_loss": 1.0}, True
    engine.can_advance = False
    engine.progress.step_s.return_value, engine.saves.stalled_s = 0.1, 0.0
    group.world = a_world(launcher=launcher)
    begin_attempt(run, group.world, 0)
    return attempt, engine, group


@pytest.mark.parametrize("what", ["threads", "process group"])
@pytest.mark.parametrize("finished", [True, False])
def test_the_farewell_hangs(root: Path, what: str, finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may hang in destroy_process_group, and a thread in a store that no longer answers. The result and the record
    are there already, so the run has ended, and its nodes are free."""
    monkeypatch.setattr(attempt_module, "FAREWELL_S", 0.2)
    attempt, engine, group = an_attempt(root, f"farewell-{what.split()[0]}-{finished}")
    forever = threading.Event()
    try:
        if what == "threads":
            attempt._closing.callback(forever.wait)
        else:
            group.close.side_effect = forever.wait
        if finished:
            assert attempt._end_in_order(engine, group, finished=True) == {"val_loss": 1.0}
        else:
            attempt._state.signals.first = signal.SIGTERM
            with pytest.raises(Stopped) as stopped:
                attempt._end_in_order(engine, group, finished=False)
            assert stopped.value.code == 143
    finally:
        forever.set()
    (record,) = read_lines(attempt._run_dir.attempts)
    assert record["reason"] == ("finished" if finished else "cancelled") and record["end_step"] == 5
    assert attempt._last_exit is not None and attempt._last_exit.needed, "what hung would hang again when Python ends"


PREEMPTED, CANCELLED = ("preempted", True), ("cancelled", False)


@pytest.mark.parametrize(
    ("meanwhile", "requeued", "end"),
    [
        pytest.param({}, True, PREEMPTED, id="nothing"),
        pytest.param({"JobState": "COMPLETING"}, False, CANCELLED, id="scancel"),
        pytest.param({"Restarts": 1}, False, PREEMPTED, id="requeued by Slurm"),
        pytest.param(signal.SIGINT, False, CANCELLED, id="cancel"),
        pytest.param(None, True, PREEMPTED, id="Slurm falls silent"),
    ],
)
def test_the_run_is_cancelled_during_the_farewell(
    root: Path,
    meanwhile: Any,
    requeued: bool,
    end: tuple[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The stop is judged and recorded, and the ranks part, which may take fifteen seconds. A job that its user cancels
    in these seconds came back by rank 0's requeue, and trained on."""
    slurm = FakeSlurm("n1")
    monkeypatch.setattr(subprocess, "run", slurm.answer)
    attempt, engine, group = an_attempt(root, re.sub(r"\W", "-", request.node.callspec.id), launcher="srun")
    signals: Any = attempt._state.signals
    signals.first, signals.requeue = signal.SIGUSR2, Mock()

    def happens() -> None:
        if meanwhile == signal.SIGINT:
            signals.received.append((signal.SIGINT, time.monotonic()))
        else:
            slurm.job = None if meanwhile is None else {**(slurm.job or {}), **meanwhile}

    group.close.side_effect = happens
    with pytest.raises(Stopped):
        attempt._end_in_order(engine, group, finished=False)
    assert signals.requeue.called == requeued
    (record,) = read_lines(attempt._run_dir.attempts)
    assert (record["reason"], record["requeue"], record["end_step"]) == (*end, 5)


@pytest.mark.parametrize("place", ["freeze", "write"])
def test_the_end_by_fault_hangs(root: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device or the disk hangs in C. No rank gets anything done, so this one leaves."""
    monkeypatch.setattr(end_by_fault, "STALLED_S", 1.0)
    monkeypatch.setattr(end_by_fault, "POLL_S", 0.1)
    monkeypatch.setattr(end_by_fault, "MAIN_THREAD_S", 0.0)
    monkeypatch.setattr(end_by_fault, "exit_now", Mock(side_effect=Ended))
    attempt, engine, _ = an_attempt(root, f"hangs-{place}")
    disk.acquire_run_lock(attempt._run_dir.lock, attempt._state.world)
    forever = threading.Event()
    engine.position.moment, engine.saves.saving, engine.saves.saved.step = (5, 0, False, False), None, 3
    engine.place, engine.freeze_copies.return_value, engine.gathered = ShardPlace(0, 1, 0, 1), [], None
    frozen = engine.frozen.return_value.__enter__ = Mock()
    frozen.return_value.bytes = 64
    engine.frozen.return_value.__exit__ = Mock(return_value=None)
    hanging = engine.freeze if place == "freeze" else frozen.return_value.write_part
    hanging.side_effect = lambda *_: forever.wait()
    attempt._state.engine = engine
    end = EndByFault(attempt._state, GracePeriod(attempt._state))
    try:
        with pytest.raises(Ended):
            end.run(Fault("hung", "rank 0 is stuck"))
        assert hanging.called and not attempt._run_dir.attempts.exists(), "it hung there"
    finally:
        forever.set()
        for thread in threading.enumerate():
            if thread.name == "rescuer":  # what it says now must not stand in the output of the next test
                thread.join(DEADLINE_S)
    end.wait()  # so a main thread that failed by itself is not held up either


@pytest.mark.parametrize("fails", [True, False])
def test_a_main_thread_that_no_collective_frees(root: Path, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's collectives fail once a peer is gone, and the main thread ends this rank as it likes to. NCCL's never do:
    the ranks would start again two seconds later, for nothing."""
    monkeypatch.setattr(end_by_fault, "exit_now", Mock(side_effect=Ended))
    attempt, _, group = an_attempt(root, f"frees-{fails}")
    group.world, group.fails_with_peers = a_world(size=2), fails
    attempt._state.group = group
    end = EndByFault(attempt._state, GracePeriod(attempt._state))
    end._try_to_take_part, end._main_thread_failed = Mock(), Mock()  # type: ignore[method-assign]
    end._main_thread_failed.wait.return_value = False
    with pytest.raises(Ended):
        end.run(Fault("failed", "rank 1 has ended"))
    end._main_thread_failed.wait.assert_called_once_with(end_by_fault.MAIN_THREAD_S if fails else 0.0)


def test_a_rank_has_ended(root: Path) -> None:
    """Its supervisor says so, at any moment: rank 0 may be waiting for it where no collective ever fails."""
    attempt, engine, _ = an_attempt(root, "ended")
    attempt._watchdog.close()
    state = attempt._state
    state._launched = replace(state.world, size=2, hosts=("n1", "n2"))
    folder = state.run_dir.rescues / state.world.attempt
    folder.mkdir(parents=True)
    gone_file(folder, 1).write_text("-9")
    check, state.engine = attempt._end_by_fault.check, engine
    assert check() is None, "the attempt's beginning is not recorded yet, so its end could not be"
    state.set_number(0)
    fault = check()
    assert fault is not None and (fault.reason, fault.cause) == ("failed", False)
    assert "rank 1 on n2 has ended" in fault.text
    state.signals.first = signal.SIGTERM
    fault = check()
    assert fault is not None and fault.reason == "signal", "Slurm is asked why: the signal may have killed that rank"
    state._launched = replace(state.world, rank=1)
    assert check() is None, "only rank 0 asks the file system"
    state._launched = replace(state.world, rank=0)
    gone_file(folder, 1).write_text("1")
    assert check() is None, "a rank that fails by itself reports why"


def test_a_file_system_that_fails_for_a_moment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks also ends the attempt in time after a signal, and keeps a timer from ending the process."""
    attempt, engine, _ = an_attempt(root, "stale")
    attempt._watchdog.close()
    attempt._state.engine = engine

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    assert attempt._end_by_fault.check() is None


def test_the_next_node_loses_power(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes no connection. The attempt ends long before launch.hang_timeout_s, and blames it. Before the first tick
    the ranks do not know each other's hosts."""
    attempt, _, _ = an_attempt(root, "power")
    attempt._watchdog.close()
    asked: list[World] = []

    def of(world: World, _: object) -> Mock:
        asked.append(world)
        return Mock(is_dead=len(asked) == 1, host="n2")

    monkeypatch.setattr(Neighbour, "of", of)
    assert attempt._end_by_fault.check() is None and not asked
    attempt._state.stop = Mock(tick=1, signal=None, noticed_at=None)
    fault = attempt._end_by_fault.check()
    assert fault is not None and (fault.reason, fault.silent, fault.blames) == ("hung", True, "n2")
    assert attempt._end_by_fault.check() == fault and len(asked) == 1, "one neighbour"
    attempt._end_by_fault.close()
