"""The status of a run, from Slurm's queue and the run's own files, without accounting.

A wrong status is expensive: a run that seems finished is forgotten, and one that seems lost is started twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from laststep.cli import cancel
from laststep.cli.main import main
from laststep.config.errors import ConfigError
from laststep.ranks.process import identity, machine
from laststep.ranks.slurm import SlurmError
from laststep.rundir import RunDir
from laststep.runs.queue import Job, Queue
from laststep.runs.run_folders import find_run
from laststep.runs.run_status import jobs_in_queue, status_of
from tests.support.needs import require_root
from tests.support.project import DEADLINE_S

NOW = time.time()
EMPTY = Queue(NOW, {})
SILENT = Queue(NOW, None)
NOT_UP = "its ranks are not up yet"
OWNER = os.getuid()  # of the folders that a test makes


def queued(state: str, reason: str = "", starts_at: float | None = None) -> Queue:
    """A queue with the run's job and somebody else's."""
    return Queue(NOW, {"7": Job(state, reason, starts_at), "8": Job("RUNNING", "", None)})


def attempt(number: int = 0, reason: str | None = None, job_id: str = "7", **more: Any) -> dict[str, Any]:
    """A record of attempts.jsonl; without a reason, the attempt is under way."""
    record = {"attempt": number, "job_id": job_id, "restart": number, "hosts": ["n1"], "world_size": 1}
    record |= {"start": NOW - 100, "end": NOW if reason else None, "start_step": 0, "end_step": 0, "reason": reason}
    return record | {"lost_steps": 0, "lost_s": 0.0, "step_s": None, "requeue": False, "error": None} | more


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted as job 7 an hour ago."""
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    write(run.submissions, {"job_id": "7", "time": NOW - 3600})
    return run


@pytest.mark.parametrize(
    ("queue", "ended", "under_way", "state", "why"),
    [
        (queued("PENDING", "Priority"), [], None, "queued", "Priority"),
        (queued("RUNNING"), [], None, "starting", NOT_UP),
        (queued("RUNNING"), [], attempt(), "running", ""),
        (queued("RUNNING", "", NOW - 110), [], attempt(), "running", ""),
        # Its ranks were all killed; Slurm has just started the job again.
        (queued("RUNNING", "", NOW), [], attempt(start=NOW - 900), "starting", NOT_UP),
        (queued("RUNNING", "", NOW - 5), [attempt(0, "preempted", end=NOW - 60)], None, "starting", NOT_UP),
        # The batch shell is still at work, or the job is the user's own.
        (queued("RUNNING", "", NOW - 90), [attempt(0, "lost")], None, "stopping", "its ranks have ended (lost)"),
        (
            *(queued("RUNNING", "", NOW - 90), [attempt(0, "hung", requeue=True)], None),
            *("restarting", "its ranks have ended (hung)"),
        ),
        (
            *(queued("RUNNING", "", NOW - 90), [attempt(0, "preempted", requeue=True)], None),
            *("stopping", "its ranks have ended (preempted)"),
        ),
        (queued("RUNNING"), [attempt(0, "preempted")], attempt(1), "running", ""),
        (queued("PENDING", "BeginTime"), [attempt(0, "preempted")], None, "requeued", "BeginTime"),
        (queued("PENDING", "BeginTime"), [], attempt(), "requeued", "BeginTime"),  # its ranks were all killed
        (queued("COMPLETING"), [], attempt(), "stopping", "completing"),
        (queued("COMPLETING"), [attempt(0, "finished")], None, "finished", ""),
        (queued("CONFIGURING"), [], None, "starting", "configuring"),
        (queued("SUSPENDED"), [], attempt(), "running", "suspended"),  # its ranks keep their nodes
        (EMPTY, [attempt(0, "finished")], None, "finished", ""),
        (
            EMPTY,
            [attempt(0, "failed", error="Traceback (most recent call last):\n  ...\nValueError: bad")],
            None,
            "failed",
            "ValueError: bad",
        ),
        (EMPTY, [attempt(0, "hung")], None, "failed", "a rank was stuck"),
        (EMPTY, [attempt(0, "cancelled")], None, "cancelled", ""),
        (EMPTY, [attempt(0, "timeout")], None, "stopped", "time limit"),
        (
            EMPTY,
            [attempt(0, "preempted", requeue=True)],
            None,
            "cancelled",
            "job left the queue before it restarted",
        ),
        (EMPTY, [attempt(0, "lost")], None, "lost", ""),
        (EMPTY, [], attempt(), "lost", "job disappeared without recording why"),
        (EMPTY, [], None, "cancelled", "job left the queue before it started"),
        (SILENT, [], None, "unknown", "squeue does not answer"),
        (SILENT, [], attempt(), "unknown", "squeue does not answer"),
        (SILENT, [attempt(0, "preempted", requeue=True)], None, "unknown", "squeue does not answer"),
        (SILENT, [attempt(0, "finished")], None, "finished", ""),
        (SILENT, [attempt(0, "cancelled")], None, "cancelled", ""),
        # An attempt of an older job says nothing about the job that was submitted to continue the run.
        (EMPTY, [attempt(0, "failed", job_id="3")], None, "cancelled", "job left the queue before it started"),
        (SILENT, [attempt(0, "failed", job_id="3")], None, "unknown", "squeue does not answer"),
        (queued("PENDING", "Priority"), [attempt(0, "failed", job_id="3")], None, "queued", "Priority"),
    ],
)
def test_state(
    run: RunDir, queue: Queue, ended: list[Any], under_way: dict[str, Any] | None, state: str, why: str
) -> None:
    """Every combination of queue and files."""
    write(run.attempts, *ended)
    if under_way:
        write(run.attempt_now, under_way)
    found = status_of(run, queue)
    assert (found.state, found.why) == (state, why)
    assert found.attempts == len(ended) + bool(under_way)


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (Job("RUNNING", "", None, NOW - 3600, OWNER, "run", "laststep:0000000000aa"), "starting"),
        (Job("RUNNING", "", None, NOW, OWNER, "run", "laststep:0000000000aa"), "starting"),  # requeued since
        (Job("RUNNING", "", None, NOW - 3600, OWNER, "run", "laststep:0000000000bb"), "cancelled"),
        (Job("RUNNING", "", None, NOW - 3600, OWNER, "run", None), "starting"),  # the site replaces comments
        (Job("RUNNING", "", None, NOW, OWNER, "other", None), "cancelled"),
        (Job("RUNNING", "", None, NOW - 3600, OWNER + 1, "run", None), "cancelled"),
        (Job("RUNNING", "", None, NOW, OWNER, "run", None), "unknown"),  # in doubt
    ],
)
def test_whose_job_it_is(run: RunDir, monkeypatch: pytest.MonkeyPatch, job: Job, state: str) -> None:
    """After a controller lost its state, another job gets the id that the run has recorded. To take it for the run's
    would be to cancel a stranger's training."""
    submission = {"job_id": "7", "time": NOW - 3600, "job_name": "run", "tag": "laststep:0000000000aa"}
    write(run.submissions, submission)
    queue = Queue(NOW, {"7": job})
    found = status_of(run, queue)
    assert found.state == state
    assert found.why.startswith("job 7 has the id of this run's job but may be another one") == (state == "unknown")
    monkeypatch.setattr(Queue, "ask", lambda _: queue)
    if state == "unknown":
        with pytest.raises(ConfigError, match="may be another one"):
            jobs_in_queue(run)
    else:
        assert jobs_in_queue(run) == (["7"] if state == "starting" else [])


def test_a_requeue_counts_as_a_submission(run: RunDir) -> None:
    """Slurm says that a requeued job was submitted when it was requeued: right after the end of its attempt."""
    write(run.attempts, attempt(0, "preempted", requeue=True, end=NOW - 5))
    assert status_of(run, Queue(NOW, {"7": Job("PENDING", "", None, NOW)})).state == "requeued"


def test_an_owner_whom_this_machine_does_not_know(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue cannot be asked for the jobs of such a user, so it is unknown whether the run has one. Other users' runs
    are shown all the same."""
    asked: list[list[str]] = []

    def answer(words: list[str]) -> str:
        asked.append(words)
        return ""

    def no_account(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("laststep.runs.queue._answer_of", answer)
    monkeypatch.setattr(os, "getuid", lambda: 12)
    monkeypatch.setattr("pwd.getpwuid", no_account)
    found = status_of(run, Queue.ask([run]))
    assert "--user=12" in asked[0]
    assert (found.state, found.why) == ("unknown", f"this machine does not know the owner of the run, uid {OWNER}")


def test_it_failed_before_its_ranks_began(run: RunDir) -> None:
    """A job that has written a log was not cancelled in the queue."""
    log = run.logs / "7_0_log.out"
    log.write_text("bash: /no/such/python: No such file or directory")
    found = status_of(run, EMPTY)
    assert (found.state, found.why) == ("failed", f"job ended before its ranks began; see {log}")


def test_a_fresh_job_was_not_requeued(run: RunDir) -> None:
    """The queue is asked every 10 s, and a job starts within them. Three of three fresh jobs said `requeued`."""

    def waits(submitted_at: float) -> Queue:
        return Queue(NOW - 8, {"7": Job("PENDING", "None", None, submitted_at)})

    write(run.attempt_now, attempt(start=NOW - 2))
    assert status_of(run, waits(NOW - 9)).state == "running"
    write(run.attempt_now)
    write(run.attempts, attempt(0, "failed", start=NOW - 2))
    assert status_of(run, waits(NOW - 9)).state == "stopping"
    assert status_of(run, waits(NOW - 1)).state == "requeued", "to Slurm a requeue is a submission"


def test_local_ranks_that_are_not_up_yet(run: RunDir) -> None:
    """They import torch for seconds before they lock the run. Such a run was shown as cancelled."""
    begun = {"job_id": f"local-20261122-080000-{os.getpid()}", "host": socket.gethostname()}
    write(run.submissions, {**begun, "time": time.time()})
    assert status_of(run, EMPTY).state == "starting"
    write(run.submissions, {**begun, "time": time.time() - 3600})
    assert status_of(run, EMPTY).state == "stopped"


@pytest.mark.parametrize("behind_s", [-900, 900])
def test_a_node_whose_clock_is_wrong(run: RunDir, behind_s: int) -> None:
    """The clock of the run's node is a quarter of an hour behind the controller's, or ahead of it. A run that trained
    was shown as starting, and cancelled without a chance to save. Slurm's own word comes first, then the run's lock."""
    running = Queue(NOW, {"7": Job("RUNNING", "", NOW - 60)})
    mine = attempt(start=NOW - 50 - behind_s)
    write(run.attempt_now, mine | {"job_start": NOW - 60})
    assert status_of(run, running).state == "running"
    write(run.attempt_now, mine)  # Slurm before 23.02
    with run.lock.open("w") as lock:
        lock.write("job 7, restart 0, on n1")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status_of(run, running).state == "running"
    run.attempt_now.unlink()
    ended = attempt(0, "failed", requeue=True, end=NOW - 20 - behind_s) | {"job_start": NOW - 60}
    write(run.attempts, ended)
    assert status_of(run, running).state == "restarting"
    write(run.attempts, ended | {"job_start": NOW - 4000})  # Slurm has started the job again since
    assert status_of(run, running).state == "starting"


def test_a_submission_by_a_clock_that_is_ahead(run: RunDir) -> None:
    """The job has left the queue: it is not queued for as long as the other host's clock is ahead."""
    write(run.submissions, {"job_id": "7", "time": NOW + 3600})
    assert status_of(run, EMPTY).state == "cancelled"


def test_cancel_gives_the_ranks_a_chance(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, and clocks apart: the run looks as if it was starting. Its ranks may train, so they
    are asked to save first. If that does not help, the job is cancelled: it may be starting indeed."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(cancel, "command", lambda *words: asked.append(words))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    write(run.attempt_now, attempt(start=NOW - 900))
    status = status_of(run, Queue(NOW, {"7": Job("RUNNING", "", NOW - 60)}))
    assert status.state == "starting"
    stop = cancel._Stop(run)
    stop.request(status)
    assert asked == [("scancel", "--signal=INT", "7")]
    now += cancel.STOPPING_S
    stop.request(status)
    assert asked[1:] == [("scancel", "7")]


@pytest.mark.parametrize("launcher", ["dead", "elsewhere", "alive"])
def test_cancel_signals_the_launcher_alone(run: RunDir, launcher: str) -> None:
    """The id of the launcher's process may be another program's now, or be that of another container's process, and a
    signal would end a stranger. The lock is held: the ranks of a dead launcher are about to stop."""
    other = subprocess.Popen(["sleep", "600"])
    with run.lock.open("w") as lock:
        lock.write(f"job local-1-2-{other.pid}, restart 0, on {socket.gethostname()}")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = {"dead": f"{machine()} {other.pid} 1", "elsewhere": f"boot/pid {identity(other.pid)}"}.get(
            launcher, f"{machine()} {identity(other.pid)}"
        )
        write(run.submissions, {"job_id": f"local-1-2-{other.pid}", "time": NOW, "process": process})
        try:
            status = status_of(run, EMPTY)
            assert status.state == "running"
            if launcher == "elsewhere":
                with pytest.raises(SlurmError, match="in another container or on another machine; cancel it there"):
                    cancel._Stop(run).request(status)
            else:
                cancel._Stop(run).request(status)
            if launcher == "alive":
                assert other.wait(DEADLINE_S) == -signal.SIGTERM
            assert (other.poll() is None) == (launcher != "alive")
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("words", [["status"], ["cancel", "scan-*"], ["verify", "scan-1"]])
def test_the_folder_of_all_runs_cannot_be_read(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not the same as an empty one: "no such run" would be a lie."""
    (tmp_path / "file").write_text("")
    assert main([*words, f"launch.root={tmp_path / 'file'}"]) == 2
    assert capfd.readouterr().err == f"error: {tmp_path / 'file'}: cannot be read: Not a directory\n"


def test_submitted_after_the_queue_was_asked(run: RunDir) -> None:
    """squeue's answer may be older than the run, which is then queued, not cancelled."""
    write(run.submissions, {"job_id": "9", "time": NOW + 1})
    assert status_of(run, EMPTY).state == "queued"


def test_its_id_is_another_jobs_at_once(run: RunDir) -> None:
    """A job in the queue with this id and another run's tag is not this run's, however new that is: a run called queued
    would have that job cancelled."""
    write(run.submissions, {"job_id": "9", "time": NOW, "tag": "laststep:mine"})
    queue = Queue(NOW, {"9": Job("RUNNING", "", None, NOW, OWNER, "name", "laststep:theirs")})
    assert status_of(run, queue).state == "cancelled"


def test_when_it_is_expected_to_start(run: RunDir) -> None:
    """Slurm's estimate for a waiting job; for a running one the same field is its start."""
    assert status_of(run, queued("PENDING", "Resources", NOW + 60)).starts_at == NOW + 60
    assert status_of(run, queued("RUNNING", "", NOW - 60)).starts_at is None


def test_how_far_it_is(run: RunDir) -> None:
    """100 steps of 0.5 s were kept in 100 s, and 20 of 0.8 s in another 100 s, where 5 more were lost: goodput 0.33."""
    first = attempt(0, "preempted", start=NOW - 300, end=NOW - 200, end_step=100, step_s=0.5)
    second = attempt(1, "lost", start=NOW - 100, end=NOW, start_step=100, end_step=125, lost_steps=5, step_s=0.8)
    write(run.attempts, first, second)
    write(run.plan, {"total_steps": 520, "batch_size": 64})
    steps = [{"step": n, "epoch": 1, "loss": 1 / n, "samples_per_s": 32.0, "time": NOW} for n in range(1, 121)]
    write(run.metrics, *steps, {"epoch": 1, "step": 120, "val_loss": 1.0})
    found = status_of(run, queued("RUNNING"))
    assert (found.step, found.total_steps, found.epoch, found.loss) == (120, 520, 1, 1 / 120)
    assert found.eta_s == 400 * 64 / 32
    assert (found.attempts, found.lost_steps) == (2, 5)
    assert found.goodput == pytest.approx((100 * 0.5 + 20 * 0.8) / 200)


def test_the_time_left_and_the_goodput_do_not_jump(run: RunDir) -> None:
    """One slow step, such as the first or one with a save, changes neither. The steps of an earlier attempt that are
    about to be done again count neither."""
    now = time.time()
    write(run.attempts, attempt(0, "lost", start=now - 400, end=now - 300, end_step=100, lost_steps=0, step_s=1.0))
    write(run.attempt_now, attempt(1, start=now - 100, start_step=100))
    write(run.plan, {"total_steps": 520, "batch_size": 64})
    running = Queue(now, {"7": Job("RUNNING", "", now - 110)})

    def step(number: int, rate: float) -> dict[str, Any]:
        when = now - 350 if number <= 120 else now - 100 + number - 120
        return {"step": number, "epoch": 1, "loss": 0.1, "samples_per_s": rate, "time": when}

    old, new = [step(n, 64.0) for n in range(100, 121)], [step(n, 32.0) for n in range(121, 141)]
    write(run.metrics, *old)
    assert status_of(run, running).goodput == pytest.approx(100 / 200, abs=0.01)
    write(run.metrics, *old, *new)
    before = status_of(run, running)
    write(run.metrics, *old, *new, step(141, 1.0))
    after = status_of(run, running)
    assert before.eta_s == (520 - 140) * 64 / 32 and after.eta_s == (520 - 141) * 64 / 32
    assert before.goodput is not None and after.goodput == pytest.approx(before.goodput, abs=0.02)


def test_a_run_that_a_crash_has_damaged(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """Half a last line in either file: the intact lines are shown, and the damage is reported."""
    write(run.attempts, attempt(0, "finished", end_step=20))
    write(run.metrics, {"step": 20, "epoch": 1, "loss": 0.5, "samples_per_s": 9.0, "time": NOW})
    for path in (run.attempts, run.metrics):
        with path.open("a") as file:
            file.write('{"attempt": 1, "sta')
    run.config.write_text("")
    assert main(["status", str(run.path)]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^run +finished +20 ", said, re.MULTILINE)
    assert "attempts.jsonl: damaged, 1 line skipped" in said
    assert "metrics.jsonl: damaged, 1 line skipped" in said


def test_a_run_of_an_older_version(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """An older run lacks files and fields that did not exist then. Its status can be shown; the message names what is
    not possible, and where the reason is documented."""
    known = {key: value for key, value in attempt(0, "preempted").items() if key not in ("lost_s", "step_s", "requeue")}
    write(run.attempts, known)
    run.submissions.unlink()
    run.config.write_text("dropped_key: 3\n")
    assert main(["status", str(run.path), "--json"]) == 0
    (said,) = json.loads(capfd.readouterr().out)
    assert (said["attempts"], said["lost_steps"], said["total_steps"]) == (1, 0, None)
    assert main(["status", str(run.path)]) == 0
    capfd.readouterr()
    assert main(["resume", str(run.path), "--local"]) == 2
    assert capfd.readouterr().err.startswith(f"error: {run.config}: dropped_key: no such key; choose from")


def test_a_run_of_somebody_else(run: RunDir) -> None:
    """No permission is not the same as no such run."""
    require_root("only root can become another user")
    run.config.write_text("")
    run.path.chmod(0o700)
    for folder in run.path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    pid = os.fork()
    if not pid:
        os.setuid(65534)
        try:
            find_run(run.name, str(run.path.parent))
        except ConfigError as error:
            os._exit(int("you may not read" not in str(error)))
        os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_squeue_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per job; names, comments and reasons may contain any printable character."""
    submitted = "2026-11-21T12:00:00"
    said = "".join(
        "\x1f".join(words) + "\n"
        for words in (
            ("7", "PENDING", submitted, submitted, "12", "a name", "my|own laststep:0123456789ab", "Nodes:n[1-2]|x"),
            ("8_3", "RUNNING", "N/A", submitted, "12", "scan", "(null)", "None"),
        )
    )

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("laststep.runs.queue._answer_of", lambda _: said)
    jobs = Queue.ask([]).jobs
    at = time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S"))
    assert jobs == {
        "7": Job("PENDING", "Nodes:n[1-2]|x", at, at, 12, "a name", "laststep:0123456789ab"),
        "8_3": Job("RUNNING", "", None, at, 12, "scan", None),
    }


def test_squeue_fails(slurm: Path) -> None:
    """A restarting controller does not mean that all jobs are gone."""
    (slurm / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error >&2\nexit 1\n")
    assert Queue.ask([]).jobs is None
