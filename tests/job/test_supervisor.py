"""The supervisors of two ranks, with stand-ins for the ranks and for Slurm. tests/slurm/ tests them on a real one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from laststep.attempt.rescue import gone_file, silent_file
from laststep.config.config import Config
from laststep.job.supervisor import GONE_S, STUCK_S
from laststep.ranks.world import World
from laststep.records.attempt_record import Reason
from laststep.records.attempts import begin_attempt, end_attempt, read_answer
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.trainer import Trainer
from tests.support.clients import Client, Clients, missing
from tests.support.forked import forked_python
from tests.support.needs import require
from tests.support.project import DEADLINE_S, PROJECT, wait_until
from tests.support.records import a_world

WORLD = a_world(
    size=2, job_id="7", launcher="submitit-slurm", on_slurm=True, hosts=("n1", "n1"), step_id=0, step_restarts=0
)
REMEMBERED_S = 3600.0  # longer than any test: what the hosts do not look for they never see
SUPERVISOR = "laststep.job.supervisor"
TROUBLED = "tests.job.troubled_supervisor"
SCONTROL = """\
#!/bin/bash
echo "$@" >> {folder}/asked
case "$1 $2" in
"show job")
  while [ -e {folder}/held ]; do sleep 0.05; done
  echo "JobId=7 JobState=$(cat {folder}/state) Restarts=0 EndTime=Unknown NodeList=n1 Reason=$(cat {folder}/reason)" ;;
"show node") echo "NodeName=n1 State=IDLE" ;;
esac
"""


class Step:
    """A step of a job: two supervisors, each with its rank, on `hosts` if given. The test sees the disk as it is."""

    def __init__(self, root: Path, of_rank_0: str = SUPERVISOR, hosts: Sequence[Client] = ()) -> None:
        disk, self.folder, self._hosts = disk_of(root), root / "ranks", hosts
        words = [f"launch.root={disk}", "launch.name=run", "launch.tasks_per_node=2", "launch.hang_timeout_s=5"]
        self.run: RunDir = run_folders.create(Config.load("mnist", words))
        self.folder.mkdir()
        (self.folder / "state").write_text("RUNNING")
        (self.folder / "reason").write_text("None")
        (self.folder / "scontrol").write_text(SCONTROL.format(folder=self.folder))
        (self.folder / "scontrol").chmod(0o755)
        self.config = Config.load("mnist", words)
        DelayedSubmission(Trainer(self.config)).dump(JobPaths(self.run.logs, "7").submitted_pickle)
        self.supervisors = {rank: self._start(rank, module) for rank, module in enumerate((of_rank_0, SUPERVISOR))}

    def _start(self, rank: int, module: str) -> subprocess.Popen[bytes]:
        place = {
            "SUBMITIT_EXECUTOR": "slurm",
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NODEID": "0",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "LASTSTEP_RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
            "LASTSTEP_TEST_RANKS": str(self.folder),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
        }
        words = [forked_python(), "-u", "-m", module, "-u", "-m", "tests.job.supervised", str(self.run.logs)]
        if self._hosts:
            words = self._hosts[rank].command(*words)
        with (self.run.logs / f"rank_{rank}.log").open("wb") as log:
            return subprocess.Popen(words, cwd=PROJECT, env={**os.environ, **place}, stdout=log, stderr=log)

    def began(self, rank: int, restarts: int = 0) -> int:
        """Wait for this start of the rank; returns its pid."""
        file = self.folder / f"began.{rank}.{restarts}"
        wait_until(file.exists, f"rank {rank} did not start for the {restarts + 1}. time: {self.said(rank)}")
        return int(file.read_text())

    def ends(self, rank: int, status: int, restarts: int = 0) -> None:
        """Have this start of the rank end with a status, or by the signal with this negative number."""
        temporary = self.folder / f"end.{rank}.tmp"
        temporary.write_text(str(status))
        temporary.rename(self.folder / f"end.{rank}.{restarts}")

    def attempt_begins(self, restarts: int = 0) -> None:
        """What rank 0 does first."""
        begin_attempt(self.run, self.world(restarts), 0)

    def world(self, restarts: int) -> World:
        name = "7-0-0" + (f"-{restarts}" if restarts else "")
        return replace(WORLD, step_restarts=restarts, attempt=name)

    def rescue(self, reason: Reason = "failed", restarts: int = 0, kept: int = 5) -> None:
        """What the survivors do: they begin their end by fault, and one of them records the end."""
        self.rescue_begins(restarts)
        assert end_attempt(self.run, self.world(restarts), self.config.launch, reason, kept, kept)

    def rescue_begins(self, restarts: int = 0) -> None:
        folder = self.run.rescues / self.world(restarts).attempt
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "leader_0.json").touch()

    def is_gone(self, rank: int, restarts: int = 0) -> bool:
        return gone_file(self.run.rescues / self.world(restarts).attempt, rank).exists()

    def waits_for_gone(self, rank: int, restarts: int = 0) -> None:
        """Wait until the rank's supervisor says that the rank has ended: the survivors would wait for it."""
        wait_until(lambda: self.is_gone(rank, restarts), f"the supervisor of rank {rank} says nothing")

    def status(self, rank: int) -> int:
        """Wait for the end of a supervisor; returns its exit status."""
        return self.supervisors[rank].wait(DEADLINE_S)

    def signal(self, rank: int) -> str:
        """Wait until the first start of the rank has caught a signal; returns its name."""
        return self.caught(rank, 0)

    def caught(self, rank: int, restarts: int) -> str:
        file = self.folder / f"signal.{rank}.{restarts}"
        return wait_until(lambda: file.read_text() if file.exists() else "", f"rank {rank} has caught no signal")

    def asked(self, word: str) -> int:
        """How often scontrol was asked for this."""
        file = self.folder / "asked"
        return file.read_text().count(word) if file.exists() else 0

    def said(self, rank: int) -> str:
        return (self.run.logs / f"rank_{rank}.log").read_text()

    def close(self) -> None:
        for supervisor in self.supervisors.values():
            supervisor.kill()
            supervisor.wait()


def disk_of(root: Path) -> Path:
    """The disk that the hosts share."""
    (root / "disk").mkdir(exist_ok=True)
    return root / "disk"


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    step = Step(tmp_path)
    yield step
    step.close()


@pytest.fixture(params=["one host", "two hosts"])
def anywhere(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Step]:
    """Also on two hosts that see what the other has done only when they look for it, see `world.fresh_view`."""
    if request.param == "two hosts":
        require(missing())
        with Clients(disk_of(tmp_path), 2, REMEMBERED_S) as hosts:
            step = Step(tmp_path, hosts=hosts)
            yield step
            step.close()
    else:
        step = Step(tmp_path)
        yield step
        step.close()


def test_the_ranks_start_again(anywhere: Step) -> None:
    """A rank is killed, the other saves and fails: both start again under the same supervisors, also a second time.
    After the rank's orderly end a supervisor ends as the rank does."""
    step = anywhere
    for restarts in range(2):
        step.began(0, restarts), step.began(1, restarts)
        step.attempt_begins(restarts)
        step.ends(1, -signal.SIGKILL, restarts)
        step.waits_for_gone(1, restarts)
        step.rescue(restarts=restarts, kept=5 + restarts)
        step.ends(0, 1, restarts)
    step.began(0, 2), step.began(1, 2)
    step.ends(0, 143, 2)
    step.ends(1, 0, 2)
    assert (step.status(0), step.status(1)) == (143, 0)
    assert step.asked("requeue") == 0


def test_a_frozen_rank_is_killed(anywhere: Step) -> None:
    """Nothing else would end it, and srun would never end. The others need not wait for it either."""
    step = anywhere
    frozen = step.began(1)
    step.began(0)
    step.attempt_begins()
    os.kill(frozen, signal.SIGSTOP)
    step.rescue_begins()
    step.waits_for_gone(1)
    step.rescue("hung")
    step.ends(0, 1)
    step.began(0, 1), step.began(1, 1)


@pytest.mark.parametrize("reason", ["finished", "preempted", "failed"])
def test_a_rank_that_waits_for_a_slow_disk(step: Step, reason: Reason) -> None:
    """After the orderly end of an attempt a rank may wait in the kernel, for a slow disk say: it is left alone, since
    to kill it would make a failure of what ended well. After a fault it would hold up the others, and is killed."""
    rank = step.began(1)
    step.began(0)
    step.attempt_begins()
    fifo = step.folder / "stuck.1.0"
    os.mkfifo(fifo)
    wait_until(lambda: stat_of(rank)[0] == "D", "the rank does not wait in the kernel")
    if reason == "failed":
        step.rescue(reason)
        step.waits_for_gone(1)
        return
    assert end_attempt(step.run, step.world(0), step.config.launch, reason, 5, 5)
    time.sleep(STUCK_S + 2)
    assert stat_of(rank)[0] == "D" and "killing" not in step.said(1)
    fifo.write_text("")
    step.ends(0, 0)
    step.ends(1, 0)
    assert (step.status(0), step.status(1)) == (0, 0)


def stat_of(process: int) -> list[str]:
    """The state of a process by one letter, its parent, and more: man 5 proc."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def test_a_frozen_supervisor_does_not_hold_the_job(step: Step) -> None:
    """Nobody else would notice: its rank is done, and srun waits for it."""
    rank, _ = step.began(1), step.began(0)
    supervisor = int(stat_of(rank)[1])
    os.kill(supervisor, signal.SIGSTOP)
    wait_until(lambda: stat_of(supervisor)[0] == "T", "the supervisor is not frozen")
    step.ends(0, 0)
    step.ends(1, 0)
    assert (step.status(0), step.status(1)) == (0, 0)


def test_ranks_that_do_not_reach_each_other(step: Step) -> None:
    """The link between two nodes has dropped: each side has waited for the other, and ended by itself. Ranks that start
    again would not meet, and srun would not end: the job is requeued at once, and only once."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.rescue_begins()
    silent_file(step.run.rescues / step.world(0).attempt).touch()
    step.rescue("hung")
    step.ends(0, 1)
    step.ends(1, 1)
    assert (step.status(0), step.status(1)) == (1, 1)
    assert step.asked("requeue 7") == 1


def test_a_rank_that_nobody_saves(step: Step) -> None:
    """It failed before the ranks met, say: its supervisor ends as it did, so srun ends the others."""
    step.began(0), step.began(1)
    step.ends(1, 3)
    assert step.status(1) == 3 and step.asked("job") == 0
    assert step.supervisors[0].poll() is None


def test_a_rank_dies_with_its_supervisor(step: Step) -> None:
    """It would hold the run's lock, and train unseen."""
    rank = step.began(1)
    step.supervisors[1].kill()
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), "the rank outlives its supervisor")
    assert step.status(1) == -signal.SIGKILL


def test_a_supervisor_that_died_is_not_waited_for(step: Step) -> None:
    """Its node may have died: the ranks cannot start again here. srun does not know, and might wait for the node
    forever, so the batch shell is asked to end it."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.supervisors[1].kill()
    step.rescue()
    step.ends(0, 1)
    assert step.status(0) == 1
    assert not (step.folder / "began.0.1").exists() and step.asked("requeue") == 0
    assert step.run.step_over("7").exists()


def test_a_supervisor_that_died_ends_the_step(step: Step) -> None:
    """Its node lives, so srun knows, and ends the other ranks by itself."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.supervisors[1].kill()
    step.rescue()
    step.ends(0, 1)
    step.waits_for_gone(0)
    step.supervisors[0].send_signal(signal.SIGTERM)
    assert step.status(0) == 1
    assert not step.run.step_over("7").exists()


def test_after_a_hang_somebody_requeues(anywhere: Step) -> None:
    """srun may wait forever for a node that it cannot reach, so it is not waited for."""
    step = anywhere
    step.began(0), step.began(1)
    step.attempt_begins()
    step.supervisors[1].kill()
    step.rescue("hung")
    step.ends(0, 1)
    assert step.status(0) == 1 and step.asked("requeue 7") == 1


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on(step: Step, number: signal.Signals) -> None:
    """It is sent to what srun has started."""
    step.began(0), step.began(1)
    step.supervisors[1].send_signal(number)
    assert step.signal(1) == number.name


def test_a_warning_between_two_starts(step: Step) -> None:
    """The next start receives it, and stops in an orderly way: the time limit must not find steps unsaved."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.ends(1, -signal.SIGKILL)
    step.waits_for_gone(1)
    step.supervisors[1].send_signal(signal.SIGUSR2)
    step.rescue()
    step.ends(0, 1)
    assert step.caught(1, 1) == "SIGUSR2"


def test_a_rank_that_takes_long_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may need longer than GONE_S to tear a killed rank down: gigabytes of pinned memory, a GPU's context;
    here a file that it cannot close. Its supervisor lives and says so, so the other one waits, and does not give up the
    allocation of a run that could start again at once."""
    require(missing())
    (tmp_path / "slow").mkdir()
    with Clients(tmp_path / "slow", 1, 0.0) as (slow,), contextlib.ExitStack() as closing:
        monkeypatch.setenv("LASTSTEP_TEST_HELD", str(slow.view / "held"))
        step = Step(tmp_path)
        closing.callback(step.close)
        rank = step.began(1)
        step.began(0)
        step.attempt_begins()
        with slow.hanging():
            os.kill(rank, signal.SIGKILL)
            step.rescue()
            step.ends(0, 1)
            step.waits_for_gone(0)
            over = time.monotonic() + GONE_S + 2
            wait_until(lambda: time.monotonic() > over, "time stands still")
            assert step.supervisors[0].poll() is None and not step.is_gone(1)
        step.began(0, 1)
        step.began(1, 1)
        assert not step.run.step_over("7").exists()


def test_a_signal_to_end_between_two_starts(step: Step) -> None:
    """Slurm ends the step: a supervisor that started its rank again would be killed with it."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.rescue_begins()
    step.ends(1, -signal.SIGKILL)
    step.waits_for_gone(1)
    step.supervisors[1].send_signal(signal.SIGTERM)
    assert step.status(1) == -signal.SIGKILL
    assert step.supervisors[0].poll() is None


def test_a_signal_to_end_after_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks start again: it is too late to say otherwise. The start receives the signal, stops in an orderly way,
    and is the last one."""
    monkeypatch.setenv("LASTSTEP_TEST_TROUBLE", "signalled")
    step = Step(tmp_path, of_rank_0=TROUBLED)
    try:
        step.began(0), step.began(1)
        step.attempt_begins()
        step.ends(1, -signal.SIGKILL)
        step.waits_for_gone(1)
        step.rescue()
        step.ends(0, 1)
        step.began(1, 1)
        assert step.caught(0, 1) == "SIGTERM"
        step.ends(0, 1, 1)
        assert step.status(0) == 1 and not (step.folder / "began.0.2").exists()
    finally:
        step.close()


@pytest.mark.parametrize("trouble", ["forks", "disk"])
def test_trouble_that_passes(tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of processes others end, and a disk that refuses may soon do its work: an allocation that is given
    up for that costs an hour in the queue."""
    monkeypatch.setenv("LASTSTEP_TEST_TROUBLE", trouble)
    step = Step(tmp_path, of_rank_0=TROUBLED)
    try:
        step.began(0), step.began(1)
        step.attempt_begins()
        step.ends(1, -signal.SIGKILL)
        step.waits_for_gone(1)
        step.rescue()
        step.ends(0, 1)
        step.began(0, 1), step.began(1, 1)
        assert step.said(0).count("trying again for") >= 2, "each wait is said, once"
        assert (answer := read_answer(step.run.step_restart)) and answer.starts == 1, "by it the shell counts starts"
    finally:
        step.close()


def test_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor ends with an error, so srun ends the others and the batch shell requeues the job: another node may
    have a process. The log must say what was missing, since no rank does."""
    monkeypatch.setenv("LASTSTEP_TEST_TROUBLE", "no forks")
    step = Step(tmp_path, of_rank_0=TROUBLED)
    try:
        assert step.status(0) == 1
        assert "has no process for rank 0 (Resource temporarily unavailable): ending" in step.said(0)
    finally:
        step.close()


def test_a_job_that_slurm_ends(step: Step) -> None:
    """No restart in an allocation that is being taken away; the batch shell learns why."""
    step.began(0), step.began(1)
    step.attempt_begins()
    (step.folder / "state").write_text("COMPLETING")
    step.ends(1, -signal.SIGKILL)
    step.rescue()
    step.ends(0, 1)
    assert (step.status(0), step.status(1)) == (1, -signal.SIGKILL)
    assert step.asked("requeue") == 0


def test_a_job_without_its_batch_shell(step: Step) -> None:
    """The OOM killer has taken a rank and, a moment later, the batch shell, which would have requeued the job. Slurm
    ends the step, and no rank is left: the run would have ended for good."""
    step.began(0), step.began(1)
    step.attempt_begins()
    step.ends(1, -signal.SIGKILL)
    step.waits_for_gone(1)
    step.rescue()
    (step.folder / "state").write_text("COMPLETING")
    (step.folder / "reason").write_text("JobLaunchFailure")
    (step.folder / "held").touch()  # the signal comes while rank 0's supervisor asks whether the ranks start again
    step.ends(0, 1)
    wait_until(lambda: step.asked("show job"), "no supervisor asked for the job")
    for supervisor in step.supervisors.values():
        supervisor.send_signal(signal.SIGTERM)
    (step.folder / "held").unlink()
    assert (step.status(0), step.status(1)) == (1, -signal.SIGKILL)
    assert step.asked("requeue 7") == 1


def test_a_run_that_may_not_continue(anywhere: Step) -> None:
    """Both supervisors read that in the record, and neither waits for the other."""
    step = anywhere
    step.began(0), step.began(1)
    step.attempt_begins()
    step.rescue_begins()
    step.ends(1, 1)
    assert end_attempt(step.run, step.world(0), step.config.launch, "failed", 5, 5, error="NaN", retry="no")
    assert step.status(1) == 1
    step.ends(0, 1)
    assert step.status(0) == 1 and step.asked("job") == 0
