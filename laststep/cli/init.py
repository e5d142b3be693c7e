"""init: write a small project that trains as it is: a task, a configuration, a site profile, a README."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from laststep.cli.parsers import Parser
from laststep.config.errors import ConfigError
from laststep.say import command

TEMPLATE = Path(__file__).parent / "project"
FILES = ("README.md", "digits.py", "configs/default.yaml", "configs/site/example.yaml", ".gitignore")

DESCRIPTION = """\
Write a small project that trains as it is: a task, its configuration, a profile
of your cluster and a README. No existing file is changed."""


def add_arguments(parser: Parser) -> None:
    """Declare what init takes."""
    parser.add_argument("folder", nargs="?", default=".", metavar="DIR", help="where to write it (default: here)")


def run(args: argparse.Namespace) -> int:
    """Write the project and print the next commands; returns the exit status."""
    folder = Path(os.path.expanduser(args.folder))
    for path in _write(folder):
        print(f"wrote  {path}")
    if elsewhere := folder.resolve() != Path.cwd():
        print(f"next   cd {shlex.quote(str(folder))}")
    print(f"next   {command('--local', elsewhere)}")
    return 0


def _write(folder: Path) -> list[Path]:
    """Copy every file of the template, or none; returns the copies. Raises ConfigError."""
    copies = {folder / name: TEMPLATE / name for name in FILES}
    written: list[Path] = []
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: is not a folder")
        for path in copies:
            if path.exists() or path.is_symlink():
                raise ConfigError(f"{path}: exists already; name another folder")
        for path, source in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                written.append(path)
                file.write(source.read_bytes())
    except OSError as error:
        for path in written:
            path.unlink()
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return written
