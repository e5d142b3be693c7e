"""Submitting to a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.user import User
from tests.support.project import DEADLINE_S, PROJECT

TINY = ("train.max_steps=2", "data.name=fake", "data.args.samples=64", "data.args.image_size=8")


def test_sbatch_accepts_the_dry_run(user: User, tmp_path: Path) -> None:
    """--dry-run prints what Slurm would get, with options of every kind."""
    options = ("--nodes", "2", "--gpus-per-node", "2", "--time", "30", "--partition", "grace", "--name", "dry")
    more = ("launch.mem_gb=1.5", "launch.slurm.comment=a b", "launch.setup=[module list || true]")
    said = user.types(*options, *more, "--dry-run")
    assert not user.run("dry").path.exists(), "a dry run leaves nothing behind"
    script = tmp_path / "script.sh"
    script.write_text(said[said.index("#!/bin/bash") :])
    asked = subprocess.run(["sbatch", "--test-only", script], env=user.env, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr


def test_submit_from_python_gives_the_result(user: User, tmp_path: Path) -> None:
    """The two lines in docs/python.md give a submitit Job. Its result is the final metrics, also for several ranks."""
    program = tmp_path / "mine.py"
    words = [*TINY, "launch.name=from-python", "launch.tasks_per_node=2", f"launch.root={user.root}"]
    program.write_text(
        "from laststep import Config, submit\n"
        f"job = submit(Config.load('mnist', {words!r}))\n"
        "print(job.result()['val_accuracy'])\n"
    )
    env = {**user.env, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1, "after submitit's warnings where Slurm has no accounting"


def test_setup_runs_on_every_node(user: User, tmp_path: Path) -> None:
    """Once per node, so that it can prepare the node's own disk. Variables that it sets reach every rank."""
    notes = tmp_path / "notes"
    setup = f"launch.setup=['echo $SLURMD_NODENAME >> {notes}', 'export LASTSTEP_TEST_NOTES={notes}']"
    size = ("--nodes", "3", "--tasks-per-node", "1", "train.batch_size=12")
    user.types("--name", "prepared", *size, *TINY, "task=tests.support.tasks.Prepared", setup, "--follow")
    first, *others = notes.read_text().split("\n")[:3]
    assert len({first, *others}) == 3, "three nodes, each once"
    assert notes.read_text().count("begins") == 3, "the variable came to every rank"


def test_slurm_refuses(user: User) -> None:
    """The user sees sbatch's own error on one line, and no folder is left behind."""
    said = user.types("--name", "refused", "--partition", "nowhere", *TINY, status=2)
    assert said.count("\n") == 1 and said.startswith("error: Slurm refused the job: ") and "partition" in said
    assert not user.run("refused").path.exists()


@pytest.mark.parametrize("option", ["launch.gpus_per_node=2", "launch.slurm.gres=gpu:2"])
def test_gpus_that_torch_cannot_use(user: User, option: str) -> None:
    """A node whose GPUs do not work must not silently train on its CPUs: the run fails, says why, and is not requeued,
    since the next attempt would fail the same way. However the job asks for GPUs, each of them has a rank."""
    name = "gres" if "gres" in option else "nogpu"
    user.types("--name", name, option, *TINY)
    (attempt,) = user.waits_for_end(name, "failed")
    assert "torch finds no GPU on this machine" in attempt["error"]
    assert attempt["world_size"] == 2, "one task per GPU"
    assert not attempt["requeue"]
    user.waits_until_gone(user.job_of(name))
    assert len(user.attempts(name)) == 1
