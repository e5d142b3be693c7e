"""A user who starts ranks by every supported launcher, each in its own terminal or notebook."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.cluster import Cluster
from tests.slurm.processes import processes
from tests.support.forked import forked_python
from tests.support.project import DEADLINE_S, PROJECT

CELL = """\
from laststep import Config, submit
job = submit(Config.load("mnist", {words}))
print("its result is of step", job.result()["step"])
"""


class Desk:
    """A user's desk: a folder with a clone's configurations and runs, and terminals to start them from.

    There `python` and `torchrun` are `python`: by default forked processes, see tests/support/forked.
    """

    def __init__(self, cluster: Cluster, folder: Path, python: str | None = None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.python = python or forked_python()
        self.terminals: list[subprocess.Popen[bytes]] = []
        (folder / "configs").symlink_to(PROJECT / "configs")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "torchrun").write_text(f"#!{self.python}\nfrom torch.distributed.run import main\n\nmain()\n")
        (programs / "torchrun").chmod(0o755)
        places = (programs, Path(self.python).parent, Path(sys.executable).parent, os.environ["PATH"])
        self.env = cluster.env | {
            "PATH": ":".join(map(str, places)),
            "PYTHONPATH": str(PROJECT),
            "OMP_NUM_THREADS": "1",
            # Open MPI refuses by default to run as root, and to start more ranks than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }

    def types(self, run: str, *commands: tuple[str, ...], words: tuple[str, ...] = ()) -> None:
        """Start commands, each in its own terminal."""
        with socket.create_server(("", 0)) as probe:
            filled = {"run": run, "port": probe.getsockname()[1], "project": PROJECT, "examples": PROJECT / "examples"}
        source = CELL.format(words=["launch.nodes=2", f"launch.name={run}", f"launch.python={self.python}", *words])
        cell: dict[str, Any] = {
            "cell_type": "code",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
        (self.folder / f"{run}.ipynb").write_text(json.dumps(notebook))
        for command in commands:
            with (self.folder / f"{run}.log").open("ab") as log:
                typed = [*(word.format(**filled) for word in command), *words]
                quiet = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                self.terminals.append(subprocess.Popen(typed, cwd=self.folder, env=self.env, **quiet))  # type: ignore

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def attempts(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.run(name).attempts)

    def job(self, name: str) -> str:
        """The id of the job in which the run is training."""
        (attempt,) = read_lines(self.run(name).attempt_now)
        return str(attempt["job_id"])

    def log(self, run: str) -> str:
        """Everything that the launcher and the ranks of a run have printed."""
        files = [*self.folder.glob(f"{run}*.*"), *self.run(run).logs.glob("*.out")]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def waits_for(self, run: str, text: str, times: int = 1) -> None:
        """Wait until the log has `text` this many times."""
        with self.log_on_failure(run):
            said = lambda: self.log(run).count(text) >= times  # noqa: E731
            self.cluster.wait_for(said, DEADLINE_S, f"the log of {run} lacks {text!r}")

    def waits_for_attempts(self, run: str, count: int) -> None:
        """Wait until this many attempts of the run have ended."""
        with self.log_on_failure(run):
            self.cluster.wait_for(
                lambda: len(self.attempts(run)) >= count, DEADLINE_S, f"fewer than {count} attempts of {run} ended"
            )

    def waits_for_terminals(self) -> list[int]:
        """Wait until all commands have ended; return their exit statuses."""
        statuses = [terminal.wait(DEADLINE_S) for terminal in self.terminals]
        self.terminals.clear()
        return statuses

    @contextlib.contextmanager
    def log_on_failure(self, run: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log(run)}") from None

    def stops(self, run: str, how: str) -> None:
        """Stop the run by a Slurm command, or by a signal: "TERM" to the commands, "ranks USR2" to the ranks."""
        program, *words = how.split()
        if f"SIG{program}" in signal.Signals.__members__:
            for terminal in self.terminals:
                terminal.send_signal(signal.Signals[f"SIG{program}"])
        elif program == "ranks":
            job = self.job(run)  # once: the attempt may end with the first signal
            for pid, command, environ in processes():
                if environ.get("SUBMITIT_LOCAL_JOB_ID") == job and "submitit.core._submit" in command:
                    os.kill(pid, signal.Signals[f"SIG{words[0]}"])
        else:
            self.cluster.run(program, *words, self.job(run))

    def tidies_up(self) -> None:
        """End what a failed test has left running."""
        for terminal in self.terminals:
            terminal.kill()
            terminal.wait()
        self.terminals.clear()
        self.cluster.run("scancel", "--me")
