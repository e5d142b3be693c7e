"""completion: what the Tab key makes of a half-typed command, in bash and zsh.

`completion bash` prints completion.bash, to be sourced. At each Tab it runs `launch.py __complete LINE`, with what
stands between launch.py and the cursor.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.commands.parsers import ANY_KEY, LAUNCH_KEY, PARSERS, ROOT_KEY
from trainer.config.config import CONFIGS, Config
from trainer.config.keys import fields_of

FILES = ":files"  # printed where nothing but a path fits: those the shell knows best
KEYS = {ANY_KEY: "", LAUNCH_KEY: "launch.", ROOT_KEY: "launch.root", "RUN": "launch.root"}
PATHS = ("data.root", "launch.root")


def script(shell: str) -> int:
    """Print what the shell is to source; returns the exit status."""
    print(f"_laststep_python={shlex.quote(sys.executable)}")
    print(Path(__file__).with_suffix(f".{shell}").read_text(), end="")
    return 0


def complete(line: str) -> int:
    """Print what the last word of the line may become, one a line; returns the exit status."""
    *before, word = _split(line)
    candidates = dict.fromkeys(_candidates(before, word))
    found = [candidate for candidate in candidates if candidate.startswith(word) and candidate != FILES]
    for candidate in found or [FILES] * (FILES in candidates):
        print(candidate)
    return 0


def _split(line: str) -> list[str]:
    """The words of a line as the shell would see them, the last of which is the one under the cursor."""
    for end in ("x", "x'", 'x"'):  # x makes it one even where nothing is typed of it yet; a quote may be open
        try:
            *before, last = shlex.split(line + end)
        except ValueError:
            continue
        return [*before, last[:-1]]
    return [""]


def _candidates(before: Sequence[str], word: str) -> Iterator[str]:
    verb = "submit"
    if before and before[0] in PARSERS:
        verb, *before = before
    elif not before:
        yield from PARSERS
    parser = PARSERS[verb]()
    options = parser.options()
    name, equals, _ = word.partition("=")
    if before and _takes_value(options.get(before[-1])):
        yield from _of_option(options[before[-1]])
    elif equals:
        values = _of_option(options[name]) if name in options else _of_key(name)
        yield from (value if value == FILES else f"{name}={value}" for value in values)
    elif word.startswith("-"):
        yield from options
    else:
        named = any(_names(before, options))
        for action in parser.positionals():
            yield from action.choices or ()
            if action.dest == "words" or (action.dest == "run" and not named):
                yield from _runs(before)
                yield FILES
            if action.metavar in KEYS:
                yield from _keys(KEYS[str(action.metavar)], word)


def _takes_value(option: Action | None) -> bool:
    return option is not None and option.nargs != 0


def _names(words: Sequence[str], options: Mapping[str, Action]) -> Iterator[str]:
    """Those of the words that are neither options, nor values of them, nor key=value."""
    for previous, word in zip(("", *words), words):
        if not (word.startswith("-") or "=" in word or _takes_value(options.get(previous))):
            yield word


def _of_option(option: Action) -> Iterator[str]:
    if option.dest in ("config", "site"):
        folder = CONFIGS if option.dest == "config" else CONFIGS / "site"
        yield from (path.stem for path in folder.glob("*.yaml"))
        yield FILES


def _runs(words: Sequence[str]) -> Iterator[str]:
    from trainer.cluster import run_folders

    root = run_folders.root_of([word for word in words if word.startswith("launch.root=")])
    yield from (run.name for run in run_folders.in_root(root))


def _keys(prefix: str, word: str) -> Iterator[str]:
    """Keys that begin with the prefix, each up to its next dot: the way goes on from there with another Tab."""
    for key, field, _ in fields_of(Config):
        if key.startswith(prefix):
            section = key.find(".", max(len(prefix), len(word))) + 1
            is_open = str(field.type).startswith("dict")
            yield key[:section] if section else key + ("." if is_open else "=")


def _of_key(key: str) -> Iterator[str]:
    field = next((field for known, field, _ in fields_of(Config) if known == key), None)
    if field is not None:
        yield from field.metadata["choices"]
        if field.type == "bool":
            yield from ("true", "false")
    if key == "data.name":
        from trainer.data.catalog import DATASETS

        yield from DATASETS
    if key == "model.name":
        from trainer.tasks.models import model_names

        yield from model_names()
    if key in PATHS:
        yield FILES
