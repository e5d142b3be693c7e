"""The command line: runs the verb that was typed and turns what goes wrong into an exit status."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from laststep import script
from laststep.cli.parsers import PATH_KEYS
from laststep.cli.verbs import DEFAULT, VERBS
from laststep.config.errors import ConfigError, nearest
from laststep.ranks.fault import ONE_LINE
from laststep.records import former_names
from laststep.say import command, note

NEEDED = ("omegaconf", "submitit", "cloudpickle", "rich", "yaml")  # every environment that has Laststep has these


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    words = _in_project(words)
    # The ranks find a user's own Task in the project's folder, so look for it there too.
    sys.path.append(os.getcwd())
    if former_names.IN_CLONE:
        former_names.resolve()
    verb = DEFAULT
    try:
        if words and not words[0].startswith("-") and "=" not in words[0] and not words[0].endswith(".py"):
            verb, *words = words
        if verb == "__complete":  # typed by the Tab key, see laststep.cli.completion
            from laststep.cli import completion

            return completion.complete(" ".join(words))
        if verb not in VERBS:
            if words and words[0] in VERBS:
                raise ConfigError(f"{verb}: no such verb; the verb comes first: `{command(f'{words[0]} {verb}')}`")
            if not _is_run(verb, words):
                raise ConfigError(f"{verb}: no such verb, and no such run; {nearest(verb, list(VERBS))}")
            verb, words = "status", [verb, *words]  # `laststep RUN` shows that run
        return VERBS[verb].run(words)
    except ONE_LINE as error:
        note(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in (*NEEDED, "torch"):
            raise
        fix = _environment() if name in NEEDED else "use the Python of the ranks"
        note(f"error: {verb} needs {name}, which {sys.executable} lacks: {fix}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `launch.py logs RUN | head` is no error; the flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _is_run(name: str, words: Sequence[str]) -> bool:
    """Whether a word that is no verb names a run."""
    from laststep.runs import run_folders

    try:
        run_folders.find_run(name, run_folders.root_among(words))
    except ConfigError:
        return False
    return True


def _in_project(words: Sequence[str]) -> Sequence[str]:
    """Change to the folder of the project that this folder is in, as git does; returns the words, in which paths that
    were typed relative to this folder are relative to that one.

    The configuration, `runs/`, the task's module and relative paths in the configuration are the project's, wherever
    in it the command is typed.
    """
    if words[:1] in (["init"], ["prepare"], ["completion"]):  # these make files here
        return words
    own, scripts = script.split(words)
    if scripts and (words[0] not in VERBS or words[0] in ("submit", "prove", "sweep")):
        return words  # a script runs where it was typed, as under torchrun: its own words may be paths
    here = Path.cwd()
    project = find_project(here)
    if project is None or project == here:
        return words
    os.chdir(project)
    if words[:1] != ["__complete"]:
        note(f"[laststep] project {project}")
    return [*(_from_project(word, here, project) for word in own), *words[len(own) :]]


def find_project(here: Path) -> Path | None:
    """The nearest folder that has a configs/ with YAML files: this one or one above it, as git finds its repository.

    A folder above must be the user's own: another user may write into /tmp, and would choose what trains.
    """
    for folder in (here, *here.parents):
        configs = folder / "configs"
        with contextlib.suppress(OSError):
            if any(configs.glob("*.yaml")) and (folder == here or configs.stat().st_uid == os.geteuid()):
                return folder
    return None


def _from_project(word: str, here: Path, project: Path) -> str:
    """A word in which a path relative to `here` has become one relative to the project; any other word as it is."""
    key, equals, path = word.rpartition("=")
    names_path = key in PATH_KEYS or "." in path or "/" in path  # another word may be the name of a run
    if not path or path.startswith(("-", "/", "~")) or not names_path:
        return word
    dotted = path.split("/")[0] in (".", "..")
    if dotted or ((here / path).exists() and not (project / path).exists()):
        return f"{key}{equals}{os.path.relpath(here / path, project)}"
    return word


def _environment() -> str:
    """What to type instead, where Laststep's environment is not active."""
    project = Path(__file__).parent.parent.parent
    for folder in (Path(), project):
        python = folder / ".venv" / "bin" / "python"
        if python.exists():
            return f"type `{shlex.join([os.path.relpath(python), *sys.argv])}`"
    return f"activate the environment that has Laststep, or install it: `python3 -m pip install {project}`"
