"""A user of a throwaway Slurm, who types `launch.py` commands in the project's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from laststep import script
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.cluster import Cluster
from tests.slurm.processes import cut_power, parent, processes
from tests.support.forked import forked_python, process_of
from tests.support.project import DEADLINE_S, PROJECT

T = TypeVar("T")


begun: list[subprocess.Popen[str]] = []  # what the users of this test process have begun


def end_what_began(after: int) -> None:
    """End the processes begun after the first `after` ones, and print what those still running had printed."""
    while len(begun) > after:
        process = begun.pop()
        if process.poll() is None:
            process.kill()
            said, _ = process.communicate(timeout=DEADLINE_S)
            print(f"{process.args!r} was still at work, and had printed:\n{said}")
        elif process.stdout is not None:
            process.stdout.close()


class User:
    """A user of a cluster, who works in the project's folder or in one of their own.

    `python` starts the commands and the ranks: by default forked processes, see tests/support/forked; sys.executable
    for tests of what differs there.
    """

    def __init__(self, cluster: Cluster, root: Path, python: str | None = None, folder: Path = PROJECT) -> None:
        self.cluster = cluster
        self.root = root
        self.folder = folder
        self.program = os.path.relpath(PROJECT / "launch.py", folder)
        self.python = python or forked_python()
        # Jobs inherit this environment from sbatch.
        self.site = str(root / "site.yaml")  # what each command reads; a program passes it to Config.load
        self.env = {**cluster.env, "OMP_NUM_THREADS": "1", "LASTSTEP_SITE": self.site}
        root.mkdir(parents=True, exist_ok=True)
        Path(self.site).write_text(f"launch: {{python: {self.python}}}\n")

    def types(self, *words: str, status: int = 0) -> str:
        """Run `python launch.py WORDS` and return what it printed. Any other exit status fails the test."""
        ours, scripts = script.split(words) if "resume" not in words else (words, [])
        separator = ["--"] if "--" in words and scripts == list(words[words.index("--") + 1 :]) else []
        command = [self.python, self.program, *ours, f"launch.root={self.root}", *separator, *scripts]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == status, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """Start `python launch.py WORDS`."""
        command = [self.python, self.program, *words, f"launch.root={self.root}"]
        begun.append(
            subprocess.Popen(
                command, cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return begun[-1]

    def run(self, name: str) -> RunDir:
        """The folder of the run with this name."""
        return RunDir(self.root / name)

    def attempts(self, name: str) -> list[dict[str, Any]]:
        """The records of the run's ended attempts."""
        return read_lines(self.run(name).attempts)

    def verify(self, name: str) -> list[dict[str, Any]]:
        """The output of `launch.py verify --json`."""
        found: list[dict[str, Any]] = json.loads(self.types("verify", name, "--json"))
        return found

    def job_of(self, name: str) -> str:
        """The job id of the run; waits until it has been submitted."""
        pickles = self.waits(name, lambda: list(self.run(name).logs.glob("*_submitted.pkl")), "was not submitted")
        return pickles[0].name.split("_")[0]

    def waits(self, name: str, condition: Callable[[], T], failure: str) -> T:
        """Wait until `condition` returns something true, and return that. At the deadline the error says that run
        `name` has this `failure`, and what its logs end with."""
        try:
            return self.cluster.wait_for(condition, DEADLINE_S, f"{name} {failure}")
        except TimeoutError as error:
            ends = [f"{log.name} ends:\n{log.read_text()[-1500:]}" for log in sorted(self.run(name).logs.glob("*.out"))]
            raise TimeoutError("\n".join((str(error), *ends))) from None

    def waits_for(self, name: str, text: str, times: int = 1) -> None:
        """Wait until the ranks of the run have printed `text` this many times together."""
        logs = self.run(name).logs

        def printed() -> bool:
            return sum(log.read_text().count(text) for log in logs.glob("*_log.out")) >= times

        self.waits(name, printed, f"did not print {text!r}")

    def waits_for_end(self, name: str, reason: str) -> list[dict[str, Any]]:
        """Wait until an attempt of the run has ended for `reason`; return the records of all attempts."""

        def ended() -> bool:
            return any(attempt["reason"] == reason for attempt in self.attempts(name))

        self.waits(name, ended, f"has no attempt that ended as {reason}")
        return self.attempts(name)

    def kills(self, name: str, *ranks: int) -> None:
        """Send SIGKILL to these ranks of the run, in this order. A forked one dies with its supervisor."""
        self.signals(name, signal.SIGKILL, *ranks)

    def kills_below_its_supervisor(self, name: str, rank: int) -> None:
        """Send SIGKILL to this rank of the run alone, also to a forked one."""
        pids = self._started(name)
        (client,) = (pid for pid, number in pids.items() if number == rank and parent(pid) not in pids)
        supervisor = process_of(client, self.python)
        (process,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        os.kill(int(process), signal.SIGKILL)

    def signals(self, name: str, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to these ranks of the run, in this order."""
        pids = self._started(name)
        supervisors = {parent(pid) for pid in pids}
        pid_of = {rank: pid for pid, rank in pids.items() if pid not in supervisors}
        for rank in ranks:
            os.kill(process_of(pid_of[rank], self.python), number)

    def _started(self, name: str) -> dict[int, int]:
        """The rank that each process of the run belongs to, by pid: supervisors, and their ranks unless forked."""
        return {
            pid: int(environ["SLURM_PROCID"])
            for pid, command, environ in processes()
            if "submitit.core._submit" in command and str(self.run(name).logs) in command and command[0] != "srun"
        }

    def kills_srun(self, name: str) -> None:
        """Send SIGKILL to the run's srun, but first to its child process, which would have the ranks killed."""
        found = [pid for pid, command, _ in processes() if command[0] == "srun" and str(self.run(name).logs) in command]
        assert found, f"no srun of {name}"
        for pid in sorted(found, key=lambda pid: parent(pid) not in found):
            os.kill(pid, signal.SIGKILL)

    def kills_node(self, node: str) -> None:
        """Kill slurmd and everything that it started, as a power cut would."""
        self.cluster.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
        ours = {"SLURM_CONF": str(self.cluster.conf), "SLURMD_NODENAME": node}
        tasks = {pid for pid, _, environ in processes() if ours.items() <= environ.items()}
        keepers = {pid for pid, command, _ in processes() if command[0].startswith("slurmstepd")}
        parents = set()
        for pid in tasks:
            with contextlib.suppress(OSError):  # it has ended
                parents.add(parent(pid))
        cut_power(tasks | keepers & parents)

    def waits_until_gone(self, job: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the job has left the queue."""
        self.cluster.wait_for(
            lambda: not self.cluster.run("squeue", "-h", "-j", job, check=False), deadline_s, f"job {job} did not end"
        )
