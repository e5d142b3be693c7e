"""launch.uv: the packages of a uv project, as its lock file names them, for every attempt of a run.

<launch.root>/.environments/NAME-HASH/    a Python environment, shared by all runs with the same lock file
<run>/environment                         a link to it

`uv sync --frozen` runs at the submission, as compute nodes often have no internet. HASH stands for all that the result
depends on: uv.lock, pyproject.toml, the options, the Python, and the content of local packages. The environment is made
aside and committed by one rename, and never changed after that: of two submissions at once, one uses the other's.
The project's own packages are not part of it: the ranks import them from the copy of the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from laststep.code.code_copy import code_files, remove_abandoned
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.rundir import RunDir, aside
from laststep.runs.run_folders import working_folder
from laststep.say import note

LOCK, PROJECT_FILE = "uv.lock", "pyproject.toml"
FILES = (LOCK, PROJECT_FILE, ".python-version")
ENVIRONMENTS = ".environments"  # in launch.root; another user's there are theirs
KEPT = ".uv"  # in the copy of the code: these files, and what the project's own packages say of themselves
OWN = ("--no-install-workspace", "--no-editable")  # the project's packages come from the copy of the code
# Of a package in the lock file that is a folder of this machine. The members of a workspace are those of the project.
LOCAL = re.compile(r'^name = "([^"]+)"\n(?:version = .*\n)?source = \{ (?:directory|editable) = "([^"]+)" \}', re.M)
OWN_PACKAGE = re.compile(r'^name = "([^"]+)"\n(?:version = .*\n)?source = \{ (?:editable|virtual) = "\." \}', re.M)
# A package that lies beside the project: the lock file alone does not lead to it.
NEAR = re.compile(r"^source = \{ (?:directory|path) = ", re.M)
MEMBERS = re.compile(r"^members = \[(.*?)\]", re.M | re.S)
BY_UV_RUN = "UV_RUN_RECURSION_DEPTH"  # set by `uv run`
# Of the environment that has started us.
ACTIVE = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "UV_PROJECT", "UV_WORKING_DIRECTORY", "PYTHONHOME", "PYTHONPATH")


def check(config: Config, machine: Machine) -> None:
    """Refuse launch.uv where there is no uv, no lock file, or none that has Laststep. Raises ConfigError."""
    given = f"launch.uv={config.launch.uv}"
    if not machine.submits and machine.way is not Way.DRY_RUN:
        return
    folder = project_of(Path.cwd())
    if config.launch.uv_options is None:
        if machine.submits and config.launch.uv is None and folder is not None and BY_UV_RUN in os.environ:
            note(f"[laststep] the job uses the packages that {sys.prefix} has as it starts; launch.uv=true: {LOCK}'s")
        return
    if machine.submits and find_uv() is None:
        raise ConfigError(f"{given}: no uv on this machine: `pip install uv`")
    if folder is None and machine.new:
        raise ConfigError(f"{given}: no {LOCK} in {Path.cwd()} nor above it; `uv lock` writes one")
    if folder is not None and not re.search(r'^name = "laststep"$', (folder / LOCK).read_text(), re.M):
        raise ConfigError(f"{given}: {folder / LOCK} lacks laststep, which each rank imports: `uv add laststep`")


def project_of(folder: Path) -> Path | None:
    """The nearest folder with a uv.lock: this one, or one above it."""
    places = (folder, *folder.parents)
    return next((place for place in places if (place / LOCK).is_file() and (place / PROJECT_FILE).is_file()), None)


def find_uv() -> str | None:
    """The program: that of `uv run`, which has started us, else on the PATH, else the one of this environment."""
    own = Path(sys.executable).parent / "uv"
    return os.environ.get("UV") or shutil.which("uv") or (str(own) if own.exists() else None)


def python_of(run: RunDir) -> Path | None:
    """The Python of a run's environment; None where it has none."""
    link = _home(run).environment
    return link.resolve() / "bin" / "python" if link.is_symlink() else None


def environments(root: Path) -> Path:
    """The folder of this user's environments: others may keep their runs in the same place."""
    folder = root / ENVIRONMENTS
    with contextlib.suppress(FileNotFoundError):
        if folder.stat().st_uid != os.geteuid():
            return folder.with_name(f"{ENVIRONMENTS}-{os.geteuid()}")
    return folder


def planned(config: Config) -> Path:
    """The Python that the ranks of a new run would have."""
    folder = project_of(Path.cwd())
    name = "unknown" if folder is None else _name(folder, config.launch.uv_options or [], Path(config.launch.root))
    return environments(Path(config.launch.root)) / name / "bin" / "python"


def provide(run: RunDir, config: Config) -> None:
    """Have the run's environment ready, and the run linked to it, whose code is copied. One that is there already is
    used as it is, however the project has changed since. Raises ConfigError."""
    options = config.launch.uv_options
    if options is None:
        return
    home, root = _home(run), Path(config.launch.root)
    link, kept = home.environment, home.code / KEPT
    if (python := python_of(run)) is not None and python.exists():
        return
    project = project_of(working_folder(run))
    if project is not None and not kept.exists():
        kept.mkdir()
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(project / name, kept / name)
        for name in _own_packages(project):
            _copy_metadata(name, kept)
    copy = kept if kept.exists() and not NEAR.search((kept / LOCK).read_text()) else None
    names = {_name(place, options, root): place for place in (copy, project) if place is not None}
    wanted = Path(os.readlink(link)).name if link.is_symlink() else next(iter(names), None)
    if wanted not in names:
        raise ConfigError(
            f"{run.name}: its environment {environments(root) / str(wanted)} is gone, and the project has another "
            f"{LOCK} now; --code new takes that"
        )
    target = environments(root) / str(wanted)
    if not target.exists():
        _make(target, names[str(wanted)], options)
    new = aside(link)
    new.symlink_to(os.path.relpath(target, home.path))
    new.replace(link)


def forget(run: RunDir) -> None:
    """The next submission looks at the project's lock file anew."""
    run.environment.unlink(missing_ok=True)


def _home(run: RunDir) -> RunDir:
    """The folder that has a run's code and environment: that of its sweep, which shares them, or its own."""
    return RunDir(run.code.resolve().parent) if run.code.is_symlink() else run


def _name(folder: Path, options: Sequence[str], root: Path) -> str:
    """The name of an environment: it differs wherever one of them could."""
    digest = hashlib.sha256()
    parts = [sys.implementation.cache_tag, platform.python_version(), sysconfig.get_platform(), str(os.geteuid())]
    for part in (*parts, *options):
        digest.update(f"{part}\0".encode())
    for name in FILES:
        with contextlib.suppress(OSError):
            digest.update(f"{name}\0".encode() + (folder / name).read_bytes())
    for package in _local_packages(folder):
        for path in sorted(code_files(package, root)):
            with contextlib.suppress(OSError):
                digest.update(f"{path}\0".encode() + (package / path).read_bytes())
    named = re.search(r'^name = "([\w.-]+)"', (folder / PROJECT_FILE).read_text(), re.M)
    return f"{named[1] if named else 'project'}-{digest.hexdigest()[:12]}"


def _own_packages(folder: Path) -> list[str]:
    """The names of the project's own packages: its members, of a workspace."""
    found = MEMBERS.search((folder / LOCK).read_text())
    return re.findall(r'"([^"]+)"', found[1]) if found else OWN_PACKAGE.findall((folder / LOCK).read_text())


def _local_packages(folder: Path) -> Iterator[Path]:
    """The folders of this machine that are installed as packages, without the project's own."""
    own = _own_packages(folder)
    for name, path in LOCAL.findall((folder / LOCK).read_text()):
        if name not in own:
            yield (folder / path).resolve()


def _copy_metadata(name: str, to: Path) -> None:
    """Keep what an installed package says of itself, such as its version, beside its code: it is not installed in the
    run's environment."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(name)
        folder = to / f"{re.sub('[-_.]+', '_', name)}-{found.version}.dist-info"
        folder.mkdir(exist_ok=True)
        for file in ("METADATA", "entry_points.txt"):
            if text := found.read_text(file):
                (folder / file).write_text(text)


def _make(target: Path, folder: Path, options: Sequence[str]) -> None:
    """Install what the lock file names into a new environment. Raises ConfigError."""
    note(f"[laststep] installing the packages of {folder / LOCK} into {target}, once for all runs with this lock file")
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    remove_abandoned(target.parent.glob("*.tmp"))
    partial = aside(target)
    # Of a virtual environment, the Python that it was made from.
    python = getattr(sys, "_base_executable", sys.executable)
    try:
        _uv("venv", "--relocatable", "--python", python, str(partial), folder=folder, environment=partial)
        _uv("sync", "--frozen", "--python", python, *OWN, *options, folder=folder, environment=partial)
        partial.rename(target)
    except OSError as error:
        if not target.exists():  # else another command has just made it
            raise ConfigError(f"{target}: cannot be made: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _uv(*words: str, folder: Path, environment: Path) -> None:
    """Run uv. Raises ConfigError with what it says."""
    variables = {name: value for name, value in os.environ.items() if name not in ACTIVE}
    variables |= {"UV_PROJECT_ENVIRONMENT": str(environment), "UV_NO_PROGRESS": "1"}
    done = subprocess.run(
        [find_uv() or "uv", *words], cwd=folder, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = "; ".join(line for line in lines if not line.startswith("warning:")) or f"exit status {done.returncode}"
        raise ConfigError(f"uv {words[0]}: {said[:500]}")
