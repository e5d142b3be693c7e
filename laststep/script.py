"""A user's script: the words that name it, what is seen of it before it starts, how a rank runs it as `__main__`, and
`laststep.run()`, by which it finds its run.

`script` in a configuration is what follows `python`: [train.py, --lr, 3e-4], or [-m, package.module, --lr, 3e-4].
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NoReturn

from laststep.config.errors import ConfigError

MODULE = "-m"
FILE = "LASTSTEP_SCRIPT"  # set in a job: the script's file in the copy of the code


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command of Laststep's, and those of the script that it starts: from the first `*.py` or `-m` on,
    or after `--`. As with torchrun, all of these are the script's own."""
    for number, word in enumerate(words):
        if word == "--":
            return list(words[:number]), list(words[number + 1 :])
        if word == MODULE or (word.endswith(".py") and "=" not in word and not word.startswith("-")):
            return list(words[:number]), list(words[number:])
    return list(words), []


def as_override(script: Sequence[str]) -> str:
    """The `key=value` word that sets `script`."""
    from laststep.config.keys import escaped  # here: the Tab key does not wait for OmegaConf

    return f"script={json.dumps([escaped(word) for word in script], ensure_ascii=False)}"


def shown(script: Sequence[str]) -> str:
    """The words as one types them."""
    return shlex.join(script)


def name_of(script: Sequence[str]) -> str:
    """The script or the module, without its words: train.py, or package.module."""
    return script[1] if script[0] == MODULE and len(script) > 1 else script[0]


def stem_of(script: Sequence[str]) -> str:
    """What a run of it is called: `train` for train.py, and for package.train."""
    name = name_of(script)
    return name.rpartition(".")[2] if script[0] == MODULE else Path(name).stem


def file_of(script: Sequence[str], folder: Path) -> Path | None:
    """The script's file, in `folder` if its path is relative; None for a module, which Python finds."""
    return None if script[0] == MODULE else folder / Path(script[0]).expanduser()


def check_source(script: Sequence[str], source: Path) -> None:
    """Raise ConfigError for a script that cannot be read, or that does not know Laststep: nothing could resume it."""
    name = name_of(script)
    try:
        tree = ast.parse(source.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such script in {source.parent}") from None
    except SyntaxError as error:
        raise ConfigError(f"{name}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    if not any(map(_names_us, ast.walk(tree))):
        raise ConfigError(
            f"{name}: does not import laststep, so nothing could resume it at its last step; add `import laststep` and "
            "`run = laststep.run()`"
        )


def _names_us(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "laststep" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "laststep"


def run_as_main(script: Sequence[str]) -> None:
    """Run the script as Python would: as `__main__`, with its own words.

    It stays `__main__` when it is done: what it has registered to be called at exit, and what is pickled later, finds
    it. Raises what it raises.
    """
    file = file_of(script, Path.cwd())
    if file is None:
        sys.argv = [script[1], *script[2:]]
        import runpy

        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        return
    file = Path(os.environ.get(FILE, file))  # in a job, that in its copy of the code
    sys.argv = [script[0], *script[1:]]
    sys.path.insert(0, str(file.parent.absolute()))
    loader = SourceFileLoader("__main__", str(file.absolute()))
    spec = spec_from_loader("__main__", loader)
    assert spec is not None
    module = module_from_spec(spec)
    module.__spec__ = None  # as of any script; with a spec, a spawned process would import it by a name
    sys.modules["__main__"] = module
    code = compile(file.read_bytes(), str(file.absolute()), "exec", dont_inherit=True)
    exec(code, vars(module))


joined: Any = None  # the Run of the script or function that this process runs


def run() -> Any:
    """The Run of this script: call it at module level, before the script needs its device or its data.

        import laststep

        run = laststep.run()
        ...
        run.restore(model=model, optimizer=optimizer)
        for step in run.steps(count=max_iters):
            ...

    The same object at each call. Under `launch.py train.py ...` each rank runs the script, with its own words in
    `sys.argv`, and is in the run already. Under `python train.py`, torchrun, srun or mpirun this begins or continues
    the run `runs/train` in the current folder (LASTSTEP_NEW=1: another one): it starts the script again, in this
    process, as `python -m laststep train.py` does.

    At a stop, `run.steps(...)` and `run.validation(...)` raise a subclass of SystemExit once everything is saved. In a
    process that the script starts, such as a loader's worker, there is nothing to join: `rank` and its like are known
    there, and everything else raises. Raises ConfigError where no script runs, as in a notebook.
    """
    if joined is not None:
        return joined
    import multiprocessing  # here: no command waits for it

    # A spawned process imports the script before it knows its parent.
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing or multiprocessing.parent_process() is not None:
        return _Bystander()
    _start_again()


def _start_again() -> NoReturn:
    """Replace this process by a rank that runs the same script: a run has to begin before its script does."""
    import __main__

    spec, file = getattr(__main__, "__spec__", None), getattr(__main__, "__file__", None)
    if spec is None and not file:
        raise ConfigError("laststep.run(): no script runs here; put the training into a file, and start that")
    if getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():
        raise ConfigError("laststep.run(): call it before init_process_group(): the run sets up the process group")
    typed = sys.argv[0] if file and os.path.exists(sys.argv[0]) and os.path.samefile(sys.argv[0], file) else str(file)
    words = [MODULE, spec.name.removesuffix(".__main__")] if spec is not None else [typed]
    begins_another = "SLURM_JOB_ID" in os.environ or os.environ.get("LASTSTEP_NEW", "0") not in ("", "0")
    name = [] if begins_another else ["--name", stem_of(words)]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    ours = str(Path(__file__).parent)  # by its path: what this script has added to sys.path is lost
    os.execv(sys.executable, [sys.executable, *flags, ours, *name, *words, *sys.argv[1:]])


class _Bystander:
    """The run, as a process sees it that a rank has started: it may ask who the rank is."""

    def __init__(self) -> None:
        self.rank, self.size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def __getattr__(self, name: str) -> Any:
        if name == "device":
            import torch

            return torch.device("cpu")
        raise ConfigError(
            f"run.{name}: this process was started by a rank and is none; write `if __name__ == '__main__':` around "
            "what only the rank does"
        )
