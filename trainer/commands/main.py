"""The command line: runs the verb that was typed and turns what goes wrong into an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from trainer.commands.verbs import DEFAULT, VERBS
from trainer.config.errors import ConfigError, nearest
from trainer.say import command


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    # The ranks find a user's own Task in the folder where the command was typed, so look for it there too.
    sys.path.append(os.getcwd())
    verb = DEFAULT
    try:
        if words and not words[0].startswith("-") and "=" not in words[0]:
            verb, *words = words
        if verb == "__complete":  # typed by the Tab key, see trainer.commands.completion
            from trainer.commands import completion

            return completion.complete(" ".join(words))
        if verb not in VERBS:
            if words and words[0] in VERBS:
                raise ConfigError(f"{verb}: no such verb; the verb comes first: `{command(f'{words[0]} {verb}')}`")
            raise ConfigError(f"{verb}: no such verb; {nearest(verb, list(VERBS))}")
        return VERBS[verb].run(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {verb} needs torch, which {sys.executable} lacks: use the Python of the ranks", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `launch.py logs RUN | head` is no error; the flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
