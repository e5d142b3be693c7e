"""launch.uv: one environment per lock file, whichever command asks first, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laststep.cli import resume
from laststep.code import uv
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.rundir import RunDir
from laststep.submission import sbatch
from tests.support.needs import require

PROJECT_FILE = """\
[project]
name = "shades"
version = "1"
requires-python = ">=3.10"
dependencies = ["laststep", "shade"]

[tool.uv.sources]
laststep = {{ path = "wheels/laststep-9-py3-none-any.whl" }}
shade = {{ path = "wheels/{shade}" }}
"""
NOT_IMPORTED = "raise SystemExit('the ranks import Laststep from the copy of the code')\n"


def wheel(folder: Path, name: str, version: str, module: str) -> Path:
    """Write a wheel with one module."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def line(file: str, text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{file},sha256={digest},{len(text.encode())}\n"

    record = "".join(line(*item) for item in files.items()) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)  # the same bytes each time
    return path


def locks(folder: Path, shade: str) -> None:
    """Make the folder a uv project, or change its lock file, so that `shade.NAME` is this one."""
    require(None if uv.find_uv() else "no uv on this machine: pip install -e .[dev]")
    wheel(folder / "wheels", "laststep", "9", NOT_IMPORTED)
    named = wheel(folder / "wheels", "shade", {"red": "1", "blue": "2"}[shade], f"NAME = {shade!r}\n")
    (folder / "pyproject.toml").write_text(PROJECT_FILE.format(shade=named.name))
    subprocess.run([str(uv.find_uv()), "lock", "--offline", "-q"], cwd=folder, check=True, env=os.environ)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv project, in which the user is."""
    folder = tmp_path / "project"
    folder.mkdir()
    locks(folder, "red")
    monkeypatch.chdir(folder)
    return folder


def configured(folder: Path, *words: str) -> Config:
    return Config.load(None, [f"launch.root={folder / 'runs'}", "launch.uv=true", *words])


def provided(config: Config, name: str) -> RunDir:
    """A run that was submitted with this configuration."""
    run = RunDir(Path(config.launch.root) / name)
    run.code.mkdir(parents=True, exist_ok=True)
    uv.provide(run, config)
    return run


def says(run: RunDir) -> str:
    """Which shade a rank of the run would import."""
    words = [str(uv.python_of(run)), "-c", "import shade; print(shade.NAME)"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_two_submissions_at_once(project: Path) -> None:
    """Neither sees half of the other's installation, and one of the two stays."""
    config = configured(project)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda name: provided(config, name), ("one", "two"))
    assert uv.python_of(first) == uv.python_of(second) and says(first) == "red"
    assert [path.name for path in (project / "runs" / uv.ENVIRONMENTS).iterdir()] == [uv.python_of(first).parts[-3]]  # type: ignore[union-attr]


def test_an_environment_that_is_gone(project: Path) -> None:
    """It is made again from the run's own lock file while that names the same packages; else the user decides."""
    config = configured(project)
    run = provided(config, "one")
    made = run.environment.resolve()
    made.rename(project / "away")
    assert says(provided(config, "one")) == "red" and run.environment.resolve() == made
    run.environment.resolve().rename(project / "away-again")
    locks(project, "blue")
    with pytest.raises(ConfigError, match="--code new takes that"):
        provided(config, "one")
    resume._choose_code(run, config, "new", live=False, dry_run=False)
    assert says(provided(config, "one")) == "blue"


def test_what_the_project_says_of_itself(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many packages ask for their own version as they are imported: the run's environment does not have them."""
    info = project / "installed" / "shades-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shades\nVersion: 1\n")
    monkeypatch.syspath_prepend(info.parent)
    config = configured(project)
    run = provided(config, "one")
    path = sbatch.environment(config, run)["PYTHONPATH"]
    words = [str(uv.python_of(run)), "-c", "import importlib.metadata as m; print(m.version('shades'))"]
    done = subprocess.run(words, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_what_an_environment_depends_on(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lock file, another option of uv sync, or another user must never get this one's packages."""
    names = {str(uv.planned(configured(project))), str(uv.planned(configured(project, "launch.uv=--no-dev")))}
    locks(project, "blue")
    names.add(str(uv.planned(configured(project))))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    names.add(str(uv.planned(configured(project))))
    assert len(names) == 4


def test_refused(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in one line, before anything is installed. Under `uv run`, a hint says what the job would use."""
    machine = Machine(Way.SLURM)
    with pytest.raises(ConfigError, match="must be true, or options of `uv sync`"):
        configured(project, "launch.uv=yes")
    with pytest.raises(ConfigError, match="names another Python"):
        configured(project, "launch.python=python3")
    lock = (project / "uv.lock").read_text()
    (project / "uv.lock").write_text(lock.replace('name = "laststep"', 'name = "firststep"'))
    with pytest.raises(ConfigError, match="lacks laststep, which each rank imports: `uv add laststep`"):
        uv.check(configured(project), machine)
    monkeypatch.setenv(uv.BY_UV_RUN, "1")
    uv.check(configured(project, "launch.uv=null"), machine)
    assert "launch.uv=true" in capsys.readouterr().err
    monkeypatch.delenv("UV", raising=False)
    (project / "uv.lock").unlink()
    for way in (Way.SLURM, Way.DRY_RUN):
        with pytest.raises(ConfigError, match=r"no uv\.lock in"):
            uv.check(configured(project), Machine(way))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="no uv on this machine"):
        uv.check(configured(project), machine)


def test_what_uv_says(project: Path) -> None:
    """A failed installation leaves nothing behind, and the user reads uv's reason."""
    config = configured(project)
    (project / "wheels" / "shade-1-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"uv sync: .*shade"):
        provided(config, "one")
    assert not list((project / "runs" / uv.ENVIRONMENTS).iterdir())
