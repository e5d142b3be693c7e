"""completion: let the Tab key of bash and zsh complete a half-typed command.

`completion bash` prints completion.bash, to be sourced. At each Tab that script runs `laststep __complete LINE` or
`launch.py __complete LINE`, whichever was typed; LINE is the text from there to the cursor.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from laststep import compat
from laststep.cli.parsers import ANY_KEY, LAUNCH_KEY, PATH_KEYS, ROOT_KEY, Parser
from laststep.cli.verbs import DEFAULT, VERBS
from laststep.config.config import Config, config_names
from laststep.config.keys import fields_of

FILES = ":files"  # printed where only a path fits: the shell completes paths itself
# The placeholder of an argument -> how the keys begin that it takes.
KEYS = {ANY_KEY: "", LAUNCH_KEY: "launch.", ROOT_KEY: "launch.root", "RUN": "launch.root"}
DESCRIPTION = """\
Print a script that lets the Tab key complete verbs, options, runs,
configurations, keys and values."""
EPILOG = "For example, in ~/.bashrc:\n  source <({path} completion bash)"


def add_arguments(parser: Parser) -> None:
    """Declare what completion takes."""
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(args: argparse.Namespace) -> int:
    """Print the script that the shell is to source; returns the exit status."""
    print(f"_laststep_python={shlex.quote(sys.executable)}")
    print(Path(__file__).with_suffix(f".{args.shell}").read_text(), end="")
    return 0


def complete(line: str) -> int:
    """Print the completions of the line's last word, one per line; returns the exit status."""
    *before, word = _split(line)
    candidates = dict.fromkeys(_candidates(before, word))
    found = [candidate for candidate in candidates if candidate.startswith(word) and candidate != FILES]
    for candidate in found or [FILES] * (FILES in candidates):
        print(candidate)
    return 0


def _split(line: str) -> list[str]:
    """The words of a line as the shell would split them; the last one is the word under the cursor."""
    for end in ("x", "x'", 'x"'):  # x: the last word may still be empty; the quotes: one may be open
        try:
            *before, last = shlex.split(line + end)
        except ValueError:
            continue
        return [*before, last[:-1]]
    return [""]


def _candidates(before: Sequence[str], word: str) -> Iterator[str]:
    verb = DEFAULT
    if before and before[0] in VERBS:
        verb, *before = before
    elif not before:
        yield from VERBS
    parser = VERBS[verb].parser()
    options = compat.options_of(parser)
    name, equals, value = word.partition("=")
    if before and _takes_value(options.get(before[-1])):
        yield from _option_values(options[before[-1]], word)
    elif equals:
        values = _option_values(options[name], value) if name in options else _key_values(name)
        yield from (value if value == FILES else f"{name}={value}" for value in values)
    elif word.startswith("-"):
        yield from options
    else:
        has_run = any(_names(before, options))
        for action in compat.positionals_of(parser):
            yield from action.choices or ()
            if action.metavar == "VERB":
                yield from VERBS
            if action.dest == "words" or (action.dest == "run" and not has_run):
                yield from _runs(before)
                yield FILES
            if action.dest == "out" or action.metavar == "DIR":
                yield FILES
            if action.metavar in KEYS:
                yield from _keys(KEYS[str(action.metavar)], word)


def _takes_value(option: Action | None) -> bool:
    return option is not None and option.nargs != 0


def _names(words: Sequence[str], options: Mapping[str, Action]) -> Iterator[str]:
    """The words that are neither options, nor values of options, nor key=value."""
    for previous, word in zip(("", *words), words):
        if not (word.startswith("-") or "=" in word or _takes_value(options.get(previous))):
            yield word


def _option_values(option: Action, word: str) -> Iterator[str]:
    """The values of an option; `word` is what is typed of one."""
    if option.dest in ("config", "site"):
        yield from config_names(of_site=option.dest == "site")
        yield FILES
    if option.dest == "source":
        yield from _runs(())
    if option.dest == "state":
        from laststep.runs.run_status import STATES

        listed = word[: word.rfind(",") + 1]
        yield from (listed + state for state in STATES if state not in listed.split(","))
    if option.metavar == "FILE":
        yield FILES


def _runs(words: Sequence[str]) -> Iterator[str]:
    from laststep.runs import run_folders

    root = run_folders.root_among(words)
    yield from (run.name for run in run_folders.all_runs(root))


def _keys(prefix: str, word: str) -> Iterator[str]:
    """The keys that begin with the prefix, each up to its next dot: another Tab continues from there."""
    for key, field, _ in fields_of(Config):
        if key.startswith(prefix):
            section = key.find(".", max(len(prefix), len(word))) + 1
            is_open = str(field.type).startswith("dict")
            yield key[:section] if section else key + ("." if is_open else "=")


def _key_values(key: str) -> Iterator[str]:
    field = next((field for known, field, _ in fields_of(Config) if known == key), None)
    if field is not None:
        yield from field.metadata["choices"]
        if field.type == "bool":
            yield from ("true", "false")
    if key == "data.name":
        from laststep.data.catalog import DATASETS

        yield from DATASETS
    if key == "model.name":
        from laststep.tasks.models import model_names

        yield from model_names()
    if key == "optim.name":
        from laststep.optim.names import optimizer_names

        yield from optimizer_names()
    if key in PATH_KEYS:
        yield FILES
