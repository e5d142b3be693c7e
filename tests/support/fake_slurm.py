"""A stand-in for Slurm's commands, for tests of what a job's own processes ask and order."""

from __future__ import annotations

import subprocess
from typing import Any


class FakeSlurm:
    """Answers scontrol, scancel and srun as a cluster with one job would. Its `answer` replaces subprocess.run."""

    def __init__(self, *nodes: str) -> None:
        self.job: dict[str, Any] | None = {"JobState": "RUNNING", "Restarts": 0}  # None: slurmctld is away
        self.states = dict.fromkeys(nodes, "MIXED")  # of the job's nodes
        self.silent: set[str] = set()  # nodes that are dead, which Slurm does not know yet
        self.partition_nodes = 5
        self.refuses = self.missing = False  # orders; every command
        self.lies = False  # it carries out an order, and reports an error
        self.away_for = 0  # how often an order, or the question that follows it, finds slurmctld away
        self.requeues = 0
        self._asked = False
        self.cancelled: list[str] = []
        self.updated: list[tuple[str, ...]] = []

    @property
    def excluded(self) -> list[str]:
        """The nodes that the job was kept from, by each update."""
        return [word.partition("=")[2] for words in self.updated for word in words if word.startswith("ExcNodeList=")]

    def answer(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """What a command prints, and its exit status. Any other program prints nothing."""
        if words[0] not in ("scontrol", "scancel", "srun"):
            return _done(words)
        if self.missing:
            raise FileNotFoundError(words[0])
        if self.job is None:
            return _failed(words, "Unable to contact slurm controller (connect failure)")
        if self.away_for and (words[1] == "requeue" or self._asked):
            self._asked = words[1] == "requeue"
            self.away_for -= 1
            return _failed(words, "Unable to contact slurm controller (connect failure)")
        if words[1] == "--version":
            return _done(words, "slurm 22.05.8")
        if words[0] == "srun":
            (node,) = (word.partition("=")[2] for word in words if word.startswith("--nodelist="))
            return _failed(words, "") if node in self.silent else _done(words)
        if words[0] == "scancel":
            self.cancelled.append(words[1])
            return _done(words)
        if words[1] == "update":
            self.updated.append(tuple(words[2:]))
            if not self.refuses:
                self.job |= {key: value for key, _, value in (word.partition("=") for word in words[3:])}
        elif words[1] == "requeue":
            self.requeues += not self.refuses
        else:
            return _done(words, self._shown(words[2:]))
        if self.lies and words[1] == "requeue":
            self.job["Restarts"] = 1
        return _failed(words, "Operation disabled\n") if self.refuses or self.lies else _done(words)

    def _shown(self, words: list[str]) -> str:
        assert self.job is not None
        if words[0] == "job":
            shown = {"NodeList": ",".join(self.states), **self.job}
            return (" " if "--oneliner" in words else "\n   ").join(f"{key}={value}" for key, value in shown.items())
        if words[0] == "node":
            return "\n".join(f"NodeName={node} State={state}" for node, state in self.states.items())
        if words[0] == "hostnames":
            return "\n".join(words[1].split(","))
        return f"PartitionName=main Default=YES TotalNodes={self.partition_nodes}"


def _done(words: list[str], out: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, 0, out and f"{out}\n", "")


def _failed(words: list[str], error: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, 1, "", error)
