"""A stand-in for `python` whose processes are forked with torch loaded, as importing torch takes seconds of CPU time.

`client.c` is the program that a test starts instead of `python`. It asks `server.py` to fork a process, which becomes
what Python would be: the same words, environment, folder, open files, limits and namespaces. The client passes on the
signals that it gets and ends as that process ends; if it is killed, so is the process.

It differs from Python in these ways, so a test for which one of them matters starts Python itself (sys.executable):
- Python and torch are loaded before any signal can arrive.
- SIGSTOP stops the client only. /proc shows the client with the command line and the environment, not the process.
- The process is the server's child: it does not notice when the client's parent dies.
- At its end the objects of a process are not destroyed, so it takes no time in which a thread could still do harm.
- What is read while Python or torch is loaded must be as it was for the server. The client starts Python itself when
  it finds a variable of that kind (such as PYTHONHASHSEED or LD_PRELOAD), another number of threads than one, or an
  option that it does not know.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.project import owner, shared_folder, shared_lock

HERE = Path(__file__).parent


def forked_python(*modules: str, preload: Path | None = None) -> str:
    """The path of the stand-in, which all test processes of this session share; Python's where no C compiler is. These
    modules are loaded as well. `preload`: a library that is loaded before all others (LD_PRELOAD)."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        return sys.executable
    name = "-".join(("forked", *modules, *([preload.stem] if preload else [])))
    folder = shared_folder() / name
    with shared_lock(name):
        if not folder.exists():
            folder.mkdir()
            _compile(compiler, folder)
            _start(folder, modules, preload)
    return str(folder / "python")


def process_of(client: int, python: str) -> int:
    """The process that a client of this stand-in stands for; one of Python itself stands for itself. Kill that process
    and not the client, which would end before it."""
    note = Path(python).with_name(f"process_{client}")
    return int(note.read_text()) if note.exists() else client


def _compile(compiler: str, folder: Path) -> None:
    settings = "".join(f"{json.dumps(f'{key}={value}')}, " for key, value in _environment().items() if _is_plain(value))
    places = (f'-DSOCKET="{folder / "socket"}"', f'-DPYTHON="{sys.executable}"', f"-DOF_SERVER={settings}")
    language = ("-x", "c") if Path(compiler).name == "cc" else ("-x", "c++")
    source = str(HERE / "client.c")
    subprocess.run([compiler, "-O1", "-Wall", *places, *language, source, "-o", folder / "python"], check=True)


def _start(folder: Path, modules: tuple[str, ...], preload: Path | None) -> None:
    """Start the server, which ends when the session does."""
    env = {**_environment(), **({"LD_PRELOAD": str(preload)} if preload else {})}
    subprocess.run(
        [sys.executable, str(HERE / "server.py"), str(folder / "socket"), str(owner()), *modules],
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        check=True,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    """The server's variables."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "SLURM"))}
    return {**env, "OMP_NUM_THREADS": "1"}


def _is_plain(value: str) -> bool:
    """Whether a C compiler reads this text in quotes as it stands."""
    return value.isascii() and value.isprintable() and not set(value) & set('\\"?')
