"""`prove` leaves the user's files alone: the script works in a copy of the project."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.proof import project_copy
from laststep.proof.project_copy import ProjectCopy
from tests.cli.test_script import LAUNCH
from tests.support.commands import begin, end

SCRIPT = """
import os, pathlib, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import laststep
import helper

run = laststep.run()
assert os.environ["WANDB_MODE"] == "disabled" and "project" in helper.__file__ and "project" in __file__
data = torch.load("../shared/data.pt") + torch.load("data/more.pt")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.restore(model=model, optimizer=optimizer)
for step in run.steps(count=8):
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "checkpoint.pth.tar")
    pathlib.Path(__file__).with_name("notes.txt").write_text("the script's")
    pathlib.Path(sys.argv[1]).write_text("elsewhere")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that is started in a folder of its own, with a data folder beside it."""
    folder = tmp_path / "work" / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("")
    return folder


def config_of(tmp_path: Path, *words: str) -> Config:
    return Config.load(None, [f"launch.root={tmp_path / 'runs'}", f"script={json.dumps(['train.py', *words])}"])


def test_nothing_is_replaced(project: Path, tmp_path: Path) -> None:
    """A script that saves in the current folder and beside itself used to replace the user's own files nine times. It
    still finds its modules and its data by relative paths, and what it writes elsewhere is named."""
    import torch

    (project.parent / "shared").mkdir()
    torch.save(torch.ones(4, 3), project.parent / "shared" / "data.pt")
    torch.save(torch.ones(4, 3), project / "data" / "more.pt")
    for name in ("checkpoint.pth.tar", "notes.txt"):
        (project / name).write_text("the user's")
    (tmp_path / "out").mkdir()
    words = ("prove", "--json", "--steps", "6", "device=cpu", "train.py", str(tmp_path / "out" / "state"))
    said, errors = end(begin(project, [*LAUNCH, *words]))
    found = json.loads(said)
    assert found["verdict"] == "exact", errors
    assert found["written_outside"] == [str(tmp_path / "out" / "state")]
    for name in ("checkpoint.pth.tar", "notes.txt"):
        assert (project / name).read_text() == "the user's"
    assert sorted(path.name for path in project.iterdir() if path.name != "__pycache__") == [
        "checkpoint.pth.tar", "data", "helper.py", "notes.txt", "train.py",
    ]  # fmt: skip


def test_what_is_large_is_linked(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set is not copied; the rest is. A change of what is linked is seen, and so is a new file."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(project_copy, "MOST_ENTRIES", 20)
    monkeypatch.setattr(project_copy, "MOST_BYTES", 5000)
    (project / "runs").mkdir()
    (project / "data" / "images").mkdir()
    for number in range(30):
        (project / "data" / "images" / f"{number}.png").write_text("image")
    (project / "data" / "weights.bin").write_bytes(bytes(10_000))
    (project / "data" / "loop").symlink_to(project)
    (project / "cache").symlink_to(tmp_path)
    (to := tmp_path / "throwaway" / "to").mkdir(parents=True)
    copy = ProjectCopy(config_of(tmp_path), to)
    assert {"data/images", "data/weights.bin"} <= set(copy.linked)
    assert (copy.folder / "data" / "images").resolve() == project / "data" / "images"
    assert (copy.folder / "train.py").read_text() == SCRIPT and not (copy.folder / "train.py").is_symlink()
    assert (copy.folder / ".." / "project" / "helper.py").exists() and copy.written() == []
    with copy.entered(config_of(tmp_path)):
        Path("helper.py").write_text("changed")
        assert copy.written() == []
        Path("data/images/3.png").write_text("another image")
        Path("data/images/new.png").write_text("new")
    assert copy.written() == ["data/images/3.png", "data/images/new.png"]
    assert Path.cwd() == project


def test_an_environment_in_the_project(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's .venv alone has more files than are watched: what happens to the user's own is noticed all the same,
    and fast."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(project_copy, "MOST_WATCHED", 20)
    (packages := project / ".venv" / "lib").mkdir(parents=True)
    (project / ".venv" / "pyvenv.cfg").touch()
    for number in range(30):
        (packages / f"{number}.py").touch()
    (project / "data" / "seen" / "by").mkdir(parents=True)
    (project / "data" / "seen" / "by" / "nobody").touch()
    (to := tmp_path / "throwaway" / "to").mkdir(parents=True)
    copy = ProjectCopy(config_of(tmp_path), to)
    (project / "data" / "seen" / "by" / "nobody").write_text("changed")
    assert copy.written() == ["data/seen/by/nobody"]


def test_a_script_elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed in another folder than the script's: both are copied, and modules come from the script's."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{here}:/elsewhere")
    (here / "note").write_text("")
    (to := tmp_path / "throwaway" / "to").mkdir(parents=True)
    os.system(f"cd {project} && git init -q")
    config = Config.load(None, [f"launch.root={here / 'runs'}", f"script={json.dumps([str(project / 'train.py')])}"])
    copy = ProjectCopy(config, to)
    assert (copy.folder / "note").exists() and copy.folder.name == "here"
    script = Path(copy.environment["LASTSTEP_SCRIPT"])
    assert script.is_relative_to(to) and script.with_name("helper.py").exists()
    python_path = copy.environment["PYTHONPATH"].split(":")
    assert str(script.parent) in python_path and python_path[-2:] == [str(copy.folder), "/elsewhere"]
