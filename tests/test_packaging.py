"""Laststep as a user installs it: the sdist, the wheel, and the command `laststep` in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.datasets import MNIST

import laststep
from laststep.data.catalog import MNIST_5K
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.commands import NO_SLURM
from tests.support.project import DEADLINE_S, PROJECT

pytestmark = pytest.mark.xdist_group("packaging")  # all in one process: they share what is built

SOURCES = (
    "laststep", "configs", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md",
    "LICENSE", "NOTICE",
)  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
THEIRS = 'raise SystemExit("another module of that name was started")\n'
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from laststep import Task


class Line(Task):
    def datasets(self):
        x = torch.arange(32.0).unsqueeze(1) / 32
        return TensorDataset(x, 2 * x), TensorDataset(x, 2 * x)

    def model(self):
        return nn.Linear(1, 1)

    def step(self, model, batch):
        x, y = batch
        return {"loss": ((model(x) - y) ** 2).mean()}
"""


class Built(NamedTuple):
    """What a release would consist of."""

    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end; returns what it printed. Any other exit status than 0 fails the test."""
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of this clone, and the wheel of that sdist, built with the setuptools that is installed here."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, source / name, symlinks=True)
        else:
            shutil.copy(PROJECT / name, source)
    run(sys.executable, "-c", BUILD.format(kind="sdist"), folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-c", BUILD.format(kind="wheel"), folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


class User:
    """Somebody who has installed the wheel, in a folder of their own, which also has modules called `trainer` and
    `launch`."""

    def __init__(self, wheel: Path, home: Path) -> None:
        environment, self.folder = home / "environment", home / "project"
        venv.create(environment)
        self.python = environment / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", wheel, cwd=home)
        # What Laststep depends on is not installed again. A .pth in that folder, such as this clone's, is not read.
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{Path(spec.origin).parent.parent}\n")
        for name, text in {
            "line.py": "from trainer import theirs\n" + TASK,
            "configs/mine.yaml": "task: line.Line\ntrain: {epochs: 2, batch_size: 8}\n",
            "trainer.py": "theirs = True\n",
            "launch.py": THEIRS,
            "elsewhere/trainer/__init__.py": THEIRS,
        }.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
        self.env.pop("PYTHONPATH", None)

    def types(self, *words: str, folder: str = ".") -> str:
        """Run `laststep WORDS` in a folder of theirs; returns what it printed."""
        return run("laststep", *words, cwd=self.folder / folder, env=self.env)


@pytest.fixture(scope="module")
def user(built: Built, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(built.wheel, tmp_path_factory.mktemp("user"))


def test_what_is_packed(built: Built) -> None:
    """Every file of the package and the licences must be in both: whoever lacks one notices only when it is used."""
    package = {
        str(Path(folder, name).relative_to(PROJECT))
        for folder, _, names in os.walk(PROJECT / "laststep", followlinks=True)  # configs/ is a link
        for name in names
        if "__pycache__" not in folder
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        packed = set(wheel.namelist())
        assert {name for name in packed if ".dist-info/" not in name} == package
        licences = {name.rpartition("/")[2] for name in packed if ".dist-info/licenses/" in name}
        assert licences == {"LICENSE", "NOTICE"}
    with tarfile.open(built.sdist) as sdist:
        files = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert files >= package | {"LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "setup.cfg"}


def test_command(user: User) -> None:
    """The command calls itself by the name under which it is installed, and runs what was installed, not this clone."""
    show = "import laststep; print(laststep.__file__)"
    where = run(user.python, "-c", show, cwd=user.python.parent, env=user.env)
    assert Path(where.strip()).is_relative_to(user.python.parent.parent)
    assert user.types("--version") == f"laststep {laststep.__version__}\n"
    help = user.types("--help")
    assert help.startswith("usage: laststep [submit] ") and "launch.py" not in help
    assert user.types("status") == "no run in runs/ yet\n"


NOT_THERE = ("`make ", "launch.py", "docs/", "examples/", "trainer/")  # a clone has these, an installation has not


@pytest.mark.parametrize(
    "words",
    [
        "--local", "--nodes 2", "--smoke", "--follow --config mnist", "--config mnist", "sweep seed=1,2",
        "sweep --config mnist seed=1,2", "prove", "resume", "resume first", "status", "status first", "list", "logs",
        "logs first", "cancel first", "cancel", "delete first", "drill first", "verify first", "export first a.pt",
        "evaluate first", "generate first", "report first", "tensorboard first", "completion", "help", "doctor",
        "--local train.py", "frist", "--local optm.lr=1", "--local task=mine.Task", "init .",
    ],
)  # fmt: skip
def test_hints_name_what_is_there(words: str, user: User, tmp_path: Path) -> None:
    """In an empty folder, without Slurm and without a clone, what each verb proposes can be typed."""
    (tmp_path / "train.py").write_text("print('no Laststep')\n")
    env = {**user.env, "PATH": f"{user.python.parent}{os.pathsep}{NO_SLURM}"}
    done = subprocess.run(
        ["laststep", *words.split()], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    said = done.stdout + done.stderr
    assert not [name for name in NOT_THERE if name in said], said
    assert "Traceback" not in said and (done.returncode != 2 or len(done.stderr.splitlines()) == 1), said


def test_trains(user: User) -> None:
    """A user's own task and configuration, and a packaged one with its data, even where other modules of the name
    `trainer` are in the way."""
    said = user.types("--local", "--config", "mine", "--name", "first")
    assert "finished: epoch 2  step 8" in said
    user.env["PYTHONPATH"] = str(user.folder / "elsewhere")
    few = ("train.max_steps=2", "train.batch_size=4", "data.workers=0")
    assert "finished: " in user.types("--local", "--config", "mnist", "--name", "digits", *few)
    for name, steps in (("first", 8), ("digits", 2)):
        assert sum("loss" in line for line in read_lines(RunDir(user.folder / "runs" / name).metrics)) == steps
    assert user.types("status").endswith("\n2 finished\n")


def test_from_init_to_weights(user: User) -> None:
    """A new user's first hour, typed as README has it: a project that trains as it is, and weights that other programs
    read. safetensors alone loads them into a plain model of torch, which has the accuracy that the run has measured."""
    user.types("init", "demo")
    user.types("--local", "--name", "first", "train.epochs=1", folder="demo")
    user.types("export", "first", "model.safetensors", folder="demo")
    demo = user.folder / "demo"
    model = nn.Sequential(*_block(1, 32), *_block(32, 64), nn.Flatten(), nn.Dropout(), nn.Linear(64 * 7 * 7, 10))
    model.load_state_dict(load_file(demo / "model.safetensors"))
    measured = read_lines(RunDir(demo / "runs" / "first").metrics)[-1]["val_accuracy"]
    assert measured > 0.8
    assert _accuracy(model.eval()) == pytest.approx(measured, abs=1e-6)
    said = user.types("evaluate", "first", folder="demo")
    assert f"val_accuracy {measured:.4g} (as the run itself has measured)" in said


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    digits = MNIST(MNIST_5K, train=False)
    return float((model(digits.data.unsqueeze(1) / 255).argmax(1) == digits.targets).float().mean())
