"""The throwaway Slurm, one for all tests of this folder, and users who type commands at it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.support.project import PROJECT
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

# An attempt of four ranks on two cores imports torch for 10 s; a requeued job is held for 6 s.
DEADLINE_S = 180.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm. In CI (LASTSTEP_REQUIRE_ALL=1) its absence is a failure, not a skip."""
    if lack := missing():
        if os.environ.get("LASTSTEP_REQUIRE_ALL"):
            pytest.fail(lack)
        pytest.skip(lack)
    started = Cluster.start(tmp_path_factory.mktemp("slurm"), owner=os.getpid())
    yield started
    started.stop()


def processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Pid, words and environment of every process here."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), command, dict(word.split("=", 1) for word in environ if "=" in word)


def parent(pid: int) -> int:
    """The pid of the process that started this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class User:
    """Someone in the project's folder, at a terminal of that cluster."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster = cluster
        self.root = root
        # Threads are set for the jobs too: they inherit the environment that sbatch is called in.
        self.env = {**cluster.env, "OMP_NUM_THREADS": "1"}

    def types(self, *words: str, status: int = 0) -> str:
        """`python launch.py WORDS`; returns what it printed. Any other exit status fails the test."""
        command = [sys.executable, "launch.py", *words, f"launch.root={self.root}"]
        done = subprocess.run(command, cwd=PROJECT, env=self.env, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == status, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """`python launch.py WORDS`, left running."""
        command = [sys.executable, "launch.py", *words, f"launch.root={self.root}"]
        return subprocess.Popen(
            command, cwd=PROJECT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, name: str) -> RunDir:
        """The folder of the run of that name."""
        return RunDir(self.root / name)

    def attempts(self, name: str) -> list[dict[str, Any]]:
        """The records of its ended attempts."""
        return read_lines(self.run(name).attempts)

    def verify(self, name: str) -> list[dict[str, Any]]:
        """What `launch.py verify --json` says."""
        found: list[dict[str, Any]] = json.loads(self.types("verify", name, "--json"))
        return found

    def job_of(self, name: str) -> str:
        """The job id of the run, once it is submitted."""
        pickles = self.cluster.wait_for(
            lambda: list(self.run(name).logs.glob("*_submitted.pkl")), DEADLINE_S, f"run {name} was not submitted"
        )
        return pickles[0].name.split("_")[0]

    def waits_for(self, name: str, text: str) -> None:
        """Until rank 0's log of the run has `text`."""
        logs = self.run(name).logs

        def said() -> bool:
            return any(text in log.read_text() for log in logs.glob("*_0_log.out"))

        self.cluster.wait_for(said, DEADLINE_S, f"rank 0 of {name} did not print {text!r}")

    def waits_for_end(self, name: str, reason: str) -> list[dict[str, Any]]:
        """Until an attempt of the run ended for `reason`; returns all attempts."""

        def ended() -> bool:
            return any(attempt["reason"] == reason for attempt in self.attempts(name))

        self.cluster.wait_for(ended, DEADLINE_S, f"no attempt of {name} ended as {reason}")
        return self.attempts(name)

    def kills(self, name: str, *ranks: int) -> None:
        """SIGKILL to these ranks of the run, in this order and at once."""
        pids = {
            int(environ["SLURM_PROCID"]): pid
            for pid, command, environ in processes()
            if "submitit.core._submit" in command and str(self.run(name).logs) in command and command[0] != "srun"
        }
        for number in ranks:
            os.kill(pids[number], signal.SIGKILL)

    def kills_srun(self, name: str) -> None:
        """SIGKILL to the run's srun, but first to its child, which would have the ranks killed too."""
        found = [pid for pid, command, _ in processes() if command[0] == "srun" and str(self.run(name).logs) in command]
        assert found, f"no srun of {name}"
        for pid in sorted(found, key=lambda pid: parent(pid) not in found):
            os.kill(pid, signal.SIGKILL)

    def kills_node(self, node: str) -> None:
        """As a power cut would: slurmd, and all that it has started."""
        self.cluster.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
        ours = {"SLURM_CONF": str(self.cluster.conf), "SLURMD_NODENAME": node}
        tasks = {pid for pid, _, environ in processes() if ours.items() <= environ.items()}
        keepers = {pid for pid, command, _ in processes() if command[0].startswith("slurmstepd")}
        for pid in tasks | keepers & {parent(pid) for pid in tasks}:
            os.kill(pid, signal.SIGKILL)

    def waits_until_gone(self, job: str, deadline_s: float = DEADLINE_S) -> None:
        """Until the job has left the queue."""
        self.cluster.wait_for(
            lambda: not self.cluster.run("squeue", "-h", "-j", job, check=False), deadline_s, f"job {job} did not end"
        )


@pytest.fixture(scope="session")
def user(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(cluster, tmp_path_factory.mktemp("runs"))


CELL = """\
from trainer import Config, submit
job = submit(Config.load("mnist", {words}))
print("its result is of step", job.result()["step"])
"""


class Desk:
    """Where a user sits: a folder with all runs in it, and terminals."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.terminals: list[subprocess.Popen[bytes]] = []
        self.env = cluster.env | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "OMP_NUM_THREADS": "1",
            # Open MPI minds root, and more ranks than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }

    def types(self, run: str, *commands: tuple[str, ...], words: tuple[str, ...] = ()) -> None:
        """Type commands, each in a terminal of its own, and do not wait for them."""
        with socket.create_server(("", 0)) as probe:
            filled = {"run": run, "port": probe.getsockname()[1], "project": PROJECT, "examples": PROJECT / "examples"}
        source = CELL.format(words=["launch.nodes=2", f"launch.name={run}", *words])
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
        """The id of the job in which the run trains."""
        (attempt,) = read_lines(self.run(name).attempt_now)
        return str(attempt["job_id"])

    def log(self, run: str) -> str:
        """Whatever the launcher and the ranks of a run have printed."""
        files = [*self.folder.glob(f"{run}*.*"), *self.run(run).logs.glob("*.out")]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def waits_for(self, run: str, text: str, times: int = 1) -> None:
        """Until the log has `text`, so many times."""
        with self.log_on_failure(run):
            said = lambda: self.log(run).count(text) >= times  # noqa: E731
            self.cluster.wait_for(said, DEADLINE_S, f"the log of {run} lacks {text!r}")

    def waits_for_attempts(self, run: str, count: int) -> None:
        """Until so many attempts of the run have ended."""
        with self.log_on_failure(run):
            self.cluster.wait_for(lambda: len(self.attempts(run)) >= count, DEADLINE_S, f"{run} has not ended")

    def waits_for_terminals(self) -> list[int]:
        """Until whatever was typed has ended; returns the exit statuses."""
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
        """By the name of a signal to what was typed, or to the ranks; or by a Slurm command."""
        program, *words = how.split()
        if f"SIG{program}" in signal.Signals.__members__:
            for terminal in self.terminals:
                terminal.send_signal(signal.Signals[f"SIG{program}"])
        elif program == "ranks":
            for pid, command, environ in processes():
                if environ.get("SUBMITIT_LOCAL_JOB_ID") == self.job(run) and "submitit.core._submit" in command:
                    os.kill(pid, signal.Signals[f"SIG{words[0]}"])
        else:
            self.cluster.run(program, *words, self.job(run))

    def tidies_up(self) -> None:
        """End what a test has left, after a failure."""
        for terminal in self.terminals:
            terminal.kill()
            terminal.wait()
        self.terminals.clear()
        self.cluster.run("scancel", "--me")


@pytest.fixture(scope="session")
def room(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Where all launchers are at hand. In CI (LASTSTEP_REQUIRE_ALL=1) it is a failure, not a skip, if one is not."""
    desk = Desk(cluster, tmp_path_factory.mktemp("desk"))
    programs = {"mpirun": "apt-get install openmpi-bin", "jupyter-execute": "pip install nbclient ipykernel"}
    for program, how in programs.items():
        if not shutil.which(program, path=desk.env["PATH"]):
            lack = f"no {program} on this machine: {how}"
            pytest.fail(lack) if os.environ.get("LASTSTEP_REQUIRE_ALL") else pytest.skip(lack)
    return desk


@pytest.fixture
def desk(room: Desk) -> Iterator[Desk]:
    yield room
    room.tidies_up()
