"""The disk that misbehaves: compiles disk.c, tells it which call to hit and how, and reads which calls there were."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.project import shared_folder, shared_lock

FOLDER = "LASTSTEP_WORST_DAY"  # of a disk's control file and trace; unset: the disk is an ordinary one
ROLE = "LASTSTEP_WORST_DAY_ROLE"  # of a process that has none by its environment
ROLES = ("command", "supervisor 0", "rank 0", "supervisor 1", "rank 1", "after_ranks")
ACTIONS = (
    *("none", "fails", "fails for a while", "whole disk fails for a while"),
    *("stalls", "done, but fails", "is short", "is old", "kills its process", "done, and kills its process"),
)  # enum action of disk.c
_CONTROL = struct.Struct("8iii256s")  # struct control of disk.c, without its rules
_RULE = struct.Struct("6iqq16s240s")  # struct rule
_PROCESSES = 8
MOST_FAULTS = 24


class Call(NamedTuple):
    """A call of a run, by which it is found again in another run of the same scenario."""

    role: int
    process: int  # the number of the process among those of its role
    name: str
    pattern: str  # of the path, below the folder of all runs

    def __str__(self) -> str:
        return f"{ROLES[self.role]} #{self.process + 1}: {self.name} {self.pattern}"


@dataclass(frozen=True)
class Fault:
    """What happens to one call."""

    call: Call
    number: int  # the how many-th such call of this process, from 1
    action: str
    error: int = 0
    lasts_s: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of failure, for a reader."""
        return " ".join(filter(None, [errno.errorcode.get(self.error, ""), self.action]))

    def __str__(self) -> str:
        return f"{self.call} ({self.number}) {self.kind}"


def library() -> Path:
    """The compiled library, which all test processes of this session share."""
    made = shared_folder() / "worst_day.so"
    with shared_lock("worst_day"):
        if not made.exists():
            compiler = shutil.which("gcc") or shutil.which("cc")
            if compiler is None:
                raise FileNotFoundError("no C compiler: apt-get install gcc libc6-dev")
            source = Path(__file__).with_name("disk.c")
            command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", f"{made}.new", str(source), "-ldl"]
            subprocess.run(command, check=True)
            Path(f"{made}.new").replace(made)
    return made


class Disk:
    """A disk below `root`, with its control file in `folder`."""

    def __init__(self, folder: Path, root: Path, faults: Sequence[Fault] = (), tracing: bool = False) -> None:
        assert len(faults) <= MOST_FAULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._faults = folder, faults
        self._control = folder / "control"
        content = _CONTROL.pack(*[0] * _PROCESSES, tracing, len(faults), str(root).encode())
        for fault in faults:
            call = fault.call
            content += _RULE.pack(
                *(0, ACTIONS.index(fault.action), fault.error, call.role, call.process, fault.number),
                *(0, round(fault.lasts_s * 1e9), call.name.encode(), call.pattern.encode()),
            )
        self._control.write_bytes(content + bytes(-len(content) % mmap.PAGESIZE))

    @property
    def fired(self) -> list[int]:
        """How many calls each of the faults has hit."""
        content = self._control.read_bytes()
        starts = range(_CONTROL.size, _CONTROL.size + len(self._faults) * _RULE.size, _RULE.size)
        return [int(_RULE.unpack_from(content, start)[0]) for start in starts]

    def calls(self) -> Counter[Call]:
        """How often there was which call, while `tracing`."""
        traced = self.folder / "trace"
        lines = traced.read_text().splitlines() if traced.exists() else []
        return Counter(Call(int(role), int(number), *rest) for role, number, *rest in (x.split(" ", 3) for x in lines))
