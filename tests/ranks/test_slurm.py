"""How Slurm's commands are asked: no answer may depend on what the user's shell has set for other purposes."""

from __future__ import annotations

import ast
import json
import signal
from pathlib import Path

import pytest

from laststep.attempt.restart import Ending, ending
from laststep.cli.main import main
from laststep.job.nodes import _answers
from laststep.ranks.slurm import command, show_job, show_partitions
from tests.support.commands import fake_squeue
from tests.support.project import PROJECT
from tests.support.records import a_world

PROGRAMS = {"squeue", "scontrol", "scancel", "sacct", "sinfo", "srun"}
STARTS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output", "getoutput")}
# The job is in a partition that Slurm shows only with --all, and what a user has set hides it as well.
HIDING_SQUEUE = """\
#!/bin/sh
case " $* " in *" --all "*) ;; *) exit 0 ;; esac
[ -z "$SQUEUE_STATES$SQUEUE_PARTITION$SQUEUE_USERS$SLURM_CLUSTERS" ] || exit 0
[ -z "$SLURM_TIME_FORMAT" ] || exit 0
{shows}"""


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PATH", None),  # nothing is set: the partition is hidden
        ("SQUEUE_STATES", "PENDING"),
        ("SQUEUE_PARTITION", "debug"),
        ("SQUEUE_USERS", "somebody"),
        ("SLURM_CLUSTERS", "other"),
        ("SLURM_TIME_FORMAT", "relative"),
    ],
)
def test_no_job_is_hidden(
    variable: str, value: str | None, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that squeue does not show counts as gone: `status` would say that the run was cancelled, and `resume`
    would submit a second job beside the first."""
    assert main(["--name", "mine"]) == 0
    monkeypatch.setattr("laststep.runs.run_status.JUST_SUBMITTED_S", -1.0)
    program(slurm, "squeue", HIDING_SQUEUE.format(shows=fake_squeue("4711").partition("\n")[2]))
    if value is not None:
        monkeypatch.setenv(variable, value)
    capfd.readouterr()
    assert main(["status", "mine", "--json"]) == 0
    (status,) = json.loads(capfd.readouterr().out)
    assert status["state"] == "starting"
    assert main(["resume", "mine"]) == 2
    assert "job 4711 of this run is in the queue" in capfd.readouterr().err


def test_times_are_read_in_any_format(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted job differs from a cancelled one by its PreemptTime alone. Where the user's SLURM_TIME_FORMAT makes
    it unreadable, a preempted run would end as cancelled."""
    at = "${SLURM_TIME_FORMAT:-2026-11-22T05:17:24}"  # as =relative gives 05:17:24
    job = f"JobId=7 JobState=COMPLETING Restarts=0 EndTime={at} PreemptTime={at}"
    program(slurm, "scontrol", f'#!/bin/sh\necho "{job}"\n')
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    world = a_world(launcher="submitit-slurm")
    assert ending(signal.SIGTERM, world, 120) == Ending("preempted", requeue=True)


def test_half_an_answer(slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """scontrol or squeue dies in the middle of its answer, without an error. A job without a state counted as ended, so
    a preempted run ended as cancelled; one whose line was cut counted as gone, and `resume` submitted a second one."""
    program(slurm, "scontrol", "#!/bin/sh\nprintf 'JobId=7 JobName=mine UserId=me'\n")
    assert show_job("7") is None
    assert ending(signal.SIGTERM, a_world(launcher="submitit-slurm"), 120).reason == "preempted"
    assert main(["--name", "mine"]) == 0
    program(slurm, "squeue", "#!/bin/sh\nprintf '4711'\n")
    assert main(["resume", "mine"]) == 2
    assert "squeue does not answer, so a job of this run may still be alive" in capfd.readouterr().err


def test_hidden_partitions(slurm: Path) -> None:
    """Without the partition's size, a job that can never start would be submitted."""
    program(slurm, "scontrol", '#!/bin/sh\ncase "$*" in *--all*) echo PartitionName=secret TotalNodes=2 ;; esac\n')
    assert [one["PartitionName"] for one in show_partitions("secret")] == ["secret"]


def test_what_a_command_inherits(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCANCEL_STATE=PENDING would make scancel spare a running job in silence. But which Slurm answers, and who asks,
    is the user's to say."""
    wanted = {"SLURM_CONF": str(slurm / "conf"), "SLURM_JWT": "token", "SLURM_CONF_SERVER": "ctl", "TZ": "UTC"}
    others = ("SCANCEL_STATE", "SCANCEL_NAME", "SCONTROL_FEDERATION", "SACCT_LOCAL", "SINFO_ALL", "SLURM_JOB_ID")
    (slurm / "conf").touch()
    for name, value in (*wanted.items(), *((name, "theirs") for name in others)):
        monkeypatch.setenv(name, value)
    program(slurm, "scancel", "#!/bin/sh\nenv\n")
    inherited = dict(line.split("=", 1) for line in command("scancel", "7").splitlines())
    assert wanted.items() <= inherited.items() and not inherited.keys() & set(others)
    program(slurm, "srun", '#!/bin/sh\n[ "$SLURM_JOB_ID" = theirs ]\n')
    assert _answers("n1"), "srun finds its job by these variables"


def test_one_place_starts_the_commands() -> None:
    """A command that is started elsewhere would obey the user's variables again."""
    for path in (PROJECT / "laststep").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        starts = any(isinstance(n, ast.Attribute) and ast.unparse(n) in STARTS for n in nodes)
        words = {n.value for n in nodes if isinstance(n, ast.Constant)} & PROGRAMS
        if path.name != "slurm.py":
            assert not (starts and words), f"{path}: start {words} by laststep.ranks.slurm"
