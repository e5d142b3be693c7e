"""Keys that a custom loop would ignore: of the sections that a Task uses, its function has what it reads by itself.

Its module is parsed, not imported. If it hands the run or the configuration to code elsewhere, every key may be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from laststep.code.task_check import definition
from laststep.config.checks import check_copies_of_task, check_no_sharding
from laststep.config.config import PACKAGED, Config, find_config, missing_keys
from laststep.config.errors import ConfigError, nearest
from laststep.config.keys import fields_of
from laststep.runs.run_config import LATER_KEYS

# What Laststep itself reads for a custom loop.
SECTIONS = ("checkpoint.", "launch.")
KEYS = (
    *("seed", "device", "task"),
    *("train.log_every", "train.deterministic", "train.nonfinite", "train.rehearsal"),
)


def check_keys(config: Config, words: Iterable[str], source: str | None = None, search: Sequence[Path] = ()) -> None:
    """Raise ConfigError for a key that the user has set and the custom loop ignores: in a `key=value` word, or in
    `source`, a YAML file, unless it ships with Laststep. Likewise for args that its dataclass lacks or needs."""
    keys = [word.partition("=")[0] for word in words]
    if source is not None:
        keys += _own_keys(source) + [f"args.{name}" for name in config.args]
    tree, function = definition(config.task, search or [Path.cwd()])
    if isinstance(function, ast.ClassDef) or "." not in config.task:
        check_copies_of_task(config)
    if tree is None or not isinstance(function, ast.FunctionDef):
        return
    check_no_sharding(config)
    reads = _Reads(tree, function)
    if config.train.shares is not None and not reads.may_read("train.shares"):
        raise ConfigError(
            f"train.shares={config.train.shares}: {config.task}, a custom loop, does not compute in shares; write "
            "`for batch in run.shares(batch):` around its forward and backward pass, or remove this key"
        )
    for key in keys:
        if key.startswith(SECTIONS) or key in KEYS or reads.may_read(key):
            continue
        if key == "train.precision" and config.train.precision not in ("bf16", "fp16"):
            continue  # how the GPU multiplies, which is the same for every loop
        if key.startswith("args."):
            known = sorted(read.partition(".")[2] for read in reads.keys if read.startswith("args."))
            raise ConfigError(f"{key}: {config.task} does not read it; {nearest(key.partition('.')[2], known)}")
        name = key.rpartition(".")[2]
        raise ConfigError(
            f"{key}: {config.task}, a custom loop, does not read it, so it would change nothing; let it read "
            f"run.config.{key}, or run.args.{name} and set args.{name}"
        )
    if missing := [name for name in reads.needed if name not in config.args and f"args.{name}" not in keys]:
        raise ConfigError(f"args.{missing[0]}: not set, and the dataclass of args has no default for it")


def _own_keys(source: str) -> list[str]:
    """The keys that the user's YAML file sets, but for args; none for the config.yaml of a run, which has every key."""
    path = find_config(source)
    if path.resolve().is_relative_to(PACKAGED.resolve()):
        return []
    missing = missing_keys(path.read_text())
    if set(missing) <= set(LATER_KEYS):
        return []
    return [key for key, _, _ in fields_of(Config) if key not in missing and key != "args"]


class _Reads(ast.NodeVisitor):
    """The keys and sections of the configuration that the code of a module reads."""

    def __init__(self, tree: ast.Module, function: ast.FunctionDef) -> None:
        self.keys: set[str] = set()
        self.needed: list[str] = []  # the fields without a default of the dataclass of args
        parameters = [*function.args.posonlyargs, *function.args.args]
        self._unknown = bool(function.decorator_list)
        self._runs = {"run", *(each.arg for each in parameters[:1])}
        here = (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        self._here = {node.name for node in here if not getattr(node, "bases", None)}
        self._variables = {"args": "args"} if [each.arg for each in parameters[1:2]] == ["args"] else {}
        if self._variables and parameters[1].annotation is not None:
            self._read_fields(tree, parameters[1].annotation)
            self._variables = {}
        while aliases := [name for node in ast.walk(tree) for name in self._aliases(node)]:
            self._variables |= dict.fromkeys(aliases, "")
        self.visit(tree)

    def may_read(self, key: str) -> bool:
        """Whether the code may read this key, or one in it, or the section that it is in."""
        pairs = [pair for read in self.keys for pair in ((key, read), (read, key))]
        return self._unknown or any(f"{one}.".startswith(f"{other}.") for one, other in pairs)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A variable that stands for the configuration reads nothing yet."""
        if self._path(node.value) != "" or not all(isinstance(target, ast.Name) for target in node.targets):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """run.config.optim.lr reads optim.lr."""
        path = self._path(node)
        if path is not None:
            self._note(path)
        elif not self._is_run(node.value):
            self.generic_visit(node)
        elif node.attr == "shares":  # run.shares(batch)
            self.keys.add("train.shares")

    def visit_Name(self, node: ast.Name) -> None:
        """A variable that stands for a section reads all of it; the run itself goes where it cannot be followed."""
        if isinstance(node.ctx, ast.Load):
            self._unknown |= self._is_run(node)
            self._note(self._path(node))

    def visit_Call(self, node: ast.Call) -> None:
        """A function of this module may be given the run."""
        here = isinstance(node.func, ast.Name) and node.func.id in self._here
        for each in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
            if not (here and self._is_run(each)):
                self.visit(each)

    def _note(self, path: str | None) -> None:
        if path:
            self.keys.add(path)
        self._unknown |= path == ""  # the configuration as a whole

    def _is_run(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._runs

    def _path(self, node: ast.expr) -> str | None:
        """The dotted key that an expression stands for, "" for the whole configuration; None for anything else."""
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if (inner := self._path(node.value)) is not None:
            return f"{inner}.{node.attr}".lstrip(".")
        if node.attr == "config":
            return ""
        return "args" if node.attr == "args" and self._is_run(node.value) else None

    def _aliases(self, node: ast.AST) -> list[str]:
        """The variables that this node makes stand for the whole configuration, as in `config = run.config`."""
        if not isinstance(node, ast.Assign) or self._path(node.value) != "":
            return []
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return [name for name in names if name not in self._variables]

    def _read_fields(self, tree: ast.Module, annotation: ast.expr) -> None:
        """Take the settings from the dataclass that is the type of args; all may be read if it cannot be looked at."""
        name = ast.unparse(annotation).strip("'\"")
        found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is None or found.bases:
            self.keys.add("args")
            return
        for field in found.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                self.keys.add(f"args.{field.target.id}")
                if field.value is None:
                    self.needed.append(field.target.id)
