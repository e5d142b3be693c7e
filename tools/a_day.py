"""Types the commands of docs/a-day.md in a terminal of 80 columns and writes what they print under them.

`python -m tools.a_day`, in about five minutes; as root on Debian or Ubuntu also the part on Slurm. The words of the
page are written by hand. In its blocks of type `console` a line that begins with `$ ` is typed, the rest was printed. A
block of `python` whose first line is `# NAME` is saved as that file. A comment in front of a block says what happens
while its command runs: `<!-- at TEXT: Ctrl-C -->`, `<!-- at TEXT: kill -->` (SIGKILL for a rank), or that it needs
Slurm: `<!-- Slurm -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.slurm.cluster import Cluster
from tools.desk import PROJECT, copy_clone
from tools.terminal import CODE, normalised, screen, watch

PAGE = PROJECT / "docs" / "a-day.md"
COLUMNS, LONGEST = 80, 48  # lines of an output
PROGRESS = re.compile(r"\.\.\.$|([ \d]+\| )?(\[laststep [\d:]+\] (step \d|epoch \d|saved step)|val_\w+ [\d.]+$)")
TIMES = "] first step after"
BLOCK = re.compile(r"(?:<!-- (?P<note>.+?) -->\n\n?)?```(?P<kind>console|python)\n(?P<body>.*?)```\n", re.DOTALL)
FILE = re.compile(r"# (\S+\.py)\n")
AT = re.compile(r"at (?P<text>.+): (?P<what>Ctrl-C|kill)$")
NO_SLURM = shutil.which("slurmctld") is None or os.geteuid() != 0


class Day:
    """The folder, the environment and the terminal of somebody who has the wheel and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cluster: Cluster | None = None
        self._here, self._state = folder / "work", folder / "environment.sh"
        self._here.mkdir()
        clone = copy_clone(folder / "clone")
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(self._here)]
        subprocess.run([*build, str(clone)], check=True)
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TZ", "TMPDIR") if name in os.environ}
        self._env = {**keep, "OMP_NUM_THREADS": "1", "A_DAY": str(folder), "PS1": "$ "}
        # torch is not downloaded again: it is found beside the new environment's own packages.
        self._env |= {"PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        self._state.write_text("")

    def types(self, command: str, note: str = "") -> list[str]:
        """What a command prints. Its folder, variables and activated environment stay for the next one."""
        kept = shlex.quote(str(self._state))
        keep = f'{{ export -p; echo cd $(printf %q "$PWD"); }} > {kept}'
        wrapped = f". {kept}; {command}\nstatus=$?; {keep}; exit $status"
        when = AT.search(note)
        act = (self._kill if when["what"] == "kill" else None) if when else None
        until = re.compile(when["text"]) if when else None
        lines, _ = watch(wrapped, COLUMNS, self._here, self._env, until, act)
        for packages in self._here.glob(".venv/lib/python*/site-packages"):
            spec = find_spec("torch")
            assert spec is not None and spec.origin is not None
            (packages / "torch-of-this-machine.pth").write_text(f"{Path(spec.origin).parent.parent}\n")
        return [CODE.sub("", line).rstrip() for line in screen("\n".join(line.text for line in lines))]

    def saves(self, name: str, text: str) -> None:
        """Write a file of the user's into the folder in which the last command ended."""
        where = re.findall(r"^cd (.+)$", self._state.read_text(), flags=re.MULTILINE)
        (Path(where[-1]) / name).write_text(text)

    def brings_slurm(self) -> None:
        """From now on the machine has a Slurm."""
        if self._cluster is None:
            self._cluster = Cluster.start(self.folder / "slurm")
            new = {name: value for name, value in self._cluster.env.items() if name not in os.environ}
            with self._state.open("a") as file:
                file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in new.items())

    def ends(self) -> None:
        """Stop its Slurm."""
        if self._cluster is not None:
            self._cluster.stop()

    def _kill(self) -> None:
        """SIGKILL for the newest rank: a process of this day whose parent is its supervisor."""
        parents = {
            pid: parent
            for pid, parent, env in _processes()
            if f"A_DAY={self.folder}" in env and b"--supervised" in Path(f"/proc/{pid}/cmdline").read_bytes()
        }
        ranks = [pid for pid, parent in parents.items() if parent in parents and parents[parent] not in parents]
        os.kill(max(ranks), signal.SIGKILL)


def _processes() -> Iterator[tuple[int, int, list[str]]]:
    """The pid, the parent and the environment of each process."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(entry.name), parent, (entry / "environ").read_text(errors="replace").split("\0")


def live(page: str) -> str:
    """The page, with what its commands print today."""
    with tempfile.TemporaryDirectory(prefix="a-day-") as folder:
        day = Day(Path(folder))
        before: list[str] = []

        def block(found: re.Match[str]) -> str:
            note, kind, body = found["note"] or "", found["kind"], found["body"]
            if kind == "python":
                if name := FILE.match(body):
                    day.saves(name[1], body)
                return found[0]
            if "Slurm" in note:
                if NO_SLURM:
                    return found[0]
                day.brings_slurm()
            shown = []
            for command in re.findall(r"^\$ (.+)$", body, flags=re.MULTILINE):
                print(f"$ {command}", flush=True)
                lines = [line.replace(folder, "/home/you") for line in day.types(command, note)]
                print("\n".join(lines), flush=True)
                shown += [f"$ {command}", *told_once(shortened(lines), before)]
                before.extend(lines)
            text = "\n".join(shown)
            return found[0].replace(body, text + "\n")

        try:
            return BLOCK.sub(block, page)
        finally:
            day.ends()


def shortened(lines: list[str]) -> list[str]:
    """An output with the first and the last of the progress lines that follow each other; at most LONGEST lines."""
    kept: list[str] = []
    for line, after in zip(lines, [*lines[1:], ""]):
        if kept and PROGRESS.match(line) and PROGRESS.match(after) and PROGRESS.match(kept[-1]):
            kept += [] if kept[-1] == "..." else ["..."]
        else:
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return kept if len(kept) <= LONGEST else [*kept[: LONGEST // 2], "...", *kept[-LONGEST // 2 :]]


def told_once(lines: list[str], before: list[str]) -> list[str]:
    """An output without the parts of the time to the first step, if they stand in an earlier output."""
    kept: list[str] = []
    told, within = any(TIMES in line for line in before), False
    for line in lines:
        within = TIMES in line or (within and "[laststep" not in line and line != "...")
        if not (within and told):
            kept.append(line)
    return kept


def printed(page: str) -> list[str]:
    """What the commands of the page print, without what differs from day to day; lines that were wrapped are whole."""
    blocks = [found["body"] for found in BLOCK.finditer(page) if found["kind"] == "console"]
    return [line for block in blocks for line in normalised(block)]


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(prog="python -m tools.a_day", description=(__doc__ or "").splitlines()[0]).parse_args()
    PAGE.write_text(live(PAGE.read_text()))


if __name__ == "__main__":
    main()
