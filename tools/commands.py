"""Writes docs/commands.md, which shows the help of every command. What several of them take stands there once.

Run `python -m tools.commands` after changing a command; tests/test_docs.py fails until you do.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from unittest import mock

from laststep.cli import rank
from laststep.cli.verbs import VERBS

TARGET = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEAD = """\
# Commands

`laststep VERB`, where Laststep is installed, and `python launch.py VERB`, in a clone, are the same program.

Exit status: 0 done; 1 the run failed; 2 the command or configuration is wrong (one line names the problem and the
nearest valid name); 130 stopped by Ctrl-C, 143 by SIGTERM.

## What several verbs take

SIZE is `--nodes`, `--gpus-per-node`, `--tasks-per-node`, `--partition` and `--time`. A verb about runs also takes
`launch.root=FOLDER`. The first line of a verb leaves out the options that are explained below it.

{shared}
"""
Entry = tuple[str, str]  # an option or argument, and its explanation
ENTRY = re.compile(r"^  ([-\w]\S*(?: [A-Z]\S*)*)  +(.*\n(?:      +.*\n)*)", re.MULTILINE)
ANYWHERE = re.DOTALL | re.MULTILINE
SIZE = r"\[--nodes N\|MIN-MAX\]\s+\[--gpus-per-node G\]\s+\[--tasks-per-node T\]\s+\[--partition P\]\s+\[--time TIME\]"
INDENT = 22  # columns before an explanation
RANKS = """\
## python -m laststep

Under any launcher: see [Other launchers](launchers.md).
"""


HELLO = """\
## python -m laststep hello
"""


def page() -> str:
    """The whole page."""
    texts = {**{name: _help(verb.run) for name, verb in VERBS.items()}, "rank": _help(rank.main)}
    texts["hello"] = _help(rank.hello)
    shared = _shared(texts.values())
    blocks = {name: _block(text, shared) for name, text in texts.items()}
    head = HEAD.format(shared=_columns(shared))
    verbs = [f"## {name}\n\n{blocks[name]}" for name in VERBS]
    return "\n".join([head, *verbs, RANKS, blocks["rank"], HELLO, blocks["hello"]])


def _shared(texts: Iterable[str]) -> list[Entry]:
    """The options and arguments that several commands explain in the same words."""
    times = Counter(entry for text in texts for entry in dict.fromkeys(map(_entry, ENTRY.finditer(text))))
    return [entry for entry, count in times.items() if count > 1]


def _entry(found: re.Match[str]) -> Entry:
    return found[1], " ".join(found[2].split())


def _columns(entries: Iterable[Entry]) -> str:
    """Options and arguments, each beside its explanation."""
    lines = []
    for name, text in entries:
        first, *more = textwrap.wrap(text, 80 - INDENT, break_on_hyphens=False)
        lines += [f"  {name:{INDENT - 2}}{first}", *(" " * INDENT + line for line in more)]
    return textwrap.indent("\n".join(lines), "  ")


def _block(text: str, shared: Container[Entry]) -> str:
    """A command's help as a block of text, without what the page has elsewhere."""
    text = ENTRY.sub(lambda found: "" if _entry(found) in shared else found[0], text)
    text = re.sub(r"^verbs \(default.*?\n\n", "", text, flags=ANYWHERE)
    text = re.sub(r"^Start it (?:under|the way).*?(?=^\S)", "", text, flags=ANYWHERE)  # see launchers.md
    text = re.sub(r"^Of keys, .*prints them all.*\n?", "", text, flags=re.MULTILINE)  # configuration.md
    text = re.sub(r"^Exit status: 0 done.*?(?=\n\n|\Z)", "", text, flags=ANYWHERE)
    text = re.sub(r"^(?:positional arguments|options):\n\n?", "", text, flags=re.MULTILINE)
    text = re.sub(SIZE, "[SIZE ...]", text).replace(" [launch.root=FOLDER ...]", "")
    usage, _, rest = text.removeprefix("usage: ").partition("\n\n")
    explained = [option.rstrip(",") for option in re.findall(r"^  (-[-\w]+(?: [^-\s]\S*)?)", rest, re.MULTILINE)]
    return textwrap.indent(f"{_short(usage.replace(' [-h]', ''), explained)}\n\n{rest.rstrip()}\n", "    ")


def _short(usage: str, explained: Iterable[str]) -> str:
    """A usage without these options, in lines of 76 columns that break between brackets."""
    for option in explained:
        usage = re.sub(rf"\s+\[{re.escape(option)}\]", "", usage)
    words = re.sub(
        r"\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)?\]", lambda found: found[0].replace(" ", "\0"), " ".join(usage.split())
    )
    return textwrap.fill(words, 76, subsequent_indent=" " * 10, break_on_hyphens=False).replace("\0", " ")


def _help(program: Callable[[Sequence[str]], int]) -> str:
    """What a program prints for --help in a terminal of 80 columns, without the line about --help itself."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}),
        mock.patch.object(sys, "argv", ["laststep"]),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        program(["--help"])
    return re.sub(r"^  -h, --help .*\n(?:    .*\n)*", "", said.getvalue() + "\n", flags=re.MULTILINE)


if __name__ == "__main__":
    TARGET.write_text(page())
