"""What Laststep prints about itself: lines in a rank's log, and the commands that its messages name."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

COMMAND = "LASTSTEP_COMMAND"  # the variable through which ranks learn how the command was typed


def say(text: str) -> None:
    """Print one line with our mark and the time; the verb `logs` puts the lines of all ranks in order by it.

    A failed write, for example to a full disk, is ignored: it is no reason to end the training.
    """
    with contextlib.suppress(OSError):
        line = f"[laststep {time.strftime('%H:%M:%S')}] {text.strip()}"
        # A program may have put anything in their place; mpirun gives its ranks a terminal that nobody sees.
        if all(getattr(stream, "isatty", bool)() for stream in (sys.stdin, sys.stdout)):
            line = wrapped(line, shutil.get_terminal_size().columns)
        # A single write, unlike print's two: else a line from another thread could end up in the middle of this one.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def note(text: str, stream: TextIO | None = None, indent: int = 0) -> None:
    """Print a line of the command itself, on stderr if no `stream` is given. On a terminal it is wrapped between words,
    each further line with this indent, in spaces."""
    stream = stream or sys.stderr
    if stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns, indent)
    print(text, file=stream, flush=True)


def wrapped(text: str, columns: int, indent: int = 0) -> str:
    """The text in lines of at most `columns`, all but the first with this indent. A path that is longer stays
    whole, and so does a `quoted command`, to be copied."""
    import textwrap  # here: most commands print no long line

    wrap = textwrap.TextWrapper(columns, subsequent_indent=indent * " ", break_long_words=False, break_on_hyphens=False)
    text = re.sub(r"`[^`]*`", lambda quoted: quoted[0].replace(" ", "\0"), text)
    return "\n".join(wrap.fill(line) for line in text.split("\n")).replace("\0", " ")


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of these names, and how many there are beyond them: `a, b, c and 2 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def counted(number: object, noun: str) -> str:
    """A number with its noun: `1 rank`, `2 ranks`, `1-4 nodes`."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


def flush_output() -> None:
    """Flush stdout and stderr, before the process ends without Python's own cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # somebody has closed or replaced it
            stream.flush()


def program() -> str:
    """This program's name, as usage lines show it: `laststep` or `launch.py`."""
    return os.path.basename(shlex.split(command())[-1])


def command(words: str = "", elsewhere: bool = False) -> str:
    """What to type to run Laststep with these words, the way the user started it: `laststep status first`; `elsewhere`:
    in another folder."""
    path = os.path.abspath(sys.argv[0]) if elsewhere and os.path.exists(sys.argv[0]) else sys.argv[0]
    if os.path.basename(path) == "launch.py":
        typed = f"{_python()} {shlex.quote(os.path.normpath(path))}"
    elif os.path.basename(path) == "laststep" and not os.path.isdir(path):
        typed = "laststep" if shutil.which("laststep") == path else shlex.quote(path)
    elif COMMAND in os.environ:  # a rank
        typed = os.environ[COMMAND]
    else:  # a program of the user's, or a rank under another launcher
        in_clone = (Path(__file__).parent.parent / "launch.py").exists()
        typed = "python launch.py" if in_clone else "laststep"
    return f"{typed} {words}".rstrip()


def _python() -> str:
    """What to type to start this Python: `python` where that is this one, else what the user typed."""
    found = shutil.which("python")
    is_this = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "python" if is_this else shlex.quote(sys.orig_argv[0])
