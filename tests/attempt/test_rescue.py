"""When some ranks die or get stuck, no step is lost, nothing hangs, and the log names them.

Every test ends the same way: the next attempt continues at the interrupted step, and the run ends with the weights and
metrics of an undisturbed one. If a rescue saved a state from the middle of a step, or one that the ranks did not share,
the last bits would differ.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from laststep.attempt import end_by_fault as rescuer
from laststep.attempt.end_by_fault import EndByFault, Rescuer, blamed_hosts
from laststep.attempt.ending import AttemptState
from laststep.attempt.grace import GracePeriod
from laststep.attempt.rescue import Rescue, write_fields
from laststep.attempt.rescue_plan import Holding, Plan, Survivor
from laststep.attempt.restart import SHELL_KILLED, Ending
from laststep.checkpoint import files
from laststep.checkpoint.store import CheckpointStore
from laststep.cli.verify import inspect
from laststep.ranks import group
from laststep.ranks.beside import BesideTraining
from laststep.ranks.fault import Fault
from laststep.ranks.group import is_peer_loss
from laststep.ranks.process import STOP_SIGNALS, Signals
from laststep.ranks.seal import Seal
from laststep.records.attempts import begin_attempt
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.disk import eager, without_locks
from tests.support.project import wait_until
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.records import a_world
from tests.support.runs import EVERYTHING, FAULTY, KILLED, befall, config, only, undisturbed
from tests.support.tasks import read_one_step_late


def tree(pid: int) -> list[int]:
    """A process with its children, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in tree(int(child)))]


def slug(request: pytest.FixtureRequest) -> str:
    """A run's name, for a test's parameters."""
    return str(request.node.callspec.id).replace(" ", "-").replace(",", "-")


def goes_on(root: Path, name: str, ranks: int, *options: str) -> RunDir:
    """The next attempt, which must finish like an undisturbed run."""
    run = train(config(root, name, ranks, (*FAULTY, *options)))
    assert fingerprint(run) == undisturbed(ranks, options)
    return run


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (2, "kill step 10 rank 1"),
        (2, "kill step 10 rank 0"),  # the key-value store dies with it
        (2, "kill step 1 rank 1"),  # there is nothing to save yet
        (4, "kill step 5 rank 0,2,3"),
    ],
    ids=str,
)
def test_killed(root: Path, ranks: int, fault: str, request: pytest.FixtureRequest) -> None:
    """Out of memory, or a dead node: a surviving rank saves the last finished step. Batch norm, dropout, AdamW,
    averaging and accumulation all carry state, and rank 0's batch norm counts even if rank 0 died."""
    name, step = slug(request), int(fault.split()[2])
    attempt, codes = befall(root, name, ranks, fault, *EVERYTHING)
    hit = [int(rank) for rank in fault.split()[-1].split(",")]
    assert codes == [KILLED if rank in hit else 1 for rank in range(ranks)], attempt.output()
    record = only(attempt)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("failed", step - 1, 0)
    # One that had noticed the first death, and signed in before its own, counts as a survivor without a supervisor.
    signed_in = {path.name for path in attempt.run.rescues.glob("*/rank_*.json")}
    named = (f"rank {rank} on " in record["error"] or f"rank_{rank}.json" in signed_in for rank in hit)
    assert all(named), "the dead ranks are named"
    assert "gone (killed" in record["error"]
    run = goes_on(root, name, ranks, *EVERYTHING)
    assert read_lines(run.attempts)[1]["start_step"] == step - 1


def test_killed_on_a_file_system_without_locks(root: Path) -> None:
    """Such as Lustre without `-o flock`: the survivor must know that the run is still its own attempt's, and save."""
    faulty = config(root, "no-locks", 2, FAULTY)
    attempt = Attempt(faulty, {"LASTSTEP_TEST_FAULT": "kill step 5 rank 0"}, before=without_locks)
    assert attempt.wait() == [KILLED, 1], attempt.output()
    assert (only(attempt)["end_step"], only(attempt)["lost_steps"]) == (4, 0), attempt.output()
    assert fingerprint(train(faulty, before=without_locks)) == undisturbed(2, ())


def test_killed_while_another_attempt_waits(root: Path) -> None:
    """A user has started the run twice. The lock is free the moment that rank 0 of the first is dead, long before its
    survivor has anything to write: the second must leave it alone until the step is saved."""
    faulty = config(root, "newcomer", 2, FAULTY)
    first = Attempt(faulty, {"LASTSTEP_TEST_FAULT": "halt step 5 rank 0"})
    first.wait_for("fault: halt")
    second = Attempt(faulty, before=eager)
    second.wait_for("waiting for another attempt to release this run")
    first.signal(signal.SIGKILL, 0)
    assert first.wait() == [KILLED, 1] and second.wait() == [0, 0], first.output() + second.output()
    lost, finished = read_lines(first.run.attempts)
    assert (lost["end_step"], lost["lost_steps"], finished["start_step"]) == (4, 0, 4), second.output()
    assert fingerprint(first.run) == undisturbed(2, ())


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_metrics_are_being_read(root: Path, rank: int) -> None:
    """On a GPU no rank waits for a step's metrics. They are still written exactly once: by a surviving rank, or by all
    ranks if they stop at just that moment."""
    name = f"late-{rank}"
    faulty = config(root, name, 2, FAULTY)
    attempt = Attempt(faulty, {"LASTSTEP_TEST_FAULT": f"kill step 4 rank {rank}"}, before=read_one_step_late)
    assert sorted(attempt.wait()) == [KILLED, 1]
    assert only(attempt)["end_step"] == 3, "whose metrics were being read"
    stopped = config(
        root, name, 2, ("task=tests.support.tasks.Signalled", "launch.hang_timeout_s=5", "launch.max_failures=9")
    )
    assert Attempt(stopped, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 4 rank 1"}, before=read_one_step_late).wait() == [
        143,
        143,
    ]
    run = train(faulty, before=read_one_step_late)
    assert [record["end_step"] for record in read_lines(run.attempts)] == [3, 7, 14]
    assert fingerprint(run) == undisturbed(2, ())


@pytest.mark.parametrize("fault", ["halt step 10 rank 1", "halt step 10 rank 0", "sleep step 4 rank 1"], ids=str)
def test_stuck(root: Path, fault: str, request: pytest.FixtureRequest) -> None:
    """A stuck rank raises no error: the others would wait for it forever, wasting every GPU of the job."""
    name = slug(request)
    kind, _, step, _, hit = fault.split()
    attempt, codes = befall(root, name, 2, fault)
    assert 1 in codes, attempt.output()
    record = only(attempt)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("hung", int(step) - 1, 0)
    assert f"rank {hit} on " in record["error"]
    living = attempt.logs[1 - int(hit)].read_text()
    assert f"] rank {hit} on " in living, "one line names it"
    assert "Thread 0x" in living and "in _engine_run_backward" in living, "the stacks of the waiting rank"
    if kind == "sleep":
        assert "is stuck in befall" in record["error"] or "is stuck in wait" in record["error"]
        assert "in befall" in attempt.logs[int(hit)].read_text(), "the stack of the stuck rank is in its own log"
    goes_on(root, name, 2)


def test_a_loader_worker_hangs(root: Path) -> None:
    """A disk that went away, for one rank: the batch never comes. The loader has no timeout of its own, which would
    count time in which the job was suspended; so the watchdog must end the attempt, and name the rank."""
    attempt, codes = befall(root, "halted-worker", 2, "halt-worker step 3 rank 1", "data.workers=1")
    assert codes == [1, 1], attempt.output()
    record = only(attempt)
    assert (record["reason"], record["lost_steps"]) == ("hung", 0)
    assert "rank 1 on " in record["error"] and "rank 0 on " not in record["error"], record["error"]
    goes_on(root, "halted-worker", 2, "data.workers=1")


def short_meeting() -> None:
    """Have all that lasts as long as ranks wait for each other last as long as launch.hang_timeout_s."""
    group.MEETING_S = 0.0


def test_suspended(root: Path) -> None:
    """Slurm suspends all processes of a job, for longer than any timeout. On every rank something was waiting when that
    happened: the interpreter's watch, a collective, the store. By the clock all of it has timed out as they wake, and
    the run died without a rescue. It trains on, as if nothing had been."""
    suspended = config(root, "suspended", 2, (*FAULTY, *EVERYTHING, "launch.hang_timeout_s=3"))
    go = root / "go"
    place = {"LASTSTEP_TEST_FAULT": "wait step 5 rank 0,1", "LASTSTEP_TEST_GO": str(go)}
    attempt = Attempt(suspended, place, before=short_meeting)
    for rank in (0, 1):
        attempt.wait_for("fault: wait", rank)
    everything = [pid for rank in attempt.ranks for pid in tree(rank.pid or 0)]
    assert len(everything) >= 3 * len(attempt.ranks), "a rank, its loader's worker, the watch of its interpreter"
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)  # what a clock would count, more than twice the timeout
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    go.touch()
    assert attempt.wait() == [0, 0], attempt.output()
    assert reasons(attempt.run) == ["finished"]
    assert fingerprint(attempt.run) == undisturbed(2, tuple(EVERYTHING))


def test_stuck_with_the_interpreters_lock(root: Path) -> None:
    """No Python thread of that rank runs again, not even its watchdog: a process beside it must end it."""
    spin = {"LASTSTEP_TEST_FAULT": "spin step 3 rank 1"}
    attempt = Attempt(config(root, "spin", 2, FAULTY), spin, before=faulthandler.disable)  # pytest has enabled it
    assert attempt.wait() == [1, -signal.SIGABRT], attempt.output()
    assert only(attempt)["reason"] == "hung"
    said = attempt.logs[1].read_text()
    assert "its code holds the interpreter's lock" in said and "in befall" in said


def test_a_rank_crashes_in_c(root: Path) -> None:
    """Its log has the Python stack: else nobody could tell a crash in an extension from a kill."""
    crash = {"LASTSTEP_TEST_FAULT": "crash step 3 rank 1"}
    attempt = Attempt(config(root, "crash", 2, FAULTY), crash, before=faulthandler.disable)  # pytest has enabled it
    assert attempt.wait() == [1, -signal.SIGSEGV], attempt.output()
    said = attempt.logs[1].read_text()
    assert "Fatal Python error: Segmentation fault" in said and "in befall" in said
    assert (only(attempt)["end_step"], only(attempt)["lost_steps"]) == (2, 0)


def test_raised(root: Path) -> None:
    """One rank fails, and all of them are alive to save. The record has the traceback of the rank that failed first,
    not the "connection closed" of its peers, which would send a user looking in the wrong place."""
    attempt, codes = befall(root, "raised", 3, "raise step 9 rank 1", "train.batch_size=6")
    assert codes == [1, 1, 1]
    record = only(attempt)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("failed", 8, 0)
    assert record["error"].startswith("rank 1 on ") and "ValueError: a bad sample" in record["error"]
    assert "ValueError: a bad sample" in attempt.logs[0].read_text(), "rank 0's log is where a user looks"
    for rank in (0, 2):  # a traceback of theirs would hide the one that matters
        assert "lost contact:\n" not in attempt.logs[rank].read_text()
    goes_on(root, "raised", 3, "train.batch_size=6")


def test_alone(root: Path) -> None:
    """The only rank of a run fails: it saves its own state."""
    attempt, codes = befall(root, "alone", 1, "raise step 9 rank 0")
    assert codes == [1] and only(attempt)["lost_steps"] == 0
    goes_on(root, "alone", 1)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3400, unhandled system error, NCCL version 2.27.5\n"


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError(f"{GLOO}/pair.cc:561] Connection closed by peer [10.0.0.7]:24992. This is typically"), True),
        (RuntimeError(f"{GLOO}/pair.cc:545] Read error [10.0.0.7]:21687: Connection reset by peer"), True),
        (RuntimeError(f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),  # gloo's second error after a timeout
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (dist.DistStoreError("wait timeout after 500ms, keys: /x"), True),
        (dist.DistBackendError(f"{NCCL}ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError(f"{NCCL}ncclSystemError: System call (e.g. socket, malloc)"), True),
        (dist.DistBackendError(f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:"), False),
        (dist.DistBackendError(f"{NCCL}ncclInvalidUsage: This usually reflects invalid usage"), False),
        (RuntimeError("[enforce fail at /gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find"), False),
        (RuntimeError("data/igloo/train.bin: Connection closed by the archive"), False),
        (RuntimeError("cannot read /scratch/nccl-tests/set.bin"), False),
        (ValueError(f"{GLOO}/pair.cc:561] Connection closed by peer"), False),
        (FileNotFoundError(2, "No such file or directory", "data/igloo/train.bin"), False),
        # From Python's own pipe to a loader process that was killed.
        (ConnectionResetError(104, "Connection reset by peer"), False),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_what_a_lost_peer_looks_like(error: Exception, is_loss: bool) -> None:
    """If an error of this rank is taken for a lost peer, the record blames no rank and lacks the traceback. If a lost
    peer is taken for an error of this rank, the record blames a healthy one."""
    assert is_peer_loss(error) is is_loss


HUNG = Fault("hung", "rank 1 on n2 is stuck", blames="n2")
BUG, GPU = Fault("failed", "a bad sample"), Fault("failed", "CUDA error: unknown error", blames="n3")
LOST_CONTACT = Fault("failed", "rank 0 lost contact", cause=False)


@pytest.mark.parametrize(
    ("fault", "failures", "missing", "blamed"),
    [
        (HUNG, (), [], ["n2"]),
        (HUNG, (BUG,), [0], ["n2"]),
        (GPU, (GPU,), [], ["n3"]),
        (LOST_CONTACT, (), [1, 2], ["n2"]),  # both ranks of n2 were killed
        (LOST_CONTACT, (), [], []),
        (LOST_CONTACT, (GPU,), [], ["n3"]),  # reported by a rank that noticed first
        (LOST_CONTACT, (BUG,), [1], []),  # it raised an error before it ended: a bug
        (BUG, (BUG,), [1], []),
        (Fault("signal", "giving the step up"), (), [1], []),
    ],
)
def test_who_is_blamed(fault: Fault, failures: tuple[Fault, ...], missing: list[int], blamed: list[str]) -> None:
    """A run leaves a node that is blamed twice. The user's own bug must blame nobody."""
    world = a_world(size=4, hosts=("n1", "n2", "n2", "n3"))
    assert blamed_hosts(fault, cast("Plan", SimpleNamespace(failures=failures)), missing, world) == blamed


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("srun", Ending("failed", True, "received SIGTERM", by_srun=True)),
        ("shell", Ending("failed", True, "the job's batch shell was killed")),
        ("preempted", Ending("preempted", False)),
    ],
)
def test_a_signal_after_a_rank_was_killed(
    root: Path, name: str, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a task has been killed, srun sends SIGTERM to the others. They may get it before they notice, and the record
    must say what ended the attempt. A preemption kills ranks too, and blames no node."""
    monkeypatch.setattr(rescuer, "ending_by_signal", lambda state: ending)
    settings, run = config(root, f"signal-{name}", 2, ()), RunDir(root / f"signal-{name}")
    run.path.mkdir()
    world = a_world(size=2, hosts=("n1", "n2"))
    begin_attempt(run, world, 0)
    number = signal.SIGTERM
    state: Any = SimpleNamespace(
        run_dir=run, world=world, config=settings, engine=None, start_step=0, signal=number, cause_signal=number
    )
    state.beside = BesideTraining(settings, run, world)
    rescue: Any = SimpleNamespace(missing=lambda plan: [1])
    plan: Any = SimpleNamespace(failures=(), lost_shards=(), silences=())
    Rescuer(state, Fault("signal", "giving the step up"), rescue, lambda: True)._record(plan, 5, 5)
    (record,) = read_lines(run.attempts)
    assert record["reason"] == ending.reason
    if ending.by_srun:
        assert record["blamed"] == ["n2"] and "rank 1 on n2: gone" in record["error"]
    else:
        assert (record["blamed"], record["error"]) == ([], ending.error)


def test_a_warning_kills_a_rank_that_starts(root: Path) -> None:
    """Slurm's warning reaches a rank that cannot catch it yet, another rank, later, dies of it, and srun sends SIGTERM
    to the first one. It then catches both, SIGTERM first, since that is how the kernel delivers them. Recorded as
    failed the run would lose one of its failures, and an innocent node the job."""
    state = a_rank(root, "warned", 0)
    before, main = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), threading.main_thread().ident
    assert main is not None
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.pthread_kill(main, number)
    signals = state.signals = Signals.catch()
    try:
        wait_until(lambda: len(signals.received) == 2, "the signals were not caught")
        assert signals.first == signal.SIGTERM, "else this test shows nothing"
        assert state.cause_signal == signal.SIGUSR2
    finally:
        signals.release(process_ends=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_warning_long_after_a_rank_was_killed(root: Path) -> None:
    """srun's SIGTERM told of a killed rank, and a preemption comes later: that rank is still what ended the attempt."""
    state = a_rank(root, "warned-later", 0)
    state.signals.first, state.signals.first_at = signal.SIGTERM, 5.0
    state.signals.received += [(signal.SIGTERM, 5.0), (signal.SIGUSR2, 9.0)]
    assert state.cause_signal == signal.SIGTERM


def test_a_rank_dies_while_the_run_is_cancelled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has cancelled the run. Recorded as failed it would be requeued, and train on."""
    state = a_rank(root, "cancelled", 0)
    monkeypatch.setattr(state, "_launched", replace(state.world, on_slurm=True))
    state.signals.received.append((signal.SIGINT, 0.0))
    end_by_fault(state)
    (record,) = read_lines(state.run_dir.attempts)
    assert (record["reason"], record["requeue"]) == ("cancelled", False) and "rank 0 on here failed" in record["error"]


def test_a_rank_fails_after_its_batch_shell(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The OOM killer took the batch shell, so Slurm ends the job, and a rank fails of that before it has stopped.
    Nobody else is left who could requeue the job: the run would have ended for good."""
    state, requeued = a_rank(root, "no-shell", 0), Mock()
    on_slurm = replace(state.world, on_slurm=True, launcher="submitit-slurm", step_restarts=0, supervised=True)
    monkeypatch.setattr(state, "_launched", on_slurm)
    monkeypatch.setattr(rescuer, "ending_by_signal", lambda _: Ending("failed", True, SHELL_KILLED))
    monkeypatch.setattr(rescuer, "requeue", requeued)
    state.signals.first = signal.SIGTERM
    end_by_fault(state)
    (record,) = read_lines(state.run_dir.attempts)
    assert record["reason"] == "failed" and record["error"].endswith(f"\n{SHELL_KILLED}")
    requeued.assert_called_once()


def test_a_loader_worker_is_killed(root: Path) -> None:
    """By the kernel, when memory runs out: the rank itself is alive."""
    attempt, codes = befall(root, "worker", 2, "worker step 3 rank 1", "data.workers=1")
    assert codes == [1, 1], attempt.output()
    record = only(attempt)
    assert record["lost_steps"] == 0 and record["end_step"] >= 2
    assert re.search("DataLoader worker|rebuild_storage_fd", record["error"]), "or the rank was just reading from it"
    goes_on(root, "worker", 2, "data.workers=1")


@pytest.mark.parametrize(("ranks", "dies"), [(2, "1"), (2, "0"), (4, "0,2")])
def test_killed_in_the_save_of_a_stop(root: Path, ranks: int, dies: str) -> None:
    """The checkpoint that all ranks were writing together will never be complete: one survivor writes all of it."""
    name = f"save-{ranks}-{dies[0]}"
    signalled = config(root, name, ranks, ("task=tests.support.tasks.DiesInTheSave",))
    env = {"LASTSTEP_TEST_SIGNAL": "SIGUSR2 step 4 rank 0", "LASTSTEP_TEST_DIES": dies}
    attempt = Attempt(signalled, env)
    codes = attempt.wait()
    assert codes == [KILLED if str(rank) in dies.split(",") else 1 for rank in range(ranks)], attempt.output()
    record = only(attempt)
    assert (record["end_step"], record["lost_steps"]) == (4, 0)
    assert [(checkpoint["step"], checkpoint["ok"]) for checkpoint in inspect(attempt.run)] == [(4, True)]


def test_killed_after_a_damaged_checkpoint(root: Path) -> None:
    """The step to be saved has a checkpoint already, which was found damaged when this attempt began. It must not be
    taken for a good one."""
    signalled = config(root, "damaged", 2, ("task=tests.support.tasks.Signalled", "checkpoint.every_steps=2"))
    Attempt(signalled, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 0"}).wait()
    run = RunDir(root / "damaged")
    (shard,) = (run.checkpoints / "step_000000005").glob("shard_0000*")
    shard.write_bytes(shard.read_bytes()[:-1])
    attempt, _ = befall(root, "damaged", 2, "kill step 2 rank 1", "checkpoint.every_steps=2")
    assert "skipped step_000000005: shard_0000" in attempt.output()
    record = read_lines(run.attempts)[1]
    assert (record["start_step"], record["end_step"], record["lost_steps"]) == (4, 5, 0)
    goes_on(root, "damaged", 2, "checkpoint.every_steps=2")


def test_no_data(root: Path) -> None:
    """An error before the first step would repeat: the run is not retried, and its record says what is wrong."""
    attempt = Attempt(config(root, "nodata", 2, ("task=tests.support.tasks.Unprepared",)))
    assert attempt.wait() == [1, 1]
    record = only(attempt)
    assert record["reason"] == "failed" and "FileNotFoundError: train/0001.jpg" in record["error"]
    assert record["requeue"] is False


def test_a_step_longer_than_the_grace(root: Path) -> None:
    """The step will not finish before SIGKILL: it is given up, and the step before it is saved. No rank is at fault, so
    the reason in the record is that of the signal."""
    options = ("launch.grace_s=14", "launch.hang_timeout_s=60")
    attempt = Attempt(config(root, "grace", 2, (*FAULTY, *options)), {"LASTSTEP_TEST_FAULT": "sleep step 5 rank 1"})
    attempt.wait_for("fault: sleep", rank=1)
    attempt.signal(signal.SIGTERM, 0, 1)
    assert attempt.wait() == [1, 1], attempt.output()
    record = only(attempt)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("cancelled", 4, 0)
    goes_on(root, "grace", 2, *options)


def test_reasons_stay_apart(root: Path) -> None:
    """The reasons in attempts.jsonl of a run whose attempts ended in three ways."""
    befall(root, "three", 2, "kill step 3 rank 1")
    befall(root, "three", 2, "sleep step 3 rank 0")
    run = goes_on(root, "three", 2)
    assert reasons(run) == ["failed", "hung", "finished"]


def a_rank(root: Path, name: str, rank: int) -> AttemptState:
    """This process as a rank of an attempt that has begun, at step 5; the newest checkpoint is that of step 3."""
    small = config(root, name, 2, ())
    run = RunDir(root / name)
    run.path.mkdir()
    small.save(run.config)
    state = AttemptState(
        small, run, a_world(rank=rank, size=2), cast(Signals, SimpleNamespace(first=None, first_at=None, received=[]))
    )
    state.engine = engine = Mock(name="engine")
    engine.position.step, engine.saves.saved.step, engine.saves.saving = 5, 3, None
    engine.position.moment, engine.rescuable = (5, 0, False, False), True
    engine.can_advance, engine.has_lost_state, engine.steps_done = False, False, 5
    engine.freeze_copies.return_value, engine.gathered = [], None
    engine.progress.step_s.return_value, engine.saves.stalled_s = 0.1, 0.0
    engine.saves.writer.buffer_bytes = 0
    begin_attempt(run, state.world, 0)
    return state


def end_by_fault(state: AttemptState) -> Mock:
    """This rank's part in the end by fault; returns its loop."""
    fault = Fault("failed", "rank 0 on here failed")
    EndByFault(state, GracePeriod(state)).take_part(fault)
    return cast(Mock, state.engine)


def test_a_rank_saves_only_what_it_knows_to_be_whole(root: Path) -> None:
    """The best survivor dies before it has written anything. A rank whose own update was cut off must not save its
    memory under that step instead: the checkpoint would be intact by every hash, and wrong."""
    state = a_rank(root, "torn", 1)
    engine = cast(Mock, state.engine)
    engine.freeze.return_value, engine.has_lost_state = False, True  # in the middle of the update of step 6
    folder = state.run_dir.rescues / state.world.attempt
    folder.mkdir(parents=True)
    better = Survivor(rank=0, frozen=True, holdings=(Holding((5, 0, False, False), 64, saved=False),))
    state.group = Mock(world=state.world, seal=Seal())
    write_fields(folder / "rank_0.json", asdict(better), state.group.seal)
    end_by_fault(state).frozen.assert_not_called()
    (record,) = read_lines(state.run_dir.attempts)
    assert (record["end_step"], record["lost_steps"]) == (5, 2), "step 5 was done, step 3 is saved"


def test_a_device_error_while_the_state_is_frozen(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After a CUDA error every call on the device repeats it. The rank must still take part, or the end of the attempt
    would not be recorded, and say why it cannot save."""
    state = a_rank(root, "sticky", 0)
    engine = cast(Mock, state.engine)
    engine.freeze.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    engine.has_lost_state = True
    end_by_fault(state).frozen.assert_not_called()
    (record,) = read_lines(state.run_dir.attempts)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("failed", 5, 2), "steps were done"
    assert "this rank cannot save its state" in capfd.readouterr().out


def small_stripes() -> None:
    """In this rank states are cut as finely as large ones."""
    files.STRIPE_BYTES = 1 << 16


def dies_in_its_stripe() -> None:
    """The same, and rank 2 is killed when it has written a part of its stripe."""
    small_stripes()
    if os.environ["SUBMITIT_LOCAL_GLOBALID"] == "2":
        Rescue.check = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


@pytest.mark.parametrize(("before", "dead"), [(small_stripes, [0]), (dies_in_its_stripe, [0, 2])])
def test_saved_together(root: Path, before: Callable[[], None], dead: list[int]) -> None:
    """A large state takes one rank longer to write than Slurm leaves it, so all that survive write a part. Another one
    may die meanwhile."""
    name, options = f"together-{len(dead)}", ("train.batch_size=16",)
    faulty = config(root, name, 4, (*FAULTY, *options))
    attempt = Attempt(faulty, {"LASTSTEP_TEST_FAULT": "kill step 5 rank 0"}, before=before)
    assert attempt.wait() == [KILLED if rank in dead else 1 for rank in range(4)], attempt.output()
    record = only(attempt)
    assert (record["end_step"], record["lost_steps"]) == (4, 0)
    (checkpoint,) = inspect(attempt.run)
    shards = CheckpointStore(attempt.run.checkpoints).manifest(4).shards
    # On a starved machine a live rank may seem stuck for a moment; then its stripe is shared too.
    assert checkpoint["ok"] and len(shards) >= (3 if dead == [0] else 4), "what rank 2 did not write is shared"
    assert "ranks saved step 4 together" in attempt.output()
    goes_on(root, name, 4, *options)
