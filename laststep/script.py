"""A user's script: the words that name it, what is seen of it before it starts, how a rank runs it as `__main__`, and
`laststep.run()`, by which it finds its run.

`script` in a configuration is what follows `python`: [train.py, --lr, 3e-4], or [-m, package.module, --lr, 3e-4]. Any
other words are a command: [./train, --lr, 3e-4]. It resumes by itself, as does a script that does not import Laststep
(laststep/attempt/command.py).
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
from laststep.config.schema import COMMAND, Settings

MODULE = "-m"
FILE = "LASTSTEP_SCRIPT"  # set in a job: the script's file in the copy of the code
FOLDER = "LASTSTEP_FOLDER"  # set for a command: where it keeps its own checkpoints
TO_RESUME_EXACTLY = "`import laststep` and `run = laststep.run()`"
# `python -m` would find a module in the current folder before that in the copy of the code.
_AS_MODULE = (
    "import runpy, sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], {}, '__main__', True)"
)


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


def is_python(script: Sequence[str]) -> bool:
    """Whether the words name a script or a module of Python, and no other command."""
    return script[0] == MODULE or script[0].endswith(".py")


def stem_of(script: Sequence[str]) -> str:
    """What a run of it is called: `train` for train.py, for package.train, and for `bash train.sh`."""
    if script[0] == MODULE:
        return name_of(script).rpartition(".")[2]
    return Path(next((word for word in script if word.endswith((".py", ".sh"))), script[0])).stem


def files_of(script: Sequence[str], folder: Path) -> list[Path]:
    """The files that may be the code of it: the script; of a command every word that names one. A path may be relative
    to `folder`. None for a module, which Python finds."""
    if script[0] == MODULE:
        return []
    if is_python(script):
        return [folder / os.path.expanduser(script[0])]
    files = [folder / os.path.expanduser(word) for word in script]
    return [file for file in files if os.path.isfile(file)]  # False for `bash -c 'a long line'`, where Path's raises


def command_line(script: Sequence[str]) -> list[str]:
    """The words to start, in place of a process that runs it as `__main__`; in a job, with the file in the copy of the
    code."""
    if script[0] == MODULE:
        return [sys.executable, "-c", _AS_MODULE, *script[1:]]
    words = list(script)
    if copied := os.environ.get(FILE):
        for at in [at for at, word in enumerate(words) if Path(word).name == Path(copied).name][:1]:
            words[at] = copied
    return [sys.executable, *words] if is_python(script) else words


def knows_us(script: Sequence[str], source: Path) -> bool:
    """Whether the script imports Laststep. Raises ConfigError for one that cannot be read."""
    name = name_of(script)
    try:
        tree = ast.parse(source.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such script in {source.parent}") from None
    except SyntaxError as error:
        raise ConfigError(f"{name}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    return any(map(_names_us, ast.walk(tree)))


def _names_us(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "laststep" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "laststep"


def check_knows_us(config: Settings, what: str) -> None:
    """Raise ConfigError for `what` only a run can have whose steps Laststep knows."""
    if config.task == COMMAND:
        name = name_of(config.script)
        raise ConfigError(
            f"{what}: {name} resumes by itself, and Laststep sees neither its steps nor its weights; with "
            f"{TO_RESUME_EXACTLY} in it, this works"
        )


def run_as_main(script: Sequence[str]) -> None:
    """Run the script as Python would: as `__main__`, with its own words.

    It stays `__main__` when it is done: what it has registered to be called at exit, and what is pickled later, finds
    it. Raises what it raises.
    """
    if script[0] == MODULE:
        sys.argv = [script[1], *script[2:]]
        import runpy

        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        return
    file = Path(os.environ.get(FILE, Path.cwd() / Path(script[0]).expanduser()))  # in a job, that in its copy
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
    if FOLDER in os.environ:
        raise ConfigError(
            "laststep.run(): this run was begun as a command that does not know Laststep; write `import laststep` into "
            "the script itself, leave out `python`, and begin another run"
        )
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
