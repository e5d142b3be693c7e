"""A module of the user's that is called `trainer`, like Laststep's package: Python cannot import both."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from laststep import __all__ as public_names
from laststep.config.errors import ConfigError

OURS = Path(__file__).absolute().parent.parent


def check_namesake(task: str, names: Iterable[str]) -> None:
    """Raise ConfigError if the task needs one of these dotted names from the `trainer` in the current folder."""
    theirs = next((path for path in (Path("trainer").absolute(), Path("trainer.py").absolute()) if path.exists()), None)
    if theirs is None or theirs.resolve() == OURS.resolve():
        return
    for name in names:
        package, *inner = name.split(".")
        if package == "trainer" and inner and not _is_ours(inner[0]):
            raise ConfigError(
                f"task={task}: needs {name} from {theirs}, but `trainer` is the name of Laststep's package ({OURS}) "
                "too; rename yours"
            )


def imported(source: ast.Module) -> Iterator[str]:
    """The dotted names that a module's source imports."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_ours(name: str) -> bool:
    return name in public_names or importlib.util.find_spec(f"trainer.{name}") is not None
