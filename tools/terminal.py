"""Runs commands in a terminal of their own, and keeps each line that they print with its time."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

DEADLINE_S = 300.0  # no command of a recording takes longer


@dataclass
class Line:
    """A line of output as the terminal received it, with its colours, and when, in seconds since the command began."""

    at: float
    text: str


def watch(
    command: str, columns: int, cwd: Path, env: Mapping[str, str], until: re.Pattern[str] | None = None
) -> tuple[list[Line], float]:
    """Run a shell command in a terminal; returns its lines and the seconds it took.

    Once a line matches `until`, Ctrl-C is typed. Raises TimeoutError with the output when the command does not end.
    """
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(cwd)
        words = ["bash", "-c", command]
        os.execvpe(words[0], words, {**env, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"})
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    began, lines, rest, typed = time.monotonic(), [], b"", False
    while chunk := _read(terminal):
        at = time.monotonic() - began
        *whole, rest = (rest + chunk).split(b"\n")
        lines += [Line(at, line.decode(errors="replace").rstrip("\r")) for line in whole]
        if until and not typed and any(until.search(line.text) for line in lines):
            os.write(terminal, b"\x03")
            typed = True
        if at > DEADLINE_S:
            raise TimeoutError(f"{command} did not end within {DEADLINE_S:.0f} s:\n{_text(lines)}")
    if rest.strip():
        lines.append(Line(time.monotonic() - began, rest.decode(errors="replace").rstrip("\r")))
    os.close(terminal)
    os.waitpid(pid, 0)
    return lines, time.monotonic() - began


def _read(terminal: int) -> bytes:
    """The next bytes; none once the command has ended. Raises TimeoutError when nothing is printed for too long."""
    if not select.select([terminal], [], [], DEADLINE_S)[0]:
        raise TimeoutError(f"no output for {DEADLINE_S:.0f} s")
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the command has ended
        return b""


def _text(lines: list[Line]) -> str:
    return "\n".join(line.text for line in lines)
