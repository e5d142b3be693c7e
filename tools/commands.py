"""Writes docs/commands.md, which shows the help of every command.

Run `python -m tools.commands` after changing a command; tests/test_docs.py fails until you do.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from laststep.cli import hello, rank
from laststep.cli.verbs import VERBS

TARGET = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEAD = """\
# Commands

`laststep VERB`, where Laststep is installed, and `python launch.py VERB`, in a clone, are the same program.

| verb | what it does |
| --- | --- |
{verbs}

Exit status: 0 done; 1 the run failed; 2 the command or configuration is wrong (one line names the problem and the
nearest valid name); 130 stopped by Ctrl-C, 143 by SIGTERM.

`python -m tools.commands` writes this page from the commands' help.
"""
RANKS = """\
## python -m laststep

Under any launcher: see [Other launchers](launchers.md).
"""


def page() -> str:
    """The whole page."""
    rows = "\n".join(f"| [`{verb.usage}`](#{name}) | {verb.help} |" for name, verb in VERBS.items())
    verbs = [f"## {name}\n\n{_help(verb.run)}" for name, verb in VERBS.items()]
    return "\n".join([HEAD.format(verbs=rows), *verbs, RANKS, _help(rank.main), _help(hello.main)])


def _help(program: Callable[[Sequence[str]], int]) -> str:
    """What a program prints for --help in a terminal of 80 columns, as a block of text."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}),
        mock.patch.object(sys, "argv", ["laststep"]),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        program(["--help"])
    return f"```text\n{said.getvalue().rstrip()}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(page())
