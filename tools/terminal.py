"""Draws a command's terminal output as SVG: `python -m tools.terminal PICTURE.svg COLUMNS python launch.py status`."""

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
    """Run the command in a terminal of `columns` characters, and draw it with its output; returns its exit status."""
    os.environ |= {"COLUMNS": columns, "LINES": "50", "TERM": "xterm-256color"}
    pid, terminal = pty.fork()
    if not pid:
        os.execvp(command[0], command)
    output = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while chunk := os.read(terminal, 4096):
            output += chunk
    _, status = os.waitpid(pid, 0)
    console = Console(record=True, width=int(columns), file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}"))
    console.print(Text.from_ansi(output.decode(errors="replace").replace("\r", "")))
    svg = console.export_svg(title="Laststep")
    # Do not load fonts from the network; a viewer without these fonts uses its own.
    Path(picture).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
