"""Checks of a user's own task: that it names a Task class or a function, and that the keys that the user has set are
among those that it declares to read, if it declares any. What it really reads, the rank finds out (config/reads.py).

Its module is parsed, not imported: it may import torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from laststep import script
from laststep.config.checks import check_batch, check_copies_of_task, check_no_sharding
from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.config.machine import Machine
from laststep.config.reads import FOR_A_COMMAND, FOR_A_TASK, covers, declared, for_a_function, given_by, refusal
from laststep.config.schema import COMMAND, READY_MADE
from laststep.frameworks import PACKAGES, missing
from laststep.optim.names import check_optimizer
from laststep.records import former_names

MOST_CANDIDATES = 5
Definition = ast.ClassDef | ast.FunctionDef
HOOKS = {"datasets", "model", "step"}  # methods by which a class shows that it is a Task


def check(config: Config, machine: Machine) -> None:
    """Check that a task of the user's own exists, its optimiser unless it may make its own, and that it may read what
    the user has set. Raises ConfigError."""
    search = machine.places
    if config.script:
        check_no_sharding(config)
        if config.task == COMMAND:
            for key in given_by(machine):
                if not covers(FOR_A_COMMAND, key):
                    raise refusal(key, config.task, FOR_A_COMMAND)
        return
    if config.task not in READY_MADE:
        check_task(config.task, search)
        node = definition(config.task, search)[1]
        if isinstance(node, ast.ClassDef):
            train = config.train
            check_batch(train.batch_size, config.launch.world_sizes, train.accumulate, train.shares)
            if not _may_make_optimizer(node):
                check_optimizer(config.optim)
    check_keys(config, given_by(machine), search)


def with_kind_of_script(config: Config, machine: Machine) -> Config:
    """The configuration whose `task` says what its script is: a command, if it does not know Laststep. Raises
    ConfigError where there is no such script, or program."""
    words, places = config.script, machine.places
    if not words or config.task == COMMAND:
        return config
    if not script.is_python(words):
        _check_program(config, places[0])
        return dataclasses.replace(config, task=COMMAND)
    files = script.files_of(words, places[0])
    if not files:
        if len(words) < 2:
            raise ConfigError("script=-m: name the module: -m package.module")
        module = words[1]
        spec = _find(module, module, places)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find(module, f"{module}.__main__", places)
        if spec is None:
            raise ConfigError(f"-m {module}: no such module on the Python path ({places[0]}, ...)")
        files = [Path(str(spec.origin))]
    known = files[0].suffix != ".py" or script.knows_us(words, files[0])
    return config if known else dataclasses.replace(config, task=COMMAND)


def _check_program(config: Config, folder: Path) -> None:
    """Raise ConfigError for a command that is not there, and for one that hides a script which knows Laststep."""
    program, *words = config.script
    path = folder / Path(program).expanduser()
    if "/" in program and not os.access(path, os.X_OK):
        why = "cannot be executed: chmod +x, or name what runs it" if path.exists() else f"no such program in {folder}"
        raise ConfigError(f"{program}: {why}")
    if "/" not in program and config.launch.python is None and shutil.which(program) is None:
        raise ConfigError(f"{program}: no such program; a program of this folder is ./{program}")
    if Path(program).name.startswith("python"):
        for file in script.files_of(words, folder) if words and script.is_python(words) else ():
            if script.knows_us(words, file):
                raise ConfigError(f"{words[0]}: imports laststep: leave `{program}` out, so that it resumes exactly")


def check_task(path: str, search: Sequence[Path] = ()) -> None:
    """Check that the module of a user's Task or function exists and defines it; Python looks in `search` first.

    Raises ConfigError.
    """
    module, _, name = path.rpartition(".")
    if module == "__main__":
        raise ConfigError(
            f"task={path}: the ranks cannot import a script or a notebook; move {name} to a module, e.g. my_task.py, "
            f"and use task=my_task.{name}"
        )
    if not module:
        _refuse_module(path, _find(path, path, search))
        raise ConfigError(f"task={path}: {nearest(path, list(READY_MADE))} or give package.module.Name")
    spec = _find(path, module, search)
    if spec is None:
        first = search[0] if search else Path.cwd()
        raise ConfigError(f"task={path}: no module {module} on the Python path ({first}, ...){_renamed(path, search)}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # a package without source, or a compiled module: the rank finds out
    tree = _parse(path, spec)
    _check_frameworks(path, list(_imported(tree)), search)
    names = _check_definition(path, name, tree)
    if name not in names and "*" not in names:
        if spec.submodule_search_locations is not None:
            _refuse_module(path, PathFinder.find_spec(path, spec.submodule_search_locations))
        raise ConfigError(f"task={path}: {module} has no {name}; {nearest(name, sorted(names))}")


def definition(path: str, search: Sequence[Path] = ()) -> tuple[ast.Module | None, Definition | None]:
    """The parsed module of a user's task, and the class or function there; None for what its source does not show."""
    module, _, name = path.rpartition(".")
    spec = _find(path, module, search) if module else None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, None
    tree = _parse(path, spec)
    found = (node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name)
    return tree, next(found, None)


def _may_make_optimizer(node: ast.ClassDef) -> bool:
    """Whether a user's Task may have an optimiser of its own: then `optim` is for the task to read. False for a class
    that its source shows to be a plain Task without the method."""
    plain = all(ast.unparse(base).rpartition(".")[2] in ("Task", "Classification") for base in node.bases)
    return not plain or any(getattr(part, "name", None) == "optimizer" for part in node.body)


def find_spec(module: str, search: Sequence[Path]) -> ModuleSpec | None:
    """Where Python finds a module, as a rank would: in these folders first. None where there is no such module."""
    before = list(sys.path)
    sys.path[:0] = map(str, search)
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path[:] = before


def _find(path: str, module: str, search: Sequence[Path]) -> ModuleSpec | None:
    try:
        return find_spec(module, search)
    except Exception as error:  # to find a.b.C, Python runs a/__init__.py, which may raise anything
        raise ConfigError(f"task={path}: {module} cannot be imported: {type(error).__name__}: {error}") from None


def _renamed(path: str, search: Sequence[Path]) -> str:
    """A hint for a name from the time when Laststep's package was called `trainer`."""
    name = former_names.present(path)
    if name != path and find_spec(name.rpartition(".")[0], search) is not None:
        return f"; Laststep's package is called {former_names.PRESENT} now: task={name}"
    return ""


def _imported(source: ast.Module) -> Iterator[str]:
    """The dotted names that a module's source imports."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _parse(path: str, spec: ModuleSpec) -> ast.Module:
    try:
        return ast.parse(Path(str(spec.origin)).read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"task={path}: {spec.origin}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"task={path}: {spec.origin} cannot be read: {error}") from None


def _check_frameworks(path: str, names: Sequence[str], search: Sequence[Path]) -> None:
    """Raise ConfigError if the module imports the adapter of a framework that is not installed."""
    for name in names:
        adapter = ".".join(name.split(".")[:3])
        package = PACKAGES.get(adapter)
        if package is not None and find_spec(package, search) is None:
            raise missing(f"task={path}", adapter, package)


def _check_definition(path: str, name: str, tree: ast.Module) -> set[str]:
    """Raise ConfigError if the module defines this name as what cannot be trained; returns the names it defines."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            assigned = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names.update(assigned)
            if name in assigned:
                _check_value(path, node.value, tree)
        if isinstance(node, ast.FunctionDef) and node.name == name and not _takes_run(node):
            raise ConfigError(f"task={path}: must take the run, and perhaps args: def {name}(run)")
        if isinstance(node, ast.ClassDef) and node.name == name and not _may_be_task(node):
            raise ConfigError(f"task={path}: is not a subclass of laststep.Task: class {name}(Task)")
    return names


def _check_value(path: str, value: ast.expr, tree: ast.Module) -> None:
    """Raise ConfigError for a value that is certainly no Task class and no function."""
    if isinstance(value, ast.Constant):
        raise ConfigError(f"task={path}: is neither a subclass of laststep.Task nor a function")
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in classes:
        class_path = f"{path.rpartition('.')[0]}.{value.func.id}"
        raise ConfigError(f"task={path}: is an instance; name its class: task={class_path}")


def _refuse_module(path: str, spec: ModuleSpec | None) -> None:
    """Raise ConfigError if this is a module, named where its Task class or function is meant."""
    if spec is None or spec.origin is None:
        return
    found = _candidates(_parse(path, spec)) if spec.origin.endswith(".py") else []
    example = f", e.g. {' or '.join(f'{path}.{name}' for name in found)}" if found else ""
    raise ConfigError(f"task={path}: is a module: name its Task class or function{example}")


def _candidates(tree: ast.Module) -> list[str]:
    """The names that the user may have meant: subclasses of a Task, and functions of a run."""
    tasks: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            if methods & HOOKS or any(base.endswith("Task") or base in tasks for base in bases):
                tasks.append(node.name)
        elif isinstance(node, ast.FunctionDef) and _takes_run(node) and node.args.args:
            first = node.args.args[0]
            if first.arg == "run" or (first.annotation and ast.unparse(first.annotation).strip("'\"").endswith("Run")):
                tasks.append(node.name)
    return tasks[:MOST_CANDIDATES]


def _may_be_task(node: ast.ClassDef) -> bool:
    """Whether a class may be a subclass of Task: it has a base, or something that may give it one."""
    return bool(node.bases or node.keywords or node.decorator_list)


def _takes_run(function: ast.FunctionDef) -> bool:
    """Whether a function can be called with the run, and with its settings if its second parameter is named args. A
    decorated one passes: the decorator may change that."""
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    takes_any = positional >= 1 or arguments.vararg is not None
    given = 1 + [each.arg for each in arguments.args[:2]][1:].count("args")
    needs_more = positional - len(arguments.defaults) > given or None in arguments.kw_defaults
    return (takes_any and not needs_more) or bool(function.decorator_list)


def check_keys(config: Config, keys: Sequence[str], search: Sequence[Path] = ()) -> None:
    """Raise ConfigError for one of these keys, which the user has set, that a Task or a function has not declared to
    read, if it declares that: in `reads`, and in the dataclass of its args. Likewise for args that this needs."""
    tree, node = definition(config.task, search or [Path.cwd()])
    if isinstance(node, ast.ClassDef) or "." not in config.task:
        check_copies_of_task(config)
    if tree is None or node is None:
        return
    if isinstance(node, ast.FunctionDef):
        check_no_sharding(config)
        if node.decorator_list:
            return  # which may change what it takes: the rank finds out
        reads, settings = _assigned(tree, f"{node.name}.reads"), _type_of_args(node)
        by_laststep = for_a_function(config)
    else:
        reads, settings = _assigned(node, "reads"), _assigned(node, "settings")
        by_laststep = (*FOR_A_TASK, "optim.")  # of which the methods of Task itself read what they need
    if reads is not None:
        _check_reads(config.task, keys, reads, by_laststep)
    fields = None if settings is None else _fields_of(tree, ast.unparse(settings).strip("'\""))
    if fields is not None:
        _check_args(config, keys, fields)


def note_unchecked(config: Config, machine: Machine) -> str | None:
    """What a submission says of keys that the user has set, and that a script, or a function that declares nothing,
    may not read: only its first step shows that. None where there is nothing to say."""
    if not machine.submits or config.task in READY_MADE:
        return None
    tree, node = (None, None) if config.script else definition(config.task, machine.places)
    if isinstance(node, ast.ClassDef):
        return None
    known = for_a_function(config)
    if tree is not None and node is not None:
        if _assigned(tree, f"{node.name}.reads") is not None:
            return None
        if _type_of_args(node) is not None:
            known = (*known, "args.")
    keys = [key for key in given_by(machine) if not covers(known, key)]
    what = script.name_of(config.script) if config.script else f"task={config.task}"
    return f"{', '.join(keys)}: whether {what} reads it is checked in its first step" if keys else None


def _assigned(tree: ast.Module | ast.ClassDef, name: str) -> ast.expr | None:
    """The value that this body gives to a name, such as `reads` or `main.reads`."""
    nodes = (node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    return next((node.value for node in nodes), None)


def _type_of_args(function: ast.FunctionDef) -> ast.expr | None:
    """The annotation of a function's second parameter, if that is named args."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return next((each.annotation for each in parameters[1:2] if each.arg == "args"), None)


def _check_reads(task: str, keys: Sequence[str], reads: ast.expr, by_laststep: Sequence[str]) -> None:
    """Raise ConfigError for a key that is not in `reads`, a tuple of keys and sections; not for args."""
    try:
        names = [str(name) for name in ast.literal_eval(reads)]
    except (ValueError, TypeError):
        return  # made by code: the rank finds out
    for key in keys:
        if not covers((*by_laststep, "args.", *declared(names)), key):
            raise refusal(key, task, names)


def _check_args(config: Config, keys: Sequence[str], fields: dict[str, bool]) -> None:
    """Raise ConfigError for args that are no fields of their dataclass, and for a field that needs a value.

    `fields` says which have a default.
    """
    for key in keys:
        if key.startswith("args.") and key.split(".")[1] not in fields:
            raise refusal(key, config.task, [f"args.{name}" for name in fields])
    for name, has_default in fields.items():
        if not has_default and name not in config.args and f"args.{name}" not in keys:
            raise ConfigError(f"args.{name}: not set, and the dataclass of args has no default for it")


def _fields_of(tree: ast.Module, name: str) -> dict[str, bool] | None:
    """The fields of a dataclass in this module, and whether each has a default; None if it cannot be looked at."""
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None or found.bases:
        return None
    fields = (field for field in found.body if isinstance(field, ast.AnnAssign))
    return {field.target.id: field.value is not None for field in fields if isinstance(field.target, ast.Name)}
