"""Run folders: naming, creating, finding and removing them, and who may write to them.

A job executes files of its run folder, so nobody but their owner may be able to write them: config.yaml has lines for
the shell (launch.setup) and names the module to import, submissions.jsonl has copies of it; a job imports `code/` and
`compiled/`, and unpickles submitit's file in `logs/`. Root may own and write anything anyway. POSIX ACLs are not read:
where they let somebody write, the mode's group bits usually show it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from laststep.config import secret
from laststep.config.config import Config, find_config, with_launch
from laststep.config.errors import ConfigError, Unanswered, nearest
from laststep.config.machine import Machine, Way
from laststep.ranks.disk import Patience
from laststep.ranks.process import here
from laststep.ranks.slurm import is_job_id
from laststep.records.append_only import append_line
from laststep.records.metrics import read_lines
from laststep.records.plan import write_given
from laststep.records.submissions import Submission, read_submissions
from laststep.rundir import RunDir
from laststep.say import command

CREATE_S = 10.0  # how long a start insists on a folder for its run
PROJECT = Path(__file__).resolve().parent.parent.parent
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def with_root_and_name(config: Config, stem: str) -> Config:
    """The configuration with an absolute root, since the job may start in another folder, and with a name, made from
    `stem` and the time where none is given."""
    root = Path(os.path.expanduser(config.launch.root)).absolute()
    name = config.launch.name
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:150] or "run"  # a file may be called anything
        name = base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while (root / name).exists():
            number += 1
            name = f"{base}-{number}"
    return with_launch(config, root=str(root), name=name)


def folder_of(config: Config) -> RunDir:
    """The folder of a run with this root and name."""
    return RunDir(Path(config.launch.root) / str(config.launch.name))


def with_absolute_data(config: Config) -> Config:
    """The configuration with an absolute data.root, as it is to be recorded for a run that may be resumed elsewhere."""
    root = config.data.root
    if "://" not in root:  # a task of the user's own may read from anywhere
        root = str(Path(os.path.expanduser(root)).absolute())
    return dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))


def check(config: Config, machine: Machine) -> None:
    """Raise ConfigError when a new run's name is taken, or the folder of all runs cannot be written."""
    if machine.new and not machine.sweep:
        check_name_is_free(config)
    if machine.way is not Way.RANK:
        check_writable(Path(config.launch.root))


def check_name_is_free(config: Config) -> None:
    """Raise ConfigError when a run of this name exists."""
    run = folder_of(config)
    if run.path.exists() and not (run.config.exists() or run.submissions.exists()):
        raise ConfigError(
            f"launch.name={run.name}: {short(run.path)} is there without a config.yaml: another command is making it, "
            f"or was killed as it did; then type `rm -r {shlex.quote(short(run.path))}`. Or choose another name"
        )
    if run.path.exists():
        raise ConfigError(
            f"launch.name={run.name}: this run exists; continue it with `{command(f'resume {typed(run)}')}`, "
            "or choose another name"
        )


@contextlib.contextmanager
def created(config: Config, given: Sequence[str] = ()) -> Iterator[RunDir]:
    """The run's new folder; `given` as for `create`. It is removed again when the start fails with a ConfigError, or is
    interrupted before there is a job."""
    with only_owner_writes():
        run = create(config, given)
        try:
            yield run
        except BaseException as error:
            jobs = read_submissions(run.submissions)
            has_job = isinstance(error, Unanswered) or any(is_job_id(line["job_id"]) for line in jobs)
            if not has_job and (isinstance(error, ConfigError) or not jobs):
                remove(run)
            raise


@contextlib.contextmanager
def reconfigured(run: RunDir, config: Config) -> Iterator[None]:
    """Replace the configuration of a run. The old one is put back when the run is not started with the new one."""
    before, submissions = Config.parse(run.config.read_text()), len(read_submissions(run.submissions))
    with only_owner_writes():
        config.save(run.config)
        secret.write(run.secrets)
        try:
            yield
        except BaseException as error:
            if len(read_submissions(run.submissions)) == submissions and not isinstance(error, Unanswered):
                before.save(run.config)
            raise


def create(config: Config, given: Sequence[str] = ()) -> RunDir:
    """Create the run's folder and write its configuration there, and which of its keys were `given` by the user.

    Raises ConfigError when that fails for CREATE_S.
    """
    root, run = Path(config.launch.root), folder_of(config)
    patience = Patience(CREATE_S, lambda text: print(f"WARNING: {text}", file=sys.stderr))
    try:
        patience.insist(lambda: check_writable(root))
    except OSError as error:  # before anything is made: nothing is removed
        raise ConfigError(f"launch.root={root}: cannot be read: {error.strerror}") from None
    try:
        run.path.mkdir(parents=True)
        patience.insist(lambda: run.logs.mkdir(exist_ok=True))
        if given:
            patience.insist(lambda: write_given(run.given, given))
        patience.insist(lambda: config.save(run.config))
        patience.insist(lambda: secret.write(run.secrets))
    except FileExistsError:
        raise ConfigError(f"launch.name={run.name}: somebody else has just started a run of this name") from None
    except OSError as error:
        remove(run)  # else the name would be taken
        raise ConfigError(f"launch.root={root}: cannot be written: {error.strerror}") from None
    return run


def check_writable(root: Path) -> None:
    """Check that the folder of all runs exists or can be created, and is writable. Raises ConfigError."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"launch.root={root}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"launch.root={root}: {existing} is not writable; name another with launch.root=FOLDER")


def remove(run: RunDir) -> None:
    """Remove the folder of a run that did not start."""
    shutil.rmtree(run.path, ignore_errors=True)


def record_submission(run: RunDir, job_id: str, **more: Any) -> None:
    """Append a line to submissions.jsonl: the job, where and how it was started, and the configuration in the run's
    folder. Raises OSError."""
    append_line(run.submissions, json.dumps({"job_id": job_id, **about_submission(run), **more}))


def about_submission(run: RunDir) -> Submission:
    """Where and how this process starts the run now, and the configuration in the run's folder."""
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "process": here(),
        "command": secret.masked_words(sys.argv),
        "folder": str(working_folder(run)),
        "version": str(importlib.import_module("laststep").__version__),  # which imports this module
        "config": run.config.read_text(),
    }


def working_folder(run: RunDir) -> Path:
    """The folder that relative paths in the ranks refer to: the one where the run was first submitted or started. The
    current folder, if the run is new or that folder is gone."""
    first = next((line["folder"] for line in read_submissions(run.submissions) if "folder" in line), None)
    return Path(first) if first and os.path.isdir(first) else Path.cwd()


def site() -> str | None:
    """The site profile to use when the command names none: the file of $LASTSTEP_SITE. Raises ConfigError."""
    name = os.environ.get("LASTSTEP_SITE")
    try:
        return str(find_config(name, of_site=True)) if name else None
    except ConfigError as error:
        raise ConfigError(str(error).replace("--site ", "LASTSTEP_SITE=", 1)) from None


def runs_root(overrides: Sequence[str]) -> str:
    """The folder of all runs: launch.root from the overrides, else the site's, else the default. Raises ConfigError,
    also for any other key: a command that only looks for runs would not heed it."""
    for word in overrides:
        if word.partition("=")[0] != "launch.root":
            raise ConfigError(f"{word}: this command takes no key but launch.root, the folder that holds all runs")
    profile = site()
    if not overrides and profile is None:
        return Config().launch.root  # the default, which needs no check
    return Config.load(None, overrides, profile).launch.root


def root_among(words: Iterable[str]) -> str:
    """`runs_root`, from `key=value` words that may set other keys, too."""
    return runs_root([word for word in words if word.startswith("launch.root=")])


def typed(run: RunDir) -> str:
    """The run as a command typed in the current folder names it: by its name, or by its path where the name alone
    would not find it."""
    try:
        by_name = RunDir(Path(os.path.expanduser(runs_root(()))) / run.name).path == run.path
    except ConfigError:  # the site's profile is not here
        by_name = False
    return run.name if by_name else shlex.quote(short(run.path))


def short(path: os.PathLike[str] | str) -> str:
    """The path, or relative to the current folder where that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)


def find_run(name: str, root: str) -> RunDir:
    """The run of that name in `root`, or the run whose folder is at the path `name`. Raises ConfigError."""
    for path in (Path(os.path.expanduser(root)) / name, Path(os.path.expanduser(name))):
        run = RunDir(path)
        if os.path.isfile(run.config):  # unlike Path.is_file, False where the folder may not be read
            return run
        if os.path.isdir(run.path) and not os.access(run.path, os.R_OK | os.X_OK):
            raise ConfigError(f"{name}: you may not read {run.path}; ask {run.path.owner()}")
    names = sorted(run.name for run in all_runs(root))
    folder = Path(os.path.expanduser(root))
    raise ConfigError(f"{name}: no such run in {folder}/; {nearest(name, names) if names else 'there is none yet'}")


def find_run_to_continue(name: str, root: str) -> RunDir:
    """`find_run`, for a run that is to start again. Raises ConfigError also when this user may not write its folder, or
    another user may write what its job executes."""
    run = find_run(name, root)
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise ConfigError(f"{run.name}: you may not write to {run.path}, so this run cannot continue there")
    check_run_trusted(run)
    return run


def find_runs(names: Sequence[str], root: str, sweep: str | None = None) -> list[RunDir]:
    """The runs of these names, each once; a name may be a pattern such as 'scan-*'. With `sweep`, that sweep's runs.

    Raises ConfigError when one is missing.
    """
    folder = Path(os.path.expanduser(root))
    if sweep is not None:
        if names:
            raise ConfigError(f"{names[0]}: name a sweep or runs, not both")
        members = [line["run"] for line in read_lines(RunDir(folder / sweep).sweep)]
        if not members:
            raise ConfigError(f"--sweep {sweep}: no such sweep in {folder}/")
        return [RunDir(folder / name) for name in members]
    found: dict[Path, RunDir] = {}
    for name in names:
        if glob.escape(name) == name:
            runs = [find_run(name, root)]
        else:
            runs = sorted((run for run in all_runs(root) if fnmatchcase(run.name, name)), key=lambda run: run.name)
        if not runs:
            raise ConfigError(f"{name}: matches no run in {folder}/")
        found.update({run.path: run for run in runs})
    return list(found.values())


def all_runs(root: str) -> list[RunDir]:
    """All runs in that folder, the newest last. Raises ConfigError when it cannot be read: that is no empty folder."""
    folder = Path(os.path.expanduser(root))
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from None
    written = {path: path.stat().st_mtime for path in folder.glob("*/config.yaml")}
    return [RunDir(path.parent) for path in sorted(written, key=lambda path: (written[path], path))]


def check_run_trusted(run: RunDir) -> None:
    """Raise ConfigError when another user owns, or may write, what the run's next job executes."""
    check_trusted(run, [run.config, run.submissions, run.logs, run.checkpoints, *_tree(run.code), *_tree(run.compiled)])


def check_trusted(run: RunDir, paths: Iterable[Path]) -> None:
    """Raise ConfigError when another user owns, or may write, the run's folder or one of these paths in it."""
    for path in (run.path, *paths):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{path}: belongs to {_name(found.st_uid)}, who could run commands as you; if you trust what is in "
                    f"it, copy the run (`cp -r {shlex.quote(str(run.path))} FOLDER`) and resume the copy"
                )
            if found.st_mode & OTHERS_MAY_WRITE:
                raise ConfigError(
                    f"{path}: others may write it, and so run commands as you ({stat.filemode(found.st_mode)}); if you "
                    f"trust what is in it: `chmod -R go-w {shlex.quote(str(run.path))}`"
                )


def trusted_in_shell(run: RunDir) -> list[str]:
    """Lines for a job's batch shell that define `trusted`, the same check: it must not import what it checks."""
    folder, logs, code, compiled = (shlex.quote(str(path)) for path in (run.path, run.logs, run.code, run.compiled))
    return [
        "# Anyone who can write the files that this job executes could run commands as its user: then it refuses to.",
        "trusted() {",
        "    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        r"    unsafe=(! -type l \( -perm /022 -o ! -uid $EUID ! -uid 0 \) -print -quit)",
        "    found=$(",
        "        exec 2>/dev/null  # submitit may write its file only later, and not every run has compiled/",
        f'        find -H {folder} {logs} {logs}/${{job:-$SLURM_JOB_ID}}_submitted.pkl -maxdepth 0 "${{unsafe[@]}}"',
        f'        find -H {code} {compiled} "${{unsafe[@]}}"',
        "    )",
        '    [ -z "$found" ] && return 0',  # in a trap, a bare return has the status from before it
        "    echo \"[laststep] refused: others may write, or own, ${found%%$'\\n'*}; if you trust what is in it:"
        f' chmod -R go-w {folder}, and resume" >&2',
        "    return 1",
        "}",
    ]


@contextlib.contextmanager
def only_owner_writes() -> Iterator[None]:
    """Have what this process, and those that it starts, create meanwhile writable by its owner alone."""
    before = os.umask(OTHERS_MAY_WRITE)
    os.umask(before | OTHERS_MAY_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def _tree(folder: Path) -> Iterator[Path]:
    """A folder and all that is in it."""
    yield folder
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # no longer in the list of users, or never
        return f"user {uid}"
