"""The command line: reads the words, calls one function per verb."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from trainer.commands.parsers import NAMED, NO_RUN, PARSERS, SHORTHANDS, SIZE, split
from trainer.config.errors import ConfigError, nearest


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    verbs: dict[str, Callable[[Namespace], int]] = {
        "submit": _submit,
        "sweep": _sweep,
        "resume": _resume,
        "status": _status,
        "logs": _logs,
        "cancel": _cancel,
        "drill": _drill,
        "verify": _verify,
        "report": _report,
        "doctor": _doctor,
        "completion": _completion,
    }
    # Where the command is typed is where the ranks look for a user's own Task, so look there too.
    sys.path.append(os.getcwd())
    verb = "submit"
    try:
        if words and not words[0].startswith("-") and "=" not in words[0]:
            verb, *words = words
        if verb == "__complete":  # by the Tab key, see completion
            from trainer.commands import completion

            return completion.complete(" ".join(words))
        if verb not in verbs:
            raise ConfigError(f"{verb}: no such verb; {nearest(verb, list(verbs))}")
        return verbs[verb](PARSERS[verb]().parse_intermixed_args(words))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {verb} needs torch, which {sys.executable} lacks: type it where the ranks run", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `launch.py logs RUN | head`: nobody reads on, and nobody must be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


# Each verb's module is imported when it is called: the others would only take time.


def _submit(given: Namespace) -> int:
    from trainer.commands import submit

    return submit.submit(given.config, _overrides(given, NAMED), given.site, submit.Way.of(given))


def _sweep(given: Namespace) -> int:
    from trainer.commands import sweep

    return sweep.sweep(given.config, _overrides(given, NAMED), given.site, given.parallel)


def _resume(given: Namespace) -> int:
    from trainer.commands import submit

    return submit.resume(given.run, _overrides(given, SHORTHANDS), submit.Way.of(given))


def _status(given: Namespace) -> int:
    from trainer.commands import status

    names, overrides = split(given.words)
    if given.sweep is None:
        if given.by is not None:
            raise ConfigError(f"--by {given.by}: ranks the runs of a sweep; give --sweep NAME too")
        return status.status(names, overrides, given.json, given.watch)
    if names:
        raise ConfigError(f"{names[0]}: name a sweep or runs, not both")
    return status.status_of_sweep(given.sweep, given.by or "val_loss", overrides, given.json, given.watch)


def _logs(given: Namespace) -> int:
    from trainer.commands import logs

    return logs.logs(given.run, given.overrides, given.rank, given.attempt, given.follow)


def _cancel(given: Namespace) -> int:
    from trainer.commands import cancel

    return cancel.cancel(given.run, given.overrides)


def _drill(given: Namespace) -> int:
    from trainer.commands import drill

    return drill.drill(given.run, given.overrides)


def _verify(given: Namespace) -> int:
    from trainer.commands import verify

    return verify.verify(given.run, given.overrides, given.json)


def _report(given: Namespace) -> int:
    from trainer.commands import report

    names, overrides = split(given.words)
    if not names:
        raise ConfigError(NO_RUN)
    return report.report(names, overrides)


def _doctor(given: Namespace) -> int:
    from trainer.commands import doctor

    ask = doctor.doctor if given.nodes is None else doctor.hello
    return ask(_overrides(given, SIZE))


def _completion(given: Namespace) -> int:
    from trainer.commands import completion

    return completion.script(given.shell)


def _overrides(given: Namespace, shorthands: dict[str, tuple[str, str, str]]) -> list[str]:
    """key=value words, those of the options last: an option that is typed wins."""
    values = {key: getattr(given, option[2:].replace("-", "_")) for option, (key, _, _) in shorthands.items()}
    return [*given.overrides, *(f"{key}={value}" for key, value in values.items() if value is not None)]
