"""A terminal in which tests type `python launch.py ...`, without Slurm."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S, wait_until

# Steps of 80 ms that take hardly any CPU time: each of their samples is read from a slow disk.
SLOW_STEPS = (
    "task=tests.support.tasks.Unhurried", "data.name=fake", "data.args.samples=400", "data.args.image_size=8",
    "train.batch_size=4",
)  # fmt: skip
LONG = (*SLOW_STEPS, "train.epochs=1000")


class Terminal:
    """A terminal in the project's folder, with a folder of its own for runs.

    `python` starts the command, which starts its ranks alike: by default forked processes, see tests/support/forked.
    """

    def __init__(self, root: Path, python: str | None = None, **env: str) -> None:
        self.root = root
        self.python = python or forked_python()
        self.env = {**os.environ, **env}

    def starts(self, *words: str) -> subprocess.Popen[str]:
        """Start `python launch.py WORDS`."""
        command = [self.python, "launch.py", *words, f"launch.root={self.root}"]
        return subprocess.Popen(
            command, cwd=PROJECT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def types(self, *words: str, status: int = 0) -> str:
        """Run the same to its end; return what it printed. Any other exit status fails the test."""
        process = self.starts(*words)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == status, said
        return said

    def run(self, name: str) -> RunDir:
        """The folder of the run with this name."""
        return RunDir(self.root / name)

    def waits_for_step(self, name: str) -> None:
        """Wait until the run has finished its first steps."""
        wait_until(lambda: read_lines(self.run(name).metrics), f"{name} did not begin to train")


class Screen:
    """A terminal's screen, on which a command redraws itself in place, and its keyboard."""

    HOME, BACK = "\x1b[H", "\x1b[?1049l"  # codes: the cursor goes to the upper left; the screen of before is back

    def __init__(self, command: list[str], columns: int, lines: int, env: dict[str, str]) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            os.execvpe(command[0], command, {**env, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)})
        ioctl(self._terminal, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._printed = ""

    def shows(self, text: str) -> list[str]:
        """The lines of the screen, once it is drawn with this text. Ends the command if that does not appear."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in (drawn := self._printed.rpartition(self.HOME)[2]):
            if time.monotonic() > deadline or not self._read():
                os.close(self._terminal)  # which ends it
                raise AssertionError(f"{text!r} was not shown:\n{drawn}")
        return plain(drawn)

    def presses(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def left(self) -> tuple[list[str], int]:
        """The lines that the command leaves on the terminal at its end, and its exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                raise AssertionError(f"the command did not end; it last drew:\n{self._printed[-2000:]}")
        os.close(self._terminal)
        _, status = os.waitpid(self._pid, 0)
        return plain(self._printed.rpartition(self.BACK)[2]), os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Wait for more output; False when there will be none."""
        assert select.select([self._terminal], [], [], DEADLINE_S)[0], f"no more output after:\n{self._printed}"
        try:
            more = os.read(self._terminal, 65536)
        except OSError:  # EIO: the command has ended
            return False
        self._printed += more.decode(errors="replace")
        return bool(more)


def plain(text: str) -> list[str]:
    """The lines of what a terminal has received, without its codes and the spaces at the ends."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).strip().splitlines()]


def ranks_of(launcher: subprocess.Popen[str] | subprocess.Popen[bytes]) -> list[int]:
    """Pids of the ranks that are up, which the supervisors of this launcher have forked, rank 0 first."""
    return [rank for supervisor in children(launcher.pid) for rank in children(supervisor)]


def children(pid: int) -> list[int]:
    """The children of a process, the oldest first."""
    try:
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
