"""A rescue on a rank whose thread that trains waits in a launch into a full queue: the driver answers nobody.

The loops are the real ones, the device is scripted. Its memory is read past the driver. Where that is not possible,
what cannot be saved is given up within seconds, with the reason in the record; a device that answers again in time is
saved from.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from laststep.attempt import end_by_fault
from laststep.attempt.end_by_fault import EndByFault, Rescuer
from laststep.attempt.ending import AttemptState
from laststep.attempt.grace import GracePeriod
from laststep.attempt.rescue_plan import Assignment, Plan
from laststep.checkpoint.files import Stripe
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.loops.engine import Engine, SavableCopy
from laststep.ranks import device as device_thread
from laststep.ranks import disk
from laststep.ranks.fault import DeviceSilent, Fault
from laststep.ranks.process import Signals
from laststep.ranks.world import ShardPlace
from laststep.records.attempts import begin_attempt
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.loops.test_behind_a_device import Disturbed
from tests.support.loops import a_loop, checkpoint, lines, settings_of, undisturbed_run
from tests.support.project import wait_until
from tests.support.records import a_world
from tests.support.states import save_frozen

STEP = 4  # in whose collective the device hangs


class Ended(Exception):
    """The process would have ended here."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device counts as silent after a second."""
    monkeypatch.setattr(device_thread, "ANSWER_S", 1.0)


@contextlib.contextmanager
def a_full_queue(
    kind: str, settings: Config, monkeypatch: pytest.MonkeyPatch, past: bool = False
) -> Iterator[tuple[Engine, Disturbed]]:
    """A loop whose device hangs in a step, and whose queue is full. At the end the device goes on."""
    disturbed = Disturbed(monkeypatch, capacity=2, past=past)
    with contextlib.ExitStack() as closing, a_loop(kind, settings, closing) as engine:
        disturbed.hang_in(engine, STEP)
        threading.Thread(target=disturbed.run, args=(engine,), daemon=True).start()
        wait_until(lambda: disturbed.queue.full, "the queue does not fill")
        try:
            yield engine, disturbed
        finally:
            disturbed.queue.go_to(sys.maxsize)


def state_of(settings: Config, engine: Engine) -> AttemptState:
    """The state of the attempt that runs this loop."""
    signals = cast(Signals, SimpleNamespace(first=None, first_at=None, received=[], requeue=None))
    run = RunDir(Path(settings.launch.root) / str(settings.launch.name))
    settings.save(run.config)
    state = AttemptState(settings, run, a_world(), signals)
    begin_attempt(run, state.world, 0)
    disk.acquire_run_lock(run.lock, state.world)
    state.engine = engine
    return state


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_the_state_is_read_past_the_driver(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after any rank's death under NCCL, within a second or so: the CPU runs ahead until the queue is full. No step
    may be lost all the same: the last whole one is saved, bit for bit, with its lines."""
    expected = undisturbed_run(kind, tmp_path)
    with a_full_queue(kind, settings_of(tmp_path, "past"), monkeypatch, past=True) as (engine, disturbed):
        disturbed.queue.rewind()
        assert engine.freeze(timeout_s=0.0) and engine.position.step == STEP - 1
        save_frozen(engine)
        assert disturbed.queue.full, "the thread that trains must still hold the driver's lock"
    run = RunDir(tmp_path / "past")
    saved = checkpoint(run, STEP - 1)
    assert saved == checkpoint(expected, STEP - 1)
    assert lines(run) == lines(expected)[: saved["position"]["records"]]


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_the_end_is_recorded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank is the only survivor. It ends long before the rescue's own deadline of a minute, and the record says
    why steps are lost, which the user would otherwise look for in the network."""
    monkeypatch.setattr(end_by_fault, "MAIN_THREAD_S", 0.0)
    monkeypatch.setattr(end_by_fault, "exit_now", Mock(side_effect=Ended))
    settings = settings_of(tmp_path, "silent", "train.log_every=1")
    with a_full_queue(kind, settings, monkeypatch) as (engine, _):
        state = state_of(settings, engine)
        done = engine.readback.first_step
        with pytest.raises(Ended):
            EndByFault(state, GracePeriod(state)).run(Fault("hung", "rank 1 on n2 is stuck"))
        (record,) = read_lines(state.run_dir.attempts)
    assert record["reason"] == "hung" and "rank 1 on n2 is stuck" in record["error"]
    assert "rank 0 on here saves nothing: its device does not answer" in record["error"]
    assert done >= 1 and record["end_step"] == record["lost_steps"] == done, "a loss must not be called none"


def test_no_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal SIGKILL may come before the survivors have agreed on the end. The reason is recorded all the
    same."""
    monkeypatch.setattr(end_by_fault, "exit_now", Mock(side_effect=Ended))
    settings = settings_of(tmp_path, "late")
    with a_full_queue("task", settings, monkeypatch) as (engine, _):
        state = state_of(settings, engine)
        end = EndByFault(state, GracePeriod(state))
        end._rescuer = Mock(silence="its device does not answer")
        with pytest.raises(Ended):
            end._exit_at_last_moment()
        (record,) = read_lines(state.run_dir.attempts)
    assert record["error"].startswith("its device does not answer\nno time was left to save step ")


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_a_device_that_answers_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that it waited for was only slow. From then on this rank can save what it holds, with its lines."""
    expected = undisturbed_run(kind, tmp_path)
    settings = settings_of(tmp_path, "again")
    with a_full_queue(kind, settings, monkeypatch) as (engine, disturbed):
        for _ in range(2):
            with pytest.raises(DeviceSilent):
                engine.freeze(timeout_s=0.0)
        disturbed.queue.go_to(sys.maxsize)

        def freezes() -> Any:
            with contextlib.suppress(DeviceSilent):
                return engine.freeze(timeout_s=0.0)

        wait_until(freezes, "the device answers, and no state is whole")
        save_frozen(engine)
        step = engine.position.step
    run = RunDir(tmp_path / "again")
    assert step >= STEP and CheckpointStore(run.checkpoints).steps() == [step]
    saved = checkpoint(run, step)
    assert saved == checkpoint(expected, step) and lines(run) == lines(expected)[: saved["position"]["records"]]


def test_a_device_that_falls_silent_during_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue fills while the state is copied. The copy ends within seconds, and nothing of it is committed."""
    disturbed = Disturbed(monkeypatch, capacity=1000)
    with contextlib.ExitStack() as closing, a_loop("task", settings_of(tmp_path, "during"), closing) as engine:
        disturbed.hang_in(engine, STEP)
        disturbed.train(engine)
        disturbed.queue.rewind()
        assert engine.freeze(timeout_s=0.0) and engine.position.step == STEP - 1
        with engine.frozen() as frozen:
            held, release = threading.Event(), threading.Event()

            def launch() -> None:
                with disturbed.queue.driver:
                    held.set()
                    release.wait(60)

            launching = threading.Thread(target=launch)
            launching.start()
            held.wait(60)
            with pytest.raises(DeviceSilent):
                frozen.write_part("rescue-0", 0, Stripe(0, 1), "part", lambda: None)
            release.set()
            launching.join(60)
        disturbed.queue.go_to(sys.maxsize)
    assert CheckpointStore(RunDir(tmp_path / "during").checkpoints).steps() == []


MOMENT = (8, 0, False, False)


def a_rescuer(tmp_path: Path) -> tuple[Rescuer, Mock, Mock]:
    """One whose loop has a copy of its shard in host memory; its loop and its rescue are stand-ins."""
    settings = settings_of(tmp_path, "copies")
    engine, rescue = Mock(name="engine"), Mock(name="rescue")
    engine.saves.saved.step, engine.saves.saving, engine.position.step, engine.position.moment = 3, None, 8, MOMENT
    engine.place, engine.rescuable, engine.can_advance, engine.gathered = ShardPlace(1, 2, 0, 1), True, False, None
    engine.freeze_copies.return_value = [SavableCopy(MOMENT, 1, 64, own=True)]
    engine.frozen.return_value.__enter__ = Mock(return_value=Mock(bytes=64))
    engine.frozen.return_value.__exit__ = Mock(return_value=None)
    (tmp_path / "copies").mkdir(exist_ok=True)
    return Rescuer(state_of(settings, engine), Fault("hung", "rank 1 is stuck"), rescue, lambda: False), engine, rescue


def test_copies_in_host_memory_are_saved(tmp_path: Path) -> None:
    """With checkpoint.replicas they need no device: no step is lost, though nobody can read the shard itself."""
    rescuer, engine, rescue = a_rescuer(tmp_path)
    engine.freeze.side_effect = DeviceSilent("its device does not answer")
    rescuer.announce()
    (copy,) = rescue.announce.call_args.args
    assert (copy.moment, copy.shard, copy.commits) == (MOMENT, 1, True)
    assert rescue.announce.call_args.kwargs == {"gathered": None, "silence": "its device does not answer"}


@pytest.mark.parametrize("duty", ["write", "commit"])
def test_it_says_what_is_left(duty: str, tmp_path: Path) -> None:
    """The device falls silent after it was frozen. The others must not wait for what this rank has announced."""
    rescuer, engine, rescue = a_rescuer(tmp_path)
    rescuer.announce()
    engine.freeze.side_effect = engine.frozen.side_effect = silence = DeviceSilent("its device does not answer")
    rescue.plan = plan = Plan("rescue-0", 0, MOMENT, (Assignment(1, 0, 1, 0),), act=duty == "commit")
    rescuer.do(plan if duty == "commit" else plan.assignments[0])
    assert rescue.announce.call_count == 2 and rescue.announce.call_args.kwargs["silence"] == str(silence)
    assert not (rescue.report_unable.called or rescue.report_acted.called), "its copies can still be written"
