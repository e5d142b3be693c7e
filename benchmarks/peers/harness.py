"""Injects a fault into a training run on a throwaway Slurm and measures the cost from the run's record."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks._measure import PROJECT
from benchmarks.peers.workload import BATCH_SIZE, EPOCHS, LEARNING_RATE, MOMENTUM, RECORD, STEPS_PER_EPOCH
from laststep.cli.verify import inspect
from laststep.rundir import RunDir
from tests.slurm.cluster import Cluster

STRIKE_AT = STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2  # in the middle of the second epoch
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH
DEADLINE_S = 180.0  # for a job to start, to return after a fault, to leave the queue, or to finish
TIME_MIN = 60  # time limit of each job, which none reaches by itself


@dataclass(frozen=True)
class Outcome:
    """The cost of a fault. Steps count from the start of the run."""

    reached: int  # the last step of the attempt that was hit
    lost: int  # steps done more than once
    by_itself: bool  # whether the run continued or finished without manual intervention
    standstill_s: float | None  # from the last step of the attempt that was hit to the first new step
    same_weights: bool | None  # whether the weights equal those of the undisturbed run; None: the run did not finish


class TaskLoop:
    """One training run under one trainer, in its own folder, on the given cluster."""

    def __init__(self, trainer: str, folder: Path, cluster: Cluster) -> None:
        folder.mkdir(parents=True)
        self.trainer, self.folder, self.cluster = trainer, folder, cluster
        self.started = False

    def submit(self) -> None:
        """Run the command that a user would type to start the run or, the second time, to continue it."""
        subprocess.run(
            COMMANDS[self.trainer](self.folder, self.started),
            cwd=PROJECT,
            env={**self.cluster.env, "OMP_NUM_THREADS": "1", RECORD: str(self.folder)},
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
        )
        self.started = True

    def attempts(self) -> list[list[tuple[int, float]]]:
        """(step, Unix time) of each step, by attempt, in order. Attempts without a step are left out."""
        found: dict[str, list[tuple[int, float]]] = {}
        steps = self.folder / "steps.txt"
        for line in steps.read_text().splitlines() if steps.exists() else ():
            step, at, pid = line.split()
            found.setdefault(pid, []).append((int(step), float(at)))
        return list(found.values())

    def jobs(self, *options: str) -> list[str]:
        """Ids of the jobs in the queue of partition main."""
        return self.cluster.run("squeue", "-h", "-p", "main", "-o", "%i", *options).split()

    def weights(self) -> str | None:
        """Fingerprint of the final weights; None until the run has finished."""
        if not is_ours(self.trainer):
            file = self.folder / "weights.sha256"
            return file.read_text() if file.exists() else None
        newest = inspect(RunDir(self.folder / "run"))[-1:]
        if not newest or newest[0]["step"] != TOTAL_STEPS:
            return None
        found: str = newest[0]["weights_sha256"] or newest[0]["files_sha256"]
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition. Raises TimeoutError with `what`, a predicate such as "did not end"."""
        self.cluster.wait_for(condition, DEADLINE_S, f"{self.trainer} in {self.folder} {what}")

    def clear(self) -> None:
        """Cancel the jobs in the queue and wait until they are gone."""
        if jobs := self.jobs():
            self.cluster.run("scancel", *jobs)
        self.until(lambda: not self.jobs(), "stayed in the queue after scancel")


def undisturbed(training: TaskLoop) -> str:
    """The fingerprint of the final weights of a run without faults. Raises RuntimeError if it does not finish."""
    training.submit()
    training.until(lambda: not training.jobs(), "did not end")
    if (weights := training.weights()) is None:
        raise RuntimeError(f"{training.trainer} did not finish undisturbed; its logs are in {training.folder}")
    return weights


def hit(training: TaskLoop, strike: Callable[[TaskLoop, str], None], weights: str) -> Outcome:
    """Inject a fault in the middle of an epoch and wait for the run to end, resubmitting it if it does not return."""
    training.submit()
    training.until(lambda: len(training.attempts()) and training.attempts()[0][-1][0] >= STRIKE_AT, "did not start")
    (job,) = training.jobs("-t", "RUNNING")
    strike(training, job)
    with contextlib.suppress(TimeoutError):
        training.until(lambda: len(training.attempts()) > 1 or not training.jobs(), "did not return")
    by_itself = len(training.attempts()) > 1 or training.weights() is not None
    if not by_itself:
        training.clear()
        training.submit()
        training.until(lambda: len(training.attempts()) > 1, "did not return after resubmission either")
    try:
        training.until(lambda: not training.jobs(), "did not end")
    except TimeoutError:
        training.clear()

    first, *rest = training.attempts()
    steps = [step for attempt in (first, *rest) for step, _ in attempt]
    reached, at = first[-1]
    beyond = [time for attempt in rest for step, time in attempt if step > reached]
    final = training.weights()
    return Outcome(
        reached=reached,
        lost=len(steps) - len(set(steps)),
        by_itself=by_itself,
        standstill_s=round(beyond[0] - at, 1) if by_itself and beyond else None,
        same_weights=None if final is None else final == weights,
    )


def preempt(training: TaskLoop, job: str) -> None:
    """A higher-priority job takes all nodes: Slurm sends SIGTERM, then SIGKILL after KillWait, and requeues the job."""
    words = ("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    training.cluster.run("sbatch", *words)


def user_signal(training: TaskLoop, job: str) -> None:
    """Send SIGUSR2, the signal that requests a requeue, by hand."""
    training.cluster.run("scancel", "--signal=USR2", job)


def kill_one(training: TaskLoop, job: str) -> None:
    """Kill one rank, as the kernel does when a node is out of memory."""
    _kill(training, 1)


def kill_all(training: TaskLoop, job: str) -> None:
    """Kill every rank."""
    _kill(training, 0, 1)


def time_limit(training: TaskLoop, job: str) -> None:
    """Let the job reach its time limit within a minute or so, after a warning by SIGUSR2; the next attempt has the full
    time again."""
    minutes, seconds = training.cluster.run("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    limit = int(minutes) + (1 if int(seconds) <= 30 else 2)
    training.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    training.until(lambda: job not in training.jobs("-t", "RUNNING"), "outlived its time limit")
    deadline = time.monotonic() + DEADLINE_S
    while job in training.jobs() and time.monotonic() < deadline:
        if job in training.jobs("-t", "PENDING"):
            training.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={TIME_MIN}")
            return
        time.sleep(0.1)


def _kill(training: TaskLoop, *ranks: int) -> None:
    for pid in [int((training.folder / f"rank_{rank}.pid").read_text()) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)


def _plain(folder: Path, again: bool) -> list[str]:
    return [sys.executable, "-m", "benchmarks.peers.plain", str(folder)]


def _lightning(folder: Path, again: bool) -> list[str]:
    return _sbatch("autorequeue", folder, "SIGUSR2")


def _transformers(folder: Path, again: bool) -> list[str]:
    return _sbatch("huggingface", folder, "SIGTERM")


def _sbatch(module: str, folder: Path, warning: str) -> list[str]:
    """Start a script with srun in a job of its own, which gets this signal before its time limit."""
    rank = f"{sys.executable} -u -m benchmarks.peers.{module} {folder}"
    size = ("--nodes=2", "--ntasks-per-node=1", f"--time={TIME_MIN}", f"--signal={warning}@20", "--requeue")
    logs = ("--open-mode=append", f"--output={folder}/log_%j.txt")
    return ["sbatch", *size, *logs, f"--wrap=srun {rank}"]


def _laststep(folder: Path, again: bool) -> list[str]:
    training = {
        "task": "benchmarks.peers.laststep.Recorded",
        "train.epochs": EPOCHS,
        "train.batch_size": BATCH_SIZE,
        "optim.lr": LEARNING_RATE,
        "optim.momentum": MOMENTUM,
        "optim.weight_decay": 0,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    return _launch(folder, again, training)


def _adapted(framework: str) -> Callable[[Path, bool], list[str]]:
    task = {"task": f"benchmarks.peers.adapted.{framework}", "device": "cpu"}
    return lambda folder, again: _launch(folder, again, task)


def _launch(folder: Path, again: bool, training: Mapping[str, object]) -> list[str]:
    root = f"launch.root={folder}"
    if again:
        return [sys.executable, "launch.py", "resume", "run", root]
    words = [f"{key}={value}" for key, value in {**training, "launch.signal_delay_s": 20}.items()]
    return [sys.executable, "launch.py", "--nodes", "2", "--time", str(TIME_MIN), "--name", "run", root, *words]


def is_ours(trainer: str) -> bool:
    """Whether a run under this trainer is a run of Laststep."""
    return "Laststep" in trainer


# The command that a user types to start a run in a folder, or to continue it.
COMMANDS: dict[str, Callable[[Path, bool], list[str]]] = {
    "submitit, checkpointable": _plain,
    "Lightning, auto-requeue": _lightning,
    "Lightning on Laststep": _adapted("lightning"),
    "transformers, own resume": _transformers,
    "transformers on Laststep": _adapted("transformers"),
    "Laststep": _laststep,
}
FAULTS: dict[str, Callable[[TaskLoop, str], None]] = {
    "preempted (SIGTERM)": preempt,
    "SIGUSR2": user_signal,
    "time limit": time_limit,
    "SIGKILL of one rank": kill_one,
    "SIGKILL of all ranks": kill_all,
}
