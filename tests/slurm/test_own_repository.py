"""From a user's own repository: a src/ layout, its own configuration, data that git ignores, and modules that have
the names of those in a clone of Laststep: `trainer`, `launch`, `tools`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from laststep.checkpoint.export import weights_sha256
from laststep.config.config import Config
from laststep.records.submissions import read_submissions
from tests.cli.test_command_runs import OTHER, assert_nothing_lives
from tests.cli.test_script import TRAIN
from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.user import User
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

TASK = """
from tests.support.tasks import Unhurried
from trainer.shapes import day

class Mine(Unhurried):
    def datasets(self):
        from tools.pictures import from_my_tools
        print("the code of", day, open("data/numbers.txt").read(), self.config.data.root, flush=True)
        return super().datasets()
"""
# Names that a clone of Laststep has too.
THEIRS = "raise SystemExit('this one is not imported')\n"
DAY = "day = '{day}'\n"
LINES = ("--config", "configs/lines.yaml")
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")


@pytest.fixture
def mine(user: User, tmp_path: Path) -> Iterator[User]:
    """A user in their own repository, which is installed in editable mode: its src/ stands on Python's path."""
    folder = tmp_path / "mine"
    lines = [word for word in UNHURRIED if not word.startswith("task=")]
    for name, text in {
        ".gitignore": "/data/\n/runs/\n__pycache__/\n",
        "src/lines/__init__.py": "",
        "src/lines/task.py": TASK,
        "trainer/shapes.py": DAY.format(day="monday"),
        "launch.py": THEIRS,
        "tools/__init__.py": "",
        "tools/pictures.py": "from_my_tools = True\n",
        "configs/lines.yaml": Config.load(None, [*lines, "task=lines.task.Mine"]).to_yaml(),
        "data/numbers.txt": "1 2 3",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    mine = User(user.cluster, folder / "runs", folder=folder)
    mine.env["PYTHONPATH"] = str(folder / "src")
    yield mine


def test_a_script(mine: User) -> None:
    """`launch.py --nodes 2 train.py`: preempted; the copy of the script runs, not what was edited since; the weights
    are those of an undisturbed run."""
    shutil.copy(TRAIN, mine.folder / "src" / "train.py")
    words = ("src/train.py", "--steps", "60", "--lr", "0.02")
    mine.types("--name", "script", "--nodes", "2", "launch.slurm.hold=true", *words, "--pause", "0.05")
    with (mine.folder / "src" / "train.py").open("a") as file:
        file.write("\nraise SystemExit('edited since')\n")
    mine.cluster.run("scontrol", "release", mine.job_of("script"))
    mine.waits_for("script", "step 20/60")
    mine.cluster.run("scontrol", "requeue", mine.job_of("script"))
    records = mine.waits_for_end("script", "finished")
    assert [(record["reason"], record["lost_steps"]) for record in records] == [("preempted", 0), ("finished", 0)]
    assert "edited since" not in mine.types("logs", "script")
    shutil.copy(TRAIN, mine.folder / "src" / "train.py")
    mine.types("--local", "--tasks-per-node", "2", "--name", "undisturbed", "device=cpu", *words)
    assert fingerprint(mine.run("script")) == fingerprint(mine.run("undisturbed"))


@pytest.mark.parametrize("before", [("src/other.py",), ("--", sys.executable, "src/other.py")])
def test_a_command(before: tuple[str, ...], mine: User) -> None:
    """A script that does not know Laststep, by its name and as a command: one rank killed, then preempted; the copy of
    the code runs, not what was edited since; the ranks find what they have saved, and nothing outlives them."""
    shutil.copy(OTHER, mine.folder / "src" / "other.py")
    words = (*before, "--steps", "200", "--kill-at", "13")
    own_python = f"launch.python={sys.executable}"  # the stand-in's processes are not those that it is asked to start
    mine.types("--name", "command", "--nodes", "2", "launch.slurm.hold=true", own_python, *words)
    with (mine.folder / "src" / "other.py").open("a") as file:
        file.write("\nprint('edited since')\n")
    mine.cluster.run("scontrol", "release", mine.job_of("command"))
    mine.waits_for("command", "from step 10, resumes 1")
    mine.cluster.run("scontrol", "requeue", mine.job_of("command"))
    records = mine.waits_for_end("command", "finished")
    assert [(record["reason"], record["requeue"]) for record in records] == [
        ("failed", True),
        ("preempted", True),
        ("finished", False),
    ]
    assert records[1]["step_restarts"] == 1, "restarted within the step"
    logs = mine.types("logs", "command")
    assert "edited since" not in logs and "rank 1 stops by SIGTERM at step" in logs
    assert logs.count(f"done, lr 0.1, {mine.run('command').code}/src/other.py") == 2
    assert "rank 1 at 0:1:2 from step 0, resumes 0" in logs
    assert_nothing_lives(mine.run("command"))
    assert "resumes by itself: steps lost are its own" in mine.types("status", "command")


def test_a_command_whose_rank_is_killed(mine: User) -> None:
    """Laststep's own processes beside the command of rank 0 are killed: all start again. Then the run is cancelled, and
    resumed with its words."""
    shutil.copy(OTHER, mine.folder / "src" / "other.py")
    mine.types(
        "--name", "killed", "--nodes", "2", "--", "bash", "-c", f"{sys.executable} src/other.py --steps 400; true"
    )
    mine.waits_for("killed", "from step 0, resumes 0", times=2)
    mine.kills("killed", 0)
    mine.waits_for("killed", "resumes 1", times=2)
    said = mine.types("cancel", "killed")
    assert "killed: stopped, and resumes by itself\nnext   " in said
    first, second = mine.waits_for_end("killed", "cancelled")
    assert first["requeue"] and first["reason"] in ("lost", "failed") and second["restart"] == 0
    # Its supervisor was killed with it. What then lives in a session of its own is for Slurm's cgroups, missing here.
    orphan = mine.run("killed").files / "helper_0_0"
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(orphan.read_text()), signal.SIGKILL)
    orphan.unlink()
    assert_nothing_lives(mine.run("killed"))
    mine.types("resume", "killed")
    mine.waits_for_end("killed", "finished")


def test_a_sweep_of_commands(mine: User) -> None:
    """One array, one copy of the code, and a run for each marked value of the script's own words."""
    shutil.copy(OTHER, mine.folder / "src" / "other.py")
    said = mine.types("sweep", "--name", "scan", "src/other.py", "--lr", "@1e-3,3e-4", "--steps", "5")
    assert "sweep  scan: 2 runs" in said
    for name, lr in (("scan-lr_1e-3", "0.001"), ("scan-lr_3e-4", "0.0003")):
        mine.waits_for_end(name, "finished")
        assert f"done, lr {lr}, {mine.run('scan').code.resolve()}/src/other.py" in mine.types("logs", name)


def test_from_ones_own_repository(mine: User) -> None:
    """Submitted, preempted, resumed: with the code as it was submitted, the data in the user's folder, and the weights
    of an undisturbed run."""
    mine.types("--name", "first", "--nodes", "2", *LINES, "launch.slurm.hold=true")
    (mine.folder / "trainer" / "shapes.py").write_text(DAY.format(day="tuesday"))
    mine.cluster.run("scontrol", "release", mine.job_of("first"))
    said = mine.types("sweep", "--name", "scan", *LINES, "seed=1,2", "train.max_steps=2")
    assert "scan: 2 runs" in said
    mine.waits_for("first", IN_EPOCH_2)
    mine.cluster.run("scontrol", "requeue", mine.job_of("first"))
    records = mine.waits_for_end("first", "finished")
    assert [(record["reason"], record["lost_steps"]) for record in records] == [("preempted", 0), ("finished", 0)]

    logs = mine.types("logs", "first")
    assert logs.count(f"the code of monday 1 2 3 {mine.folder}/data") == 4, "two ranks, two attempts"
    assert "tuesday" not in logs and "not in the copy" not in logs
    run = mine.run("first")
    expected = Config.load(None, [*UNHURRIED, "launch.tasks_per_node=2"])
    assert fingerprint(run) == undisturbed_run(expected)
    (line,) = read_submissions(run.submissions)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=mine.folder, text=True).strip()
    assert (line["commit"], line["folder"]) == (head, str(mine.folder))
    assert run.diff.read_text() == "" and "tuesday" in mine.run("scan").diff.read_text()
    weights = mine.folder / "first.safetensors"
    mine.types("export", "first", str(weights))
    assert weights_sha256(load_file(weights)) == fingerprint(run)["weights"]

    def finished() -> list[dict[str, Any]] | None:
        found = json.loads(mine.types("status", "--sweep", "scan", "--json"))
        return found if all(one["state"] == "finished" for one in found) else None

    found = mine.cluster.wait_for(finished, DEADLINE_S, "the sweep did not finish", poll_s=1)
    assert found is not None and [one["step"] for one in found] == [2, 2]
    assert mine.types("status").endswith("\n3 finished\n")
