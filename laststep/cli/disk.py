"""disk: what each run holds on the disk, and what may go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointStore, Manifest, ranked
from laststep.cli.parsers import ROOT_KEY, Parser
from laststep.config.errors import ConfigError
from laststep.config.keep import Ranking
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.runs.run_folders import all_runs, runs_root, short, typed
from laststep.runs.run_status import StatusReader
from laststep.say import command, note

DESCRIPTION = """\
Show what each run holds on the disk, the environments that runs share
(launch.uv), and what may go, with the command that removes it. Removes nothing
itself."""
ENVIRONMENTS = ".environments*"  # see laststep.code.uv
LEFT_S = 86_400.0  # nothing takes a day to be written or removed
LEFT = ("*.tmp", ".doctor-*", ".hello-*", f"{ENVIRONMENTS}/*.tmp")


def add_arguments(parser: Parser) -> None:
    """Declare what disk takes."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar=ROOT_KEY, help="the folder that holds all runs")


def run(args: argparse.Namespace) -> int:
    """Print it; returns the exit status."""
    found = disk_use(runs_root(args.overrides))
    if args.json:
        print(json.dumps(asdict(found), indent=1))
        return 0
    titles = ("run", "state", "checkpoints", "code", "logs", "other")
    parts = [(use, (use.checkpoints, use.code, use.logs, use.other)) for use in found.runs]
    rows = [titles, *((use.run, use.state, *map(_shown, sizes)) for use, sizes in parts)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows if found.runs else []:
        words = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        print("  ".join([*words, *(cell.rjust(width) for cell, width in zip(row[2:], widths[2:]))]))
    for shared in found.environments:
        more = " ..." if len(shared.runs) > 3 else ""
        users = f"used by {', '.join(shared.runs[:3])}{more}" if shared.runs else "not used"
        note(f"{short(shared.environment)}  {_shown(shared.bytes)}, {users}", sys.stdout, indent=2)
    total = sum(use.total for use in found.runs) + sum(shared.bytes for shared in found.environments)
    print(f"{_shown(total)} in {short(found.root)}, {_shown(found.free)} free")
    print("may go" if found.may_go else "nothing that may go")
    for spare in found.may_go:
        note(f"  {_shown(spare.bytes):>9}  {spare.what}\n             {spare.command}", sys.stdout, indent=13)
    return 0


def _shown(count: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


@dataclass(frozen=True)
class Spare:
    """Something that may go, and the command that removes it."""

    what: str
    bytes: int
    command: str


@dataclass(frozen=True)
class RunUse:
    """The bytes that one run, or the folder that the runs of a sweep share, has on the disk."""

    run: str
    state: str
    checkpoints: int
    code: int
    logs: int
    other: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints + self.code + self.logs + self.other


@dataclass(frozen=True)
class Shared:
    """An environment of launch.uv: its bytes, and the runs that use it."""

    environment: str
    bytes: int
    runs: list[str]


@dataclass
class DiskUse:
    """All of it. `may_go` is sorted, the largest first."""

    root: str
    free: int
    runs: list[RunUse] = field(default_factory=list)
    environments: list[Shared] = field(default_factory=list)
    may_go: list[Spare] = field(default_factory=list)


def disk_use(root: str) -> DiskUse:
    """Look at all runs. Raises ConfigError where the folder cannot be read."""
    folder = Path(os.path.expanduser(root)).absolute()
    runs = all_runs(root)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name another with launch.root=FOLDER")
    found, seen = DiskUse(str(folder), shutil.disk_usage(folder).free), set[tuple[int, int]]()
    for run, status in zip(runs, StatusReader().read(runs)):
        found.runs.append(_of_run(run, status.state, seen))
        if not status.alive:
            found.may_go += _spare(run, status.state)
    for path in sorted(folder.glob("*/sweep.jsonl")):
        found.runs.append(_of_run(RunDir(path.parent), "sweep", seen))
    links = [path for path in folder.glob("*/environment") if path.is_symlink()]
    for path in sorted(folder.glob(f"{ENVIRONMENTS}/*")):
        if path.suffix != ".tmp":
            users = sorted(link.parent.name for link in links if Path(os.readlink(link)).name == path.name)
            found.environments.append(Shared(str(path), bytes_in(path, seen), users))
            if not users:
                found.may_go.append(Spare("packages that no run uses", bytes_in(path), _remove([path])))
    for path in sorted({path for pattern in LEFT for path in folder.glob(pattern)}):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - LEFT_S:
                found.may_go.append(Spare("left by a command that was killed", bytes_in(path), _remove([path])))
    found.runs.sort(key=lambda use: -use.total)
    found.may_go = sorted((spare for spare in found.may_go if spare.bytes), key=lambda spare: -spare.bytes)
    return found


def bytes_in(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """The bytes of a file, or of all files in a folder, without those behind links. A file that is in `seen` already
    under another name has none, and neither has one that vanishes meanwhile."""
    return sum(_bytes_of(file, seen if seen is not None else set()) for file in _files(path))


def _files(path: Path) -> Iterator[str]:
    if path.is_dir() and not path.is_symlink():
        for place, _, names in os.walk(path):
            yield from (os.path.join(place, name) for name in names)
    else:
        yield str(path)


def _bytes_of(file: str, seen: set[tuple[int, int]]) -> int:
    with contextlib.suppress(OSError):
        found = os.lstat(file)
        key = (found.st_dev, found.st_ino)
        if found.st_nlink == 1 or key not in seen:
            seen.add(key)
            return found.st_size
    return 0


def _of_run(run: RunDir, state: str, seen: set[tuple[int, int]]) -> RunUse:
    checkpoints, code, logs = (bytes_in(path, seen) for path in (run.checkpoints, run.code, run.logs))
    apart = (run.checkpoints.name, run.code.name, run.logs.name)
    with contextlib.suppress(OSError):
        other = sum(bytes_in(path, seen) for path in run.path.iterdir() if path.name not in apart)
        return RunUse(run.name, state, checkpoints, code, logs, other)
    return RunUse(run.name, state, checkpoints, code, logs, 0)


def _spare(run: RunDir, state: str) -> Iterator[Spare]:
    """What may go of a run that has no job."""
    if state == "finished" and (older := _older_checkpoints(run)):
        what = f"{run.name}: checkpoints other than the newest and the best"
        yield Spare(what, sum(map(bytes_in, older)), _remove(older))
    if run.compiled.exists():
        what = f"{run.name}: compiled kernels, made anew where needed"
        yield Spare(what, bytes_in(run.compiled), _remove([run.compiled]))
    if state != "finished" and not CheckpointStore(run.checkpoints).steps():
        yield Spare(f"{run.name}: {state}, nothing saved", bytes_in(run.path), command(f"delete {typed(run)}"))


def _older_checkpoints(run: RunDir) -> list[Path]:
    """All but the newest and those that checkpoint.keep_best keeps; none where one of them cannot be read."""
    store = CheckpointStore(run.checkpoints)
    manifests: dict[int, Manifest] = {}
    steps = store.steps()
    try:
        settings = run_config.as_submitted(run).checkpoint
        manifests = {step: store.manifest(step) for step in steps}
        best = ranked(manifests, Ranking.parse(settings.best_by))[: max(1, settings.keep_best)]
    except (CheckpointError, ConfigError, OSError):
        return []
    return [store.path(step) for step in steps[:-1] if step not in best]


def _remove(paths: Sequence[Path]) -> str:
    return f"rm -r {' '.join(shlex.quote(short(path)) for path in paths)}"
