"""The command line: runs the verb that was typed and turns what goes wrong into an exit status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from laststep.cli.verbs import DEFAULT, VERBS
from laststep.config.errors import ConfigError, DiskError, nearest
from laststep.records import former_names
from laststep.say import command

NEEDED = ("omegaconf", "submitit", "cloudpickle", "rich", "yaml")  # every environment that has Laststep has these


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    # The ranks find a user's own Task in the folder where the command was typed, so look for it there too.
    sys.path.append(os.getcwd())
    if former_names.IN_CLONE:
        former_names.resolve()
    verb = DEFAULT
    try:
        if words and not words[0].startswith("-") and "=" not in words[0]:
            verb, *words = words
        if verb == "__complete":  # typed by the Tab key, see laststep.cli.completion
            from laststep.cli import completion

            return completion.complete(" ".join(words))
        if verb not in VERBS:
            if words and words[0] in VERBS:
                raise ConfigError(f"{verb}: no such verb; the verb comes first: `{command(f'{words[0]} {verb}')}`")
            raise ConfigError(f"{verb}: no such verb; {nearest(verb, list(VERBS))}")
        return VERBS[verb].run(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DiskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in (*NEEDED, "torch"):
            raise
        fix = _environment() if name in NEEDED else "use the Python of the ranks"
        print(f"error: {verb} needs {name}, which {sys.executable} lacks: {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `launch.py logs RUN | head` is no error; the flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _environment() -> str:
    """What to type instead, where Laststep's environment is not active."""
    project = Path(__file__).parent.parent.parent
    for folder in (Path(), project):
        python = folder / ".venv" / "bin" / "python"
        if python.exists():
            return f"type `{shlex.join([os.path.relpath(python), *sys.argv])}`"
    return f"activate the environment that has Laststep, or install it: `python3 -m pip install {project}`"
