"""The code copy: a job runs the code as it was at submission, and the copy holds nothing but code."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laststep.code import code_copy
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.runs import run_folders
from tests.support.project import install_finder

TASK = "class Mine:\n    pass\n"
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, where the command is typed."""
    folder = tmp_path / "mine"
    for name in (
        "my_task.py",
        "parts/model.py",
        "data.bin",
        "__pycache__/my_task.pyc",
        ".secret/key",
        "env/pyvenv.cfg",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TASK)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def copied(run: RunDir, task: str = "my_task.Mine") -> set[str]:
    """Copy the code; returns the user's files in the copy."""
    code_copy.copy_code(run, Config.load(None, [f"task={task}", f"launch.root={run.path.parent}"]))
    names = ("my_task.py", "parts", "data.bin", "__pycache__", ".secret", "env", "kept", "dropped.py", "gone.py")
    return {name for name in names if (run.code / name).exists()}


def test_a_folder_without_git(run: RunDir, here: Path) -> None:
    """All files are copied, except what is never code: caches, environments, hidden folders."""
    assert copied(run) == {"my_task.py", "parts", "data.bin"}
    assert (run.code / "parts" / "model.py").read_text() == TASK
    assert (run.code / "launch.py").exists() and (run.code / "laststep" / "data" / "mnist-5k").is_dir()
    assert not list(run.code.rglob("*.pyc"))


def test_a_folder_with_git(run: RunDir, here: Path) -> None:
    """Tracked and untracked files are copied as they are on disk; ignored and deleted ones are not."""
    (here / ".gitignore").write_text("/data.bin\ndropped.py\nenv/\n__pycache__/\n.secret/\n")
    (here / "dropped.py").write_text(TASK)
    (here / "gone.py").write_text(TASK)
    commit(here, "my_task.py", "gone.py")
    (here / "gone.py").unlink()
    (here / "my_task.py").write_text(TASK + "# edited\n")
    assert copied(run) == {"my_task.py", "parts"}
    assert (run.code / "my_task.py").read_text().endswith("# edited\n")


def commit(folder: Path, *names: str) -> str:
    """Make a repository of the folder and commit these files; returns the commit."""
    for words in (("init", "-q"), ("add", *names), ("commit", "-qm", "x")):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    return str(code_copy.current_commit(folder))


def test_an_ignored_task(run: RunDir, here: Path) -> None:
    """A job needs the module that it trains, whatever git thinks of it."""
    (here / ".gitignore").write_text("my_task.py\n*.bin\nenv/\n.secret/\n__pycache__/\n")
    commit(here, "parts")
    assert copied(run) == {"my_task.py", "parts"}


def test_only_what_the_task_needs(run: RunDir, here: Path) -> None:
    """Submitting a ready-made task from a home folder does not copy that folder."""
    assert copied(run, "classification") == set()


def test_runs_are_not_code(here: Path) -> None:
    """If the root is inside the folder, each copy would otherwise contain all earlier runs."""
    run = RunDir(here / "parts" / "results" / "run")
    (run.path.parent / "other").mkdir(parents=True)
    (run.path.parent / "other" / "log.txt").write_text("x")
    run.path.mkdir()
    assert "parts" in copied(run)
    assert not (run.code / "parts" / "results").exists()


def test_too_many_to_be_code(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user gets one line instead of an hour of copying a data set."""
    monkeypatch.setattr(code_copy, "MOST_FILES", 2)
    with pytest.raises(ConfigError, match=r"has over 2 files: name what is not code in \.gitignore"):
        copied(run)


def test_a_disk_that_refuses(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No partial copy is left: the next try starts over."""

    def full(source: object, to: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(ConfigError, match=r"the code could not be copied to .*No space left on device"):
        copied(run)
    assert not list(run.path.iterdir())


def test_each_file_is_exact(run: RunDir, here: Path) -> None:
    """All files are there, whole, and scripts stay executable."""
    (here / "empty").touch()
    (here / "data.bin").write_bytes(os.urandom(300_000))
    modes = {"my_task.py": 0o755, "data.bin": 0o444, "empty": 0o666, "parts/model.py": 0o600}
    for name, mode in modes.items():
        os.utime(here / name, (1e9, 1e9))
        (here / name).chmod(mode)
    copied(run)
    for name, mode in modes.items():
        found = (run.code / name).stat()
        assert (run.code / name).read_bytes() == (here / name).read_bytes()
        assert (stat.S_IMODE(found.st_mode), found.st_mtime) == (mode & ~0o022, 1e9)
    for module in (run_folders.PROJECT / "laststep").rglob("*.py"):
        assert (run.code / module.relative_to(run_folders.PROJECT)).read_bytes() == module.read_bytes()


def test_the_list_of_packages(run: RunDir, here: Path) -> None:
    """It has the names and versions that Python itself reads."""
    copied(run)
    known = {f"{package.name}=={package.version}" for package in importlib.metadata.distributions()}
    assert set(run.packages.read_text().splitlines()) == known


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def monorepo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository with two src folders, a flat package and an environment, and an editable install of it all.

    The command is typed in a folder elsewhere.
    """
    folder = tmp_path / "mono"
    source = "day = 'monday'\n"
    write(
        folder,
        {
            ".gitignore": ".venv/\n_version.py\n/data/\n",
            "models/src/mymodels/__init__.py": source + "from mymodels import _version\n",
            "models/src/mymodels/_version.py": source,
            "tools/src/mytools/__init__.py": source,
            "flat/__init__.py": source,
            "data/numbers.txt": "1 2 3",
            ".venv/pyvenv.cfg": "",
            ".venv/lib/site-packages/installed.py": source,
        },
    )
    commit(folder, ".")
    for name in ("mymodels", "mytools", "flat"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def editable_by_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install with a .pth file: each source folder stands on sys.path."""
    places = ("models/src", "tools/src", ".", ".venv/lib/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, *(str(folder / place) for place in places)])


def editable_by_finder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install with setuptools' finder, which knows each package's folder."""
    found = {"mymodels": "models/src/mymodels", "mytools": "tools/src/mytools", "flat": "flat"}
    install_finder("mono", {name: str(folder / place) for name, place in found.items()}, monkeypatch)


@pytest.mark.parametrize("editable", [editable_by_path, editable_by_finder])
def test_the_copy_wins_over_an_editable_install(
    editable: Callable[[Path, pytest.MonkeyPatch], None], run: RunDir, monorepo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in the queue must not run what is edited later, in any package of the user's repository; and it must find
    the modules there that a build generates and git ignores."""
    editable(monorepo, monkeypatch)
    config = Config.load(None, ["task=mymodels.Mine", f"launch.root={run.path.parent}"])
    code_copy.copy_code(run, config)
    for source in monorepo.rglob("__init__.py"):
        source.write_text(source.read_text().replace("monday", "tuesday"))
    path = code_copy.python_path(code_copy.origin_of(run, config), run.code)
    assert "site-packages" not in path and not (run.code / ".venv").exists() and not (run.code / "data").exists()
    code = (
        f"import sys; sys.path += {[str(monorepo / place) for place in ('models/src', 'tools/src', '.')]}\n"
        "import mymodels, mytools, flat, laststep\n"
        "print(mymodels.day, mytools.day, flat.day, mymodels._version.day, laststep.__file__)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONPATH": path}, text=True)
    assert said.split() == [*["monday"] * 4, str(run.code / "laststep" / "__init__.py")]


def test_the_commit_is_the_users(run: RunDir, here: Path) -> None:
    """Provenance: which commit of the user's code trained, and with which changes."""
    head = commit(here, "my_task.py")
    (here / "my_task.py").write_text(TASK + "# edited\n")
    copied(run)
    origin = code_copy.origin_of(run, Config.load(None, ["task=my_task.Mine"]))
    assert (origin.commit, origin.repository) == (head, str(here))
    assert "+# edited" in run.diff.read_text() and "laststep/" not in run.diff.read_text()


def test_laststeps_own_commit(run: RunDir, here: Path) -> None:
    """A ready-made task is Laststep's code, wherever it is started."""
    head = commit(here, "my_task.py")
    copied(run, "classification")
    found = code_copy.origin_of(run, Config.load(None, [])).commit
    assert found == code_copy.current_commit(run_folders.PROJECT) != head


def test_too_large_to_be_code(
    run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forgotten checkpoint of some GB is not copied for each run without a word: the line names it, and the fix."""
    (here / "parts" / "weights.pt").write_bytes(bytes(30_000_000))
    monkeypatch.setattr(code_copy, "MUCH_MB", 29)
    copied(run)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"warning: {here}: .* takes 30 MB \(largest: parts/weights.pt 30 MB, ", line)
    assert line.endswith("name what is not code in .gitignore after `git init`, or move it elsewhere")
    shutil.rmtree(run.code)
    monkeypatch.setattr(code_copy, "MOST_MB", 29)
    with pytest.raises(ConfigError, match=r"too large to copy for each run: 30 MB \(largest: parts/weights\.pt 30 MB"):
        copied(run)
    commit(here, "my_task.py")
    (here / ".gitignore").write_text("*.pt\nenv/\n.secret/\n__pycache__/\n")
    assert "my_task.py" in copied(run) and not (run.code / "parts" / "weights.pt").exists()


def test_links(run: RunDir, here: Path, tmp_path: Path) -> None:
    """A link to a folder of code is copied as that folder, or later edits there would leak in; one that leads around in
    a circle is left out."""
    write(tmp_path / "shared", {"common.py": TASK})
    (here / "kept").symlink_to(tmp_path / "shared")
    (here / "parts" / "loop").symlink_to(here)
    for repository in (False, True):
        if repository:
            (here / ".gitignore").write_text("env/\n.secret/\n__pycache__/\n")
            commit(here, ".")
        assert "kept" in copied(run)
        assert (run.code / "kept" / "common.py").read_text() == TASK and not (run.code / "kept").is_symlink()
        assert not (run.code / "parts" / "loop").exists()
        shutil.rmtree(run.code)


def test_no_files(run: RunDir, here: Path) -> None:
    """A pipe or a socket, such as that of an editor, is no code. Copying it would fail, and refuse the submission."""
    os.mkfifo(here / "parts" / "pipe")
    (here / "nowhere").symlink_to("not there")
    for repository in (False, True):
        if repository:
            commit(here, ".")
        assert "my_task.py" in copied(run)
        assert not os.path.lexists(run.code / "parts" / "pipe") and not os.path.lexists(run.code / "nowhere")
        shutil.rmtree(run.code)


def test_where_python_looks(tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the copy, then the current folder inside the copy, then the user's own PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.chdir(run_folders.PROJECT / "tests")
    copy = tmp_path / "code"

    def path() -> list[str]:
        return code_copy.python_path(code_copy.look_up(Config(), Path.cwd()), copy).split(os.pathsep)

    assert path() == list(map(str, (copy, copy / "tests", "/own")))
    monkeypatch.chdir(tmp_path)
    assert path() == list(map(str, (copy, "/own")))
    live = code_copy.live_python_path(tmp_path).split(os.pathsep)
    assert live == list(map(str, (run_folders.PROJECT, tmp_path, "/own")))
