"""How large the house is: files, lines, entries of each folder, modules that only one other imports, names used twice.

`python -m tools.house` prints these figures, and how many files each walk of docs/design.md opens; `--importers` lists
the modules with one importer. It fails if a walk names a file that is not there, or is longer than its goal.
A module counts as imported wherever the statement stands, also within functions and for type checking.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "laststep"


def sources(folder: str = PACKAGE) -> list[Path]:
    """The Python files below a folder of the project, sorted."""
    return sorted((PROJECT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """laststep/ranks/group.py -> laststep.ranks.group"""
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, known: frozenset[str]) -> Iterator[str]:
    """The modules among the `known` ones that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else str(node.module)


def importers() -> dict[str, set[str]]:
    """For each module of the package, the modules that import it."""
    paths = sources()
    known = frozenset(map(module_of, paths))
    found: dict[str, set[str]] = {module: set() for module in known}
    for path in paths:
        for module in imports_of(path, known):
            if module != module_of(path):
                found[module].add(module_of(path))
    return found


def lines(path: Path) -> int:
    """The lines of a file."""
    return path.read_bytes().count(b"\n")


GOALS = {
    "A submission to the first step": 20,
    "A signal to the requeue": 10,
    "A killed rank to the restart": 12,
    "A batch": 9,
}


def walks() -> dict[str, list[str]]:
    """The files that each walk of docs/design.md opens."""
    text = (PROJECT / "docs" / "design.md").read_text().partition("## Walks")[2].partition("\n## ")[0]
    found = re.findall(r"^\* \*\*(.+?)\*\*:(.+?)(?=^\* |^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", walk))) for name, walk in found}


def wrong_walks() -> list[str]:
    """What is wrong with the walks, one line each."""
    found = walks()
    lines = [f"{name}: not in docs/design.md" for name in GOALS if name not in found]
    for name, files in found.items():
        lines += [f"{name}: no {file}" for file in files if not (PROJECT / file).is_file()]
        if len(files) > GOALS[name]:
            lines.append(f"{name}: {len(files)} files, more than {GOALS[name]}")
    return lines


def report(every_importer: bool) -> str:
    """The figures as text."""
    paths = sources()
    packages = {module_of(path) for path in paths if path.name == "__init__.py"}
    single = {module: next(iter(by)) for module, by in importers().items() if len(by) == 1 and module not in packages}
    size = {module_of(path): lines(path) for path in paths}
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        if path.name not in ("__init__.py", "__main__.py"):
            stems[path.name].append(str(path.relative_to(PROJECT)))
    twice = {name: places for name, places in stems.items() if len(places) > 1}
    text = [
        f"{PACKAGE}/: {len(paths)} files, {sum(size.values()):,} lines",
        f"tests/: {len(sources('tests'))} files, {sum(map(lines, sources('tests'))):,} lines; "
        f"tests/support/: {len(sources('tests/support'))} files",
        f"modules with one importer: {len(single)}, {sum(size[module] for module in single):,} lines",
        f"file names used more than once: {len(twice)}",
        "",
        f"{'folder':<24}{'entries':>8}{'files':>7}{'lines':>8}",
    ]
    for folder in sorted(path.parent for path in paths if path.name == "__init__.py"):
        entries = Counter(each.suffix for each in folder.iterdir() if each.name not in ("__init__.py", "__pycache__"))
        own = list(folder.glob("*.py"))
        name = str(folder.relative_to(PROJECT))
        text.append(f"{name:<24}{sum(entries.values()):>8}{len(own):>7}{sum(map(lines, own)):>8,}")
    text += ["", *(f"{name}: {len(files)} files (goal {GOALS[name]})" for name, files in walks().items())]
    text += ["", *(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items()))]
    if every_importer:
        text += ["", *(f"{module} ({size[module]}) <- {by}" for module, by in sorted(single.items()))]
    return "\n".join(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__.partition("\n")[0])
    parser.add_argument("--importers", action="store_true", help="list the modules that only one other imports")
    print(report(parser.parse_args().importers))
    if wrong := wrong_walks():
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
