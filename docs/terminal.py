"""Draws what a command prints on a terminal: `python -m docs.terminal PICTURE.svg COLUMNS python launch.py status`."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(picture: str, columns: str, *command: str) -> int:
    """Run the command on a terminal that wide, and draw it with what it prints; returns its exit status."""
    os.environ |= {"COLUMNS": columns, "LINES": "50", "TERM": "xterm-256color"}
    pid, terminal = pty.fork()
    if not pid:
        os.execvp(command[0], command)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while chunk := os.read(terminal, 4096):
            shown += chunk
    _, status = os.waitpid(pid, 0)
    console = Console(record=True, width=int(columns), file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}"))
    console.print(Text.from_ansi(shown.decode(errors="replace").replace("\r", "")))
    svg = console.export_svg(title="Laststep")
    # Fonts from the network: whoever has none of them sees their own.
    Path(picture).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
