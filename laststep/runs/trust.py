"""trust: a job executes files of its run folder, so nobody but their owner may be able to write them.

config.yaml has lines for the shell (launch.setup) and names the module to import, submissions.jsonl has copies of it; a
job imports `code/` and `compiled/`, and unpickles submitit's file in `logs/`. Root may own and write anything anyway.
POSIX ACLs are not read: where they let somebody write, the mode's group bits usually show it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from laststep.config.errors import ConfigError
from laststep.rundir import RunDir

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_run(run: RunDir) -> None:
    """Raise ConfigError when another user owns, or may write, what the run's next job executes."""
    check(run, [run.config, run.submissions, run.logs, run.checkpoints, *_tree(run.code), *_tree(run.compiled)])


def check(run: RunDir, paths: Iterable[Path]) -> None:
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


def shell_check(run: RunDir) -> list[str]:
    """Lines for a job's batch shell that define `trusted`, the same check: it must not import what it checks."""
    folder, logs, code, compiled = (shlex.quote(str(path)) for path in (run.path, run.logs, run.code, run.compiled))
    return [
        "# Whoever can write the files that this job executes could run commands as its user: then it refuses to.",
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
