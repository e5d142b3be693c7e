"""The upper rooms hang on the core by one line each: without any of them the rest trains and resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from laststep import rooms
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.forked import forked_python
from tests.support.project import DEADLINE_S, PROJECT

SMALL = ["data.name=fake", "data.args.samples=32", "data.args.image_size=8", "train.batch_size=8", "device=cpu"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without its data, for all tests of this file."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(
        PROJECT / "laststep",
        folder / "laststep",
        ignore=shutil.ignore_patterns("__pycache__", "mnist-5k", "classics", "configs"),
    )
    shutil.copy(PROJECT / "launch.py", folder)
    (folder / "configs").mkdir()
    (folder / "configs" / "default.yaml").write_text("data: {name: fake}\n")
    return folder


def launch(house: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command of that copy."""
    env = {**os.environ, "PYTHONPATH": str(house), "CUDA_VISIBLE_DEVICES": ""}
    command = [forked_python(), "launch.py", *words]
    return subprocess.run(command, cwd=house, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_without_a_room(room: rooms.Room, house: Path) -> None:
    """A room that the core needs is none: whoever does not want it, or breaks it, could train no more."""
    place, aside = house / "laststep" / room.name, house / f"without_{room.name}"
    name = aside.name
    place.rename(aside)
    try:
        begun = launch(house, "--debug", *SMALL, "train.max_steps=2", f"launch.name={name}")
        assert begun.returncode == 0, begun.stdout + begun.stderr
        resumed = launch(house, "resume", name, "--debug", "train.max_steps=4")
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        run = RunDir(house / "runs" / name)
        assert [a["start_step"] for a in read_lines(run.attempts)] == [0, 2]
        steps = [line["step"] for line in read_lines(run.metrics) if "time" in line]
        assert steps == [1, 2, 3, 4]
        for verb in room.verbs:
            refused = launch(house, verb)
            assert refused.returncode == 2 and "no such verb" in refused.stderr, refused.stderr
    finally:
        aside.rename(place)
