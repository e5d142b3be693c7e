"""sbatch takes a job, and its answer is lost: the run must not get a second job, and the first one must be found.

The cluster is a fake: sbatch accepts a job, which squeue shows with its comment, and then misbehaves.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from laststep.cli.main import main
from laststep.records import append_only
from laststep.records.metrics import read_lines
from laststep.records.submissions import UNCLEAR_S, open_intents, read_submissions
from laststep.rundir import RunDir
from laststep.runs import unanswered
from laststep.runs.queue import Queue
from laststep.runs.run_status import status_of
from laststep.submission import sbatch
from laststep.trainer import Trainer
from tests.support.commands import begin
from tests.support.project import PROJECT

ACCEPTS = """#!/bin/sh
here=$(dirname "$0")
echo x >>"$here/count"
id=$((4710 + $(wc -l <"$here/count")))
tag=$(grep -o 'laststep:[0-9a-f]*' "$1" | head -1)
printf '%s\\037RUNNING\\037N/A\\037N/A\\037%s\\037name\\037%s\\037None\\n' "$id" "$(id -u)" "$tag" >>"$here/jobs"
"""
ANSWERS = 'echo "Submitted batch job $id"\n'
TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1\n"
REFUSED = "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1\n"
SQUEUE = """#!/bin/sh
[ -e "$(dirname "$0")/silent" ] && { echo 'slurm_load_jobs error' >&2; exit 1; }
case "$*" in
    *--states=all*) awk -F '\\037' '{ print $1 "\\037" $7 }' "$(dirname "$0")/jobs" 2>/dev/null ;;
    *) cat "$(dirname "$0")/jobs" 2>/dev/null ;;
esac
exit 0
"""


@pytest.fixture
def fake(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sbatch, which accepts each job with an id of its own, and of a squeue that shows them."""
    monkeypatch.setattr(sbatch, "LOOK_S", 0.0)
    (slurm / "sbatch").write_text(ACCEPTS + ANSWERS)
    (slurm / "squeue").write_text(SQUEUE)
    (slurm / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (slurm / "scontrol").chmod(0o755)
    return slurm


def jobs(fake: Path) -> int:
    """How many jobs sbatch was given."""
    return len((fake / "count").read_text().split()) if (fake / "count").exists() else 0


def is_known_to(run: RunDir, job_id: str) -> bool:
    """Whether the run's last submission is this job, with the files that its ranks read."""
    newest = read_submissions(run.submissions)[-1]["job_id"]
    return newest == job_id and JobPaths(run.logs, job_id).submitted_pickle.exists()


def is_only(run: RunDir, job_id: str) -> bool:
    """Whether this is the only job of the run."""
    known = [line["job_id"] for line in read_submissions(run.submissions)]
    return known == [job_id] and not open_intents(run.submissions)


@pytest.mark.parametrize(
    "then",
    [TIMED_OUT, REFUSED, "echo 'Submitted ba'\n", "exit 1\n"],
    ids=["timed out", "refused", "half an answer", "nothing said"],
)
def test_the_answer_is_lost(fake: Path, here: Path, then: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The job is in the queue, where the command finds it. To the user nothing has happened."""
    (fake / "sbatch").write_text(ACCEPTS + then)
    run = RunDir(here / "runs" / "mine")
    assert main(["--name", "mine"]) == 0
    assert "job    4711" in capfd.readouterr().out
    assert is_known_to(run, "4711") and not open_intents(run.submissions)
    assert JobPaths(run.logs, "4711").submission_file.exists(), "the script that ran is kept, as ever"
    assert main(["resume", "mine"]) == 2, "a second job would compete with the first one"
    assert jobs(fake) == 1


def test_the_answers_of_an_array_are_lost(fake: Path, here: Path) -> None:
    """Each run of a sweep gets the job of its own index: with another's it would train another configuration."""
    (fake / "sbatch").write_text(ACCEPTS + TIMED_OUT)
    assert main(["sweep", "--name", "scan", "seed=0..2"]) == 0
    for seed in range(3):
        run = RunDir(here / "runs" / f"scan-seed_{seed}")
        assert is_known_to(run, f"4711_{seed}")
        trainer = DelayedSubmission.load(JobPaths(run.logs, f"4711_{seed}").submitted_pickle).function
        assert isinstance(trainer, Trainer) and trainer.config.seed == seed


def test_sbatch_hangs(fake: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that waits without end is ended by its user, who types it again."""
    monkeypatch.setattr(sbatch, "SBATCH_S", 0.3)
    (fake / "sbatch").write_text(ACCEPTS + "sleep 600\n")
    assert main(["--name", "mine"]) == 0
    assert is_known_to(RunDir(here / "runs" / "mine"), "4711")


def test_the_job_was_faster(fake: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the command waited, the job has begun and recorded itself; the controller is silent since."""
    monkeypatch.setattr(sbatch, "SBATCH_S", 0.5)
    record = 'echo \'{"job_id": "4711", "time": 1.0, "tag": "\'$tag\'"}\' >>runs/mine/submissions.jsonl\n'
    (fake / "sbatch").write_text(ACCEPTS + record + "touch $here/silent\nsleep 600\n")
    assert main(["--name", "mine"]) == 0
    assert is_only(RunDir(here / "runs" / "mine"), "4711")


def test_nobody_knows(
    fake: Path, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has become silent after it was asked. Nothing is submitted until it is certain what has become of
    the job: the line says when. A second job would train the same run at the same time."""
    (fake / "sbatch").write_text(ACCEPTS + TIMED_OUT)
    (fake / "silent").touch()
    run = RunDir(here / "runs" / "mine")
    assert main(["--name", "mine"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: mine: sbatch has not answered (Batch job submission failed: Socket timed out")
    assert "; a job of this run may be in the queue; from " in said
    assert "python launch.py resume mine" in said and said.count("\n") == 1
    assert run.config.exists(), "the job may start, and needs the folder"
    (intent,) = open_intents(run.submissions)
    (fake / "silent").unlink()
    (fake / "jobs").rename(fake / "not yet")  # a controller that was too busy to answer may be too busy to show it
    (fake / "jobs").touch()
    found = status_of(run, Queue.ask([run]))
    assert (found.state, found.why) == ("unknown", "sbatch has not answered; a job may be in the queue")
    assert main(["resume", "mine"]) == 2 and jobs(fake) == 1
    assert main(["cancel", "mine"]) == 1
    said = capfd.readouterr().err
    assert "not cancelled: sbatch has not answered" in said

    (fake / "not yet").rename(fake / "jobs")
    assert status_of(run, Queue.ask([run])).job_id == "4711"
    assert main(["resume", "mine"]) == 2
    assert "job 4711 of this run is in the queue; end it first" in capfd.readouterr().err
    assert read_submissions(run.submissions) == [{"job_id": "4711", **intent}], "found again, and recorded"
    assert jobs(fake) == 1


def test_it_never_came(fake: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two minutes later Slurm still does not show the job: then the run is submitted."""
    (fake / "sbatch").write_text("#!/bin/sh\n" + TIMED_OUT)
    run = RunDir(here / "runs" / "mine")
    assert main(["--name", "mine"]) == 2
    (fake / "sbatch").write_text(ACCEPTS + ANSWERS)
    assert main(["resume", "mine"]) == 2 and jobs(fake) == 0
    lines = read_lines(run.submissions)
    run.submissions.write_text("".join(json.dumps({**line, "time": line["time"] - UNCLEAR_S}) + "\n" for line in lines))
    assert status_of(run, Queue.ask([run])).state == "stopped"
    assert main(["resume", "mine"]) == 0 and jobs(fake) == 1
    assert [line["job_id"] for line in read_submissions(run.submissions)] == ["4711"]


def test_refused(fake: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What Slurm has refused is no job: the next command need not wait."""
    assert main(["--name", "mine"]) == 0
    (fake / "jobs").write_text("")
    (fake / "sbatch").write_text("#!/bin/sh\n" + REFUSED)
    run = RunDir(here / "runs" / "mine")
    lines = read_lines(run.submissions)
    run.submissions.write_text("".join(json.dumps({**line, "time": 1.0}) + "\n" for line in lines))
    assert main(["resume", "mine"]) == 2
    assert "Slurm refused the job: Batch job submission failed: Invalid partition" in capfd.readouterr().err
    assert not open_intents(run.submissions)
    (fake / "sbatch").write_text(ACCEPTS + ANSWERS)
    assert main(["resume", "mine"]) == 0 and jobs(fake) == 2


def test_two_resumes_at_once(fake: Path, here: Path) -> None:
    """Both see that no job is in the queue. One submits; the other says so, and that is no failure of the run."""
    assert main(["--name", "mine"]) == 0
    (fake / "jobs").write_text("")
    run = RunDir(here / "runs" / "mine")
    lines = read_lines(run.submissions)
    run.submissions.write_text("".join(json.dumps({**line, "time": 1.0}) + "\n" for line in lines))
    (fake / "sbatch").write_text(ACCEPTS + "sleep 1\n" + ANSWERS)
    command = [sys.executable, str(PROJECT / "launch.py"), "resume", "mine"]
    both = [begin(here, command) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert jobs(fake) == 2, "one more"
    (refusal,) = (errors for process, (_, errors) in zip(both, said) if process.returncode)
    assert refusal.count("\n") == 1
    assert "another command" in refusal or "of this run is in the queue" in refusal  # a busy machine delays one of them
    assert [line["job_id"] for line in read_submissions(run.submissions)] == ["4711", "4712"]


def test_a_command_that_was_overtaken(fake: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another command has submitted the run after this one had looked at the queue."""
    assert main(["--name", "mine"]) == 0
    run = RunDir(here / "runs" / "mine")
    with pytest.raises(Exception, match="another command has just submitted job 4711 of this run"):
        unanswered.announce(run, "laststep:000000000000", known=0)
    assert not open_intents(run.submissions)


def test_a_job_whose_command_is_dead(fake: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed while it waited for sbatch. The job trains all the same: it writes the file that says what
    to run, and its own id."""
    (fake / "sbatch").write_text(ACCEPTS + "kill -9 $PPID\n")
    command = [sys.executable, str(PROJECT / "launch.py"), "--name", "mine", "train.epochs=7"]
    process = begin(here, command)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    run = RunDir(here / "runs" / "mine")
    (intent,) = open_intents(run.submissions)
    monkeypatch.setattr(unanswered, "COMMAND_S", 0.0)
    monkeypatch.setenv("LASTSTEP_JOB_TAG", intent["tag"])
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("1", "0"):
        monkeypatch.setenv("SLURM_PROCID", rank)
        monkeypatch.setenv("SLURM_LOCALID", rank)
        paths = JobPaths(run.logs, "4711")
        unanswered.complete_in_job(paths)
        trainer = DelayedSubmission.load(paths.submitted_pickle).function
        assert isinstance(trainer, Trainer) and trainer.config.train.epochs == 7
        paths.submitted_pickle.unlink()
    assert is_only(run, "4711")
    unanswered.found(run, intent, "4711")
    assert is_only(run, "4711"), "the command and the job may both record it"


def test_a_torn_line_of_an_older_version(fake: Path, here: Path) -> None:
    """Its disk was full within a line. The next line was appended to that half, and lost: the run got a second job."""
    assert main(["--name", "mine"]) == 0
    run = RunDir(here / "runs" / "mine")
    with run.submissions.open("a") as file:
        file.write('{"job_id": "99", "ti')
    append_only.append_line(run.submissions, '{"job_id": "100", "time": 1.0}')
    assert [line["job_id"] for line in read_submissions(run.submissions)] == ["4711", "100"]
