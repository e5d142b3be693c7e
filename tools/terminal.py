"""Runs commands in a terminal of their own, and keeps each line that they print with its time, or their screen."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

DEADLINE_S = 300.0  # no command of a recording takes longer
# Codes of a terminal (ECMA-48): a code that is no colour, a line end or a return; one that moves; any of them.
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-ln-z]|\n|\r)")
MOVE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-ln-z])")
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Line:
    """A line of output as the terminal received it, with its colours, and when, in seconds since the command began."""

    at: float
    text: str


@dataclass
class Shot:
    """A command, and the lines of its screen, with their colours."""

    command: str
    lines: list[str]


def watch(
    command: str,
    columns: int,
    cwd: Path,
    env: Mapping[str, str],
    until: re.Pattern[str] | None = None,
    act: Callable[[], object] | None = None,
) -> tuple[list[Line], float]:
    """Run a shell command in a terminal; returns its lines and the seconds it took.

    Once a line matches `until`, `act` is called, or Ctrl-C is typed. Raises TimeoutError with the output when the
    command does not end.
    """
    pid, terminal = _start(command, (columns, 24), cwd, env)
    began, lines, rest, typed = time.monotonic(), [], b"", False
    while chunk := _read(terminal):
        at = time.monotonic() - began
        *whole, rest = (rest + chunk).split(b"\n")
        lines += [Line(at, line.decode(errors="replace").rstrip("\r")) for line in whole]
        if until and not typed and any(until.search(line.text) for line in lines):
            os.write(terminal, b"\x03") if act is None else act()
            typed = True
        if at > DEADLINE_S:
            raise TimeoutError(
                f"{command} did not end within {DEADLINE_S:.0f} s:\n" + "\n".join(line.text for line in lines)
            )
    if rest.strip():
        lines.append(Line(time.monotonic() - began, rest.decode(errors="replace").rstrip("\r")))
    os.close(terminal)
    os.waitpid(pid, 0)
    return lines, time.monotonic() - began


def photograph(
    command: str, size: tuple[int, int], cwd: Path, env: Mapping[str, str], when: re.Pattern[str], end: str
) -> Shot:
    """Run a shell command in a terminal of (columns, rows); returns its screen as it is when that matches `when`.

    Then the key `end` is pressed. Raises TimeoutError with the screen when that does not match.
    """
    pid, terminal = _start(command, size, cwd, env)
    began, received, shot = time.monotonic(), b"", None
    lines: list[str] = []
    while chunk := _read(terminal):
        received += chunk
        lines = screen(received.decode(errors="replace"))
        if shot is None and when.search(CODE.sub("", "\n".join(lines))):
            shot = Shot(command, lines)
            os.write(terminal, end.encode())
        if time.monotonic() > began + DEADLINE_S:
            break
    os.close(terminal)
    os.waitpid(pid, 0)
    if shot is None:
        raise TimeoutError(f"{command} did not show {when.pattern} within {DEADLINE_S:.0f} s:\n" + "\n".join(lines))
    return shot


def screen(received: str) -> list[str]:
    """The lines of a terminal that has received this text, with their colours.

    Good enough for rich: it moves the cursor up by lines, home, and to the start of a line, and draws whole lines.
    """
    lines, row, returned = [""], 0, False
    for part in filter(None, CONTROL.split(received.replace("\r\n", "\n"))):
        move = MOVE.fullmatch(part)
        if part == "\n":
            row, returned = row + 1, False
            lines += [""] * (row == len(lines))
        elif part == "\r":
            returned = True
        elif move is None:
            lines[row] = part if returned else lines[row] + part
            returned = False
        elif move[2] == "A":
            row = max(0, row - int(move[1] or 1))
        elif move[2] == "K":
            lines[row] = ""
        elif move[2] == "H":
            lines, row = [""], 0
    return lines


VOLATILE = (  # what differs each time: hosts, jobs and times of the local names; paths; every number; bars and rules
    (re.compile(r"local-\d[\w-]*"), "JOB"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{10}\b"), "COMMIT"),
    (re.compile(rf"\b(?:vm|{re.escape(socket.gethostname().partition('.')[0])})\b"), "HOST"),
    (re.compile(r"\b(?:on|host) (?:vm|n\d|[\w.-]*\d[\w.-]*)(?=[ :,]|$)"), "on HOST"),
    (re.compile(r"(?:/[\w.+@-]+){2,}/?"), "PATH"),
    (re.compile(r"\d+(?:[.,:-]\d+)*(?:e[-+]?\d+)?[a-z]?\b%?"), "0"),
    (re.compile(r"[━─╸╺█▏▎▍▌▋▊▉]+|-{3,}"), "-"),
    (re.compile(r"\s+"), " "),
    # What may be left out: by a narrow screen, where nothing took that long, where nobody had to wait.
    (re.compile(r"(?<=step 0/0 epoch 0) .*|(?<=^time) .*|.* has ended$"), ""),
    (re.compile(r".* still waiting after .*|^\[laststep\] \S+: (re)?queued: .*"), ""),
)


def normalised(text: str, columns: int = 80) -> list[str]:
    """The lines of an output without what differs each time, neighbours that are then equal once.

    Messages that were wrapped at a terminal's width are whole again.
    """
    lines: list[str] = []
    for line in unwrapped(CODE.sub("", text).splitlines(), columns):
        for pattern, word in VOLATILE:
            line = pattern.sub(word, line)
        if line.strip() and line.strip() not in lines[-1:]:
            lines.append(line.strip())
    return lines


def unwrapped(lines: list[str], columns: int) -> list[str]:
    """A line that follows one of Laststep's messages, and whose first word had no room on it, belongs to that."""
    whole: list[str] = []
    before, ours = "", False
    for line in map(str.rstrip, lines):
        new = not line or line.startswith(("[laststep", "...", "$ "))
        if ours and not new and len(before) <= columns <= len(before) + len(line.partition(" ")[0]):
            whole[-1] += f" {line}"
        else:
            ours = line.startswith("[laststep")
            whole.append(line)
        before = line
    return whole


def _start(command: str, size: tuple[int, int], cwd: Path, env: Mapping[str, str]) -> tuple[int, int]:
    """The pid of a shell command, and the terminal of (columns, rows) that it runs in."""
    columns, rows = size
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(cwd)
        words = ["bash", "-c", command]
        os.execvpe(words[0], words, {**env, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)})
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return pid, terminal


def _read(terminal: int) -> bytes:
    """The next bytes; none once the command has ended. Raises TimeoutError when nothing is printed for too long."""
    if not select.select([terminal], [], [], DEADLINE_S)[0]:
        raise TimeoutError(f"no output for {DEADLINE_S:.0f} s")
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the command has ended
        return b""
