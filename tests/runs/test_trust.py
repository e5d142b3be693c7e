"""A run folder that another user can write is not executed: neither by resume, nor by a job, nor after its ranks."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from laststep.cli.main import main
from laststep.code import code_copy
from laststep.config.errors import ConfigError
from laststep.config.schema import Launch
from laststep.job import after_ranks
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.submission import sbatch
from laststep.trainer import Trainer
from tests.support.needs import require
from tests.support.records import a_world
from tests.support.runs import config

SOMEBODY = 12345


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted as job 7."""
    small = config(tmp_path, "run", 1, ())
    run = run_folders.create(small)
    run_folders.record_submission(run, "7")
    (run.code / "package").mkdir(parents=True)
    (run.code / "package" / "module.py").write_text("print('imported')")
    DelayedSubmission(Trainer(small)).dump(JobPaths(run.logs, "7").submitted_pickle)
    return run


def executed(run: RunDir) -> list[Path]:
    """Files and folders of the run of which each decides what a job executes."""
    pickle = JobPaths(run.logs, "7").submitted_pickle
    return [run.path, run.logs, pickle, run.code, run.code / "package", run.code / "package" / "module.py"]


def batch_script(run: RunDir, end: str = "echo the ranks start") -> subprocess.CompletedProcess[str]:
    """What the job's batch shell does, with `end` for srun."""
    lines = [*sbatch.after_ranks(run, Launch()), end]
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)


def test_a_run_that_only_its_owner_writes(run: RunDir) -> None:
    run_folders.check_run_trusted(run)
    JobPaths(run.logs, "7").submitted_pickle.unlink()  # submitit writes it when sbatch has returned
    job = batch_script(run)
    assert (job.stdout, job.stderr) == ("the ranks start\n", "")


@pytest.mark.parametrize("number", range(6))
def test_a_job_refuses_what_others_may_write(run: RunDir, number: int) -> None:
    """A member of the group who replaces any of these files would run commands as this user, on its nodes and with its
    keys. The job says so in one line, with the command that mends it, and starts nothing from the folder."""
    path = executed(run)[number]
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    job = batch_script(run)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == (
        f"[laststep] refused: others may write, or own, {path}; if you trust what is in it: chmod -R go-w {run.path}, "
        "and resume\n"
    )
    subprocess.run(["chmod", "-R", "go-w", str(run.path)], check=True)
    assert batch_script(run).stdout == "the ranks start\n"


def test_the_job_looks_again_after_its_ranks(run: RunDir) -> None:
    """Its shell imports the copy of the code to decide on a requeue; meanwhile hours have passed."""
    late = batch_script(run, f"chmod o+w {run.code}/package; exit 9")
    assert late.returncode == 9 and f"refused: others may write, or own, {run.code}/package" in late.stderr
    assert "Traceback" not in late.stderr and "after_ranks" not in late.stderr


def test_the_owner_is_somebody_else(run: RunDir) -> None:
    """Who owns a file can make it writable at any time."""
    require(None if os.geteuid() == 0 else "giving a file away needs root: sudo, or a container")
    for path in executed(run):
        os.chown(path, SOMEBODY, -1)
        job = batch_script(run)
        assert job.returncode == 2 and f"others may write, or own, {path};" in job.stderr
        if path != JobPaths(run.logs, "7").submitted_pickle:  # resume writes another
            with pytest.raises(
                ConfigError, match=rf"{path}: belongs to user {SOMEBODY}, who could run commands as you"
            ):
                run_folders.check_run_trusted(run)
        os.chown(path, 0, -1)


def test_resume_refuses(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """config.yaml has shell lines (launch.setup), and is read before anything else."""
    run.config.chmod(0o666)
    assert main(["resume", str(run.path), "--local"]) == 2
    said = capsys.readouterr().err
    assert f"error: {run.config}: others may write it, and so run commands as you (-rw-rw-rw-)" in said
    assert f"`chmod -R go-w {run.path}`" in said and said.count("\n") == 1


def test_after_the_ranks_nothing_is_unpickled(run: RunDir) -> None:
    """A user's own batch script ends with after_ranks, without the lines of Laststep's."""
    world = a_world(launcher="submitit-slurm")
    assert after_ranks.trainer_of_job(run, world).run.path == run.path
    JobPaths(run.logs, "7").submitted_pickle.chmod(0o666)
    with pytest.raises(ConfigError, match=r"7_submitted\.pkl: others may write it"):
        after_ranks.trainer_of_job(run, world)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_a_new_run_is_writable_by_its_owner_alone(tmp_path: Path, umask: int) -> None:
    """Many groups set umask 002, to share folders: whatever it is, a run's own files pass the check, and are not more
    open than the umask says. What the user's command writes afterwards follows the umask again."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.py").touch()
    (source / "mine.py").chmod(0o664)
    small = config(tmp_path / "runs", "run", 1, ())
    before = os.umask(umask)
    try:
        with run_folders.created(small) as run:
            code_copy._copy(source, [Path("mine.py")], run.code)
            run_folders.record_submission(run, "7")
            DelayedSubmission(Trainer(small)).dump(JobPaths(run.logs, "7").submitted_pickle)
        with run_folders.reconfigured(run, small):
            pass
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    run_folders.check_run_trusted(run)
    assert batch_script(run).stdout == "the ranks start\n"
    assert run.path.stat().st_mode & 0o777 & umask == 0
