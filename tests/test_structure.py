"""How the code hangs together: imports run one way, and torch stays out of the command."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest
from torchvision import models

from laststep.tasks.models import model_names
from tests.support.project import PROJECT

# Lower to higher: a part may import what stands in a line before its own, and parts of its own package.
LAYERS = [
    {"say", "rundir", "compat"},
    {"rooms"},
    {"config"},
    {"script"},
    {"ranks"},
    {"records"},
    {"data", "checkpoint", "optim"},
    {"task"},
    {"tasks"},
    {"loops"},
    {"frameworks"},
    {"attempt"},
    {"trainer"},
    {"runs"},
    {"code"},
    {"job"},
    {"submission"},
    {"doctor", "proof", "replay", "report", "track"},
    {"telemetry"},
    {"alert"},
    {"cli"},
    {"__main__", "__init__"},
    {"launch"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
SOURCES = [PROJECT / "launch.py", *sorted((PROJECT / "laststep").rglob("*.py"))]


def module_of(path: Path) -> str:
    """laststep/ranks/group.py -> laststep.ranks.group"""
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The part of the picture that a module belongs to: laststep.ranks.group -> world."""
    names = module.split(".")
    if module.startswith("laststep.cli.project."):
        return "__init__"  # what init copies: like any user's file, it may import the public names
    return names[1] if len(names) > 1 else {"laststep": "__init__"}.get(module, module)


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, within functions and for type checking too."""
    known = {module_of(source) for source in SOURCES}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                if alias.name in ("__all__", "__version__"):  # they need none of the modules that it names
                    continue
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return found & known


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_run_one_way(path: Path) -> None:
    """A part that reached up could not be used alone, and a cycle breaks at the first reordering of imports."""
    importer = part_of(module_of(path))
    for module in imports_of(path):
        imported = part_of(module)
        same_package = importer == imported
        assert same_package or LAYER_OF[imported] < LAYER_OF[importer], f"{module_of(path)} imports {module}"


def test_frameworks_are_imported_by_name_only() -> None:
    """A user of none of them must neither wait for their imports nor need them installed."""
    packages = re.compile(r"^ *(?:import|from) (?:lightning|transformers|accelerate|ray)\b", re.MULTILINE)
    for path in SOURCES:
        if part_of(module_of(path)) not in ("frameworks", "compat"):
            assert not packages.search(path.read_text()), path
            assert not any(name.startswith("laststep.frameworks.") for name in imports_of(path)), path


def test_no_cycles() -> None:
    """Neither within a part."""
    graph = {module_of(path): imports_of(path) for path in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_files_say_what_they_are_for(path: Path) -> None:
    """The first line is where a newcomer looks."""
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_few_modules_at_the_top() -> None:
    """A newcomer who opens laststep/ must see subjects, not a list of modules."""
    assert len(list((PROJECT / "laststep").glob("*.py"))) <= 9


def test_each_folder_says_what_belongs_there() -> None:
    """And what does not, with the place where that is."""
    for package in (PROJECT / "laststep").glob("*/__init__.py"):
        words = (ast.get_docstring(ast.parse(package.read_text())) or "").split()
        assert "Not here:" in " ".join(words), package


def test_model_names_are_torchvisions() -> None:
    """The list is read from torchvision's source, without importing it: it must not miss or invent a model."""
    assert model_names() == sorted({"convnet", *models.list_models(module=models)})
