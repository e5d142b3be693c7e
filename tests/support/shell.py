"""A shell in a terminal, into which a test types one line after the other."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import DEADLINE_S

PROMPT = re.compile(r"<exit (\d+)> $")
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
CTRL_C = b"\x03"


class Shell:
    """A fresh bash in a terminal of 140 columns: it reads no startup file and has no variables but `env`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        pid, self._terminal = pty.fork()
        if not pid:
            os.chdir(folder)
            quiet = {"PS1": "<exit $?> ", "HISTFILE": "/dev/null", "TERM": "xterm", "COLUMNS": "140"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], {**env, **quiet})
        self._pid = pid
        self._said = ""
        self._wait_for(PROMPT)

    def types(self, line: str, interrupt_at: str | None = None) -> tuple[str, int]:
        """Type a line; returns what it printed, without colours, and its exit status. Once it has printed a match of
        `interrupt_at`, Ctrl-C is typed."""
        self._said = ""
        os.write(self._terminal, f"{line}\n".encode())
        if interrupt_at:
            self._wait_for(re.compile(interrupt_at, re.DOTALL))
            os.write(self._terminal, CTRL_C)
        status = self._wait_for(PROMPT)[1]
        return PROMPT.sub("", self._said), int(status)

    def close(self) -> None:
        """End the shell, and with it the terminal: what still runs in the foreground gets SIGHUP."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def _wait_for(self, text: re.Pattern[str]) -> re.Match[str]:
        """Read until the output since the last line typed has this text; the test fails at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := text.search(self._said)):
            ready, _, _ = select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text.pattern!r} within {DEADLINE_S:.0f} s:\n{self._said}"
            chunk = os.read(self._terminal, 65536).decode(errors="replace").replace("\r\n", "\n")
            self._said = COLOURS.sub("", self._said + chunk)
        return found
