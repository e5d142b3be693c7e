"""The short run whose disk misbehaves, and what must be true of it afterwards.

Two scenarios. `local`: two ranks under `--local`; rank 1 dies, rank 0 saves the step, the ranks start again in place,
rank 0 is sent SIGTERM, the run stops, `resume` continues it to its end. `job`: a job of one rank, with a stand-in for
Slurm; the rank dies, laststep.job.after_ranks has it started again, a SIGTERM stops and requeues it, and the next
start of the job ends the run.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.ranks import fingerprint
from tests.worst_day.disk import FOLDER, ROLE, ROLES, Disk, Fault, library
from tests.worst_day.task import ASIDE

NAME = "victim"
SETTINGS = (
    "task=tests.worst_day.task.Victim", "device=cpu", "data.name=fake", "data.args.samples=48",
    "data.args.classes=3", "data.args.image_size=8", "data.args.augment=true", "data.workers=0",
    "train.batch_size=4", "train.epochs=1", "train.log_every=3", "checkpoint.every_steps=3",
    "checkpoint.every_minutes=null", "checkpoint.keep_last=2", "launch.hang_timeout_s=10",
    "launch.max_failures=3",
)  # fmt: skip
STEPS = 12
MOST_COMMANDS = 6  # after which a run that has not ended has ended for good
PAUSE_S = 1.0  # before a command is typed again
# What the runs need without faults: commands, attempts, and steps that are done again at most.
USUAL = {"local": (2, 3, 0), "job": (5, 3, 3)}
DEADLINE_S = 150.0  # of one command: the ranks meet within 60 s, and a disk is looked at for 30 s
SCONTROL = """#!/bin/sh
# The part of Slurm that a job of one rank needs. Its folder has how often the job was requeued, and was to be.
here="${0%/*}"
case "$1 $2" in
requeue*) echo requeue >> "$here/requeues";;
"show job")
    restart=$(cat "$here/restart") requeues=$(wc -l < "$here/requeues") state=RUNNING
    [ $requeues -le $restart ] || state=PENDING
    echo JobId=7 JobState=$state Restarts=$requeues NodeList=n1 NumNodes=1 \\
    StartTime=2000-01-01T00:00:00 EndTime=2099-01-01T00:00:00;;
"show node") echo NodeName=n1 State=MIXED;;
"show hostnames") echo n1;;
"show config") echo KillWait = 30 sec;;
esac
"""


@dataclass
class Outcome:
    """What became of a run."""

    scenario: str = "local"
    wrong: list[str] = field(default_factory=list)  # the violations
    fired: int = 0  # how many calls were hit
    reasons: list[str] = field(default_factory=list)  # for which its attempts ended
    redone: int = 0  # steps that were done again
    commands: int = 0
    seconds: float = 0.0
    said: str = ""

    @property
    def kind(self) -> str:
        """What the fault did, in a few words."""
        if self.wrong:
            return "a promise broken"
        if not self.fired:
            return "the call did not come"
        commands, attempts, redone = USUAL[self.scenario]
        if self.redone > redone:
            return "steps done again"
        if self.commands > commands or len(self.reasons) > attempts:
            return "the attempt ended, the next one continued"
        return "not noticed"


class Victim:
    """A run on such a disk."""

    def __init__(self, folder: Path, faults: Sequence[Fault] = (), tracing: bool = False) -> None:
        self.folder, self.root, self.aside = folder, folder / "runs", folder / "aside"
        self.root.mkdir(parents=True)
        self.aside.mkdir()
        self.run = RunDir(self.root / NAME)
        self.disk = Disk(folder / "disk", self.root, faults, tracing)
        self.outcome = Outcome()
        self._python = forked_python(preload=library())
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SUBMITIT", "PYTEST"))}
        own = {
            FOLDER: str(self.disk.folder),
            ASIDE: str(self.aside),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._env = {**env, **own, "PYTHONPATH": str(PROJECT)}

    def lives(self, scenario: str, expected: Mapping[str, Any] | None) -> Outcome:
        """Carry out the run and check it. `expected`: the undisturbed result."""
        began = time.monotonic()
        self.outcome.scenario = scenario
        try:
            {"local": self._lives_locally, "job": self._lives_in_a_job}[scenario]()
            if not self.outcome.wrong:
                self._check(expected)
        except subprocess.TimeoutExpired as error:
            self.outcome.wrong.append(f"hangs: {' '.join(map(str, error.cmd[1:3]))} took longer than {error.timeout} s")
        except Exception as error:
            self.outcome.wrong.append(f"the run's folder cannot be read: {error!r}")
        self.outcome.fired = sum(self.disk.fired)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # How the run goes

    def _lives_locally(self) -> None:
        start = ("--local", "--tasks-per-node", "2", "--name", NAME, *SETTINGS, f"launch.root={self.root}")
        self._types("launch.py", *start)
        while not self._is_finished():
            if self.outcome.commands == MOST_COMMANDS:
                return self._ended_for_good("no command continues it")
            time.sleep(PAUSE_S if self._was_hit() else 0)
            known = self.run.config.exists()
            resume = ("resume", NAME, "--local", f"launch.root={self.root}")
            status = self._types("launch.py", *(resume if known else start))
            if status == 2 and not known and self.run.path.exists() and self._was_hit():  # the command was killed
                assert f"rm -r {self.run.path}" in (self.folder / "said.txt").read_text()
                shutil.rmtree(self.run.path)
            if status == 2 and known and not self._was_hit():
                return self._ended_for_good("`resume` refuses")

    def _lives_in_a_job(self) -> None:
        fake = self.folder / "bin"
        fake.mkdir()
        (fake / "scontrol").write_text(SCONTROL)
        (fake / "scontrol").chmod(0o755)
        requeues = fake / "requeues"
        requeues.touch()
        restart = restarts = 0
        while True:
            (fake / "restart").write_text(str(restart))
            job = {
                "PATH": f"{fake}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "SLURM_JOB_NUM_NODES": "1",
                "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(PROJECT),
                "SLURMD_NODENAME": "n1", "LASTSTEP_RESTARTS": str(restarts),
            }  # fmt: skip
            step = {
                "SLURM_STEP_ID": str(restarts), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1",
                ROLE: str(ROLES.index("rank 0")),
            }  # fmt: skip
            words = ("-m", "laststep", "--name", NAME, *SETTINGS, f"launch.root={self.root}")
            status = self._types(*words, env={**job, **step})
            if status == 0:
                break
            if self.outcome.commands > 2 * MOST_COMMANDS:
                return self._ended_for_good("the job starts without end")
            after = (
                "-m",
                "laststep.job.after_ranks",
                str(self.run.path),
                str(128 - status if status < 0 else status),
            )
            decided = self._types(*after, env={**job, ROLE: str(ROLES.index("after_ranks"))})
            again = decided == 0
            if decided < 0:  # it was killed: the lines of the batch shell requeue the job
                with requeues.open("a") as counted:
                    counted.write("requeue\n")
            was_requeued = requeues.read_text().count("requeue") > restart
            if was_requeued:
                restart, restarts = restart + 1, 0
            elif again:
                restarts += 1
            elif self._is_finished():  # the rank was killed after that was recorded
                break
            else:
                return self._ended_for_good("the job is not requeued")
        if not self._is_finished():
            self.outcome.wrong.append("the job ends with status 0, and the run has not finished")

    def _types(self, *words: str, env: Mapping[str, str] | None = None) -> int:
        """Run a command to its end; returns its exit status. Raises TimeoutExpired."""
        self.outcome.commands += 1
        command = [self._python, *words]
        with (self.folder / "said.txt").open("a") as said:
            said.write(f"$ {' '.join(words[:6])}\n")
            said.flush()
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**self._env, **(env or {})},
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
            )
            try:
                status = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._kill_all(process)
                raise
            said.write(f"[status {status}]\n")
        return status

    def _kill_all(self, process: subprocess.Popen[bytes]) -> None:
        """Kill everything that names this run's folder in its command line; its forked processes end with it."""
        process.kill()
        process.wait()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if str(self.root).encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    def _was_hit(self) -> bool:
        return any(self.disk.fired)

    def _is_finished(self) -> bool:
        return [record["reason"] for record in read_lines(self.run.attempts)][-1:] == ["finished"]

    def _ended_for_good(self, how: str) -> None:
        self.outcome.wrong.append(f"the run ends for good: {how}")

    # What must be true of it

    def _check(self, expected: Mapping[str, Any] | None) -> None:
        records = read_lines(self.run.attempts)
        self.outcome.reasons = [record["reason"] for record in records]
        self.outcome.redone = sum(record["lost_steps"] for record in records)
        wrong = self.outcome.wrong
        for before, after in itertools.pairwise(records):
            kept = before["end_step"] - before["lost_steps"]
            if after["start_step"] != kept:
                wrong.append(
                    f"attempt {before['attempt']} kept step {kept}, the next one began at {after['start_step']}"
                )
        if [record["attempt"] for record in records] != list(range(len(records))):
            wrong.append(f"the attempts are numbered {[record['attempt'] for record in records]}")
        if left := [path.name for path in (self.run.attempt_now, self.run.attempt_ended) if path.exists()]:
            wrong.append(f"the run has ended, and left {left}")
        wrong += self._false_records(records)
        found = fingerprint(self.run)
        if expected is not None:
            wrong += [f"another {name}: {found[name]}" for name in found if found[name] != expected[name]]
        steps = [line["step"] for line in found["metrics"] if "time" not in line and "loss" in line]
        if steps[:STEPS] != list(range(1, STEPS + 1)):
            wrong.append(f"metrics.jsonl has the steps {steps}")

    def _false_records(self, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Attempts whose record differs from what the ranks noted aside."""
        begun: dict[tuple[Any, ...], list[int]] = {}
        for note in self.aside.glob("*.[01]"):
            head, _, steps = note.read_text().partition("\n")
            begun.setdefault(tuple(json.loads(head)), []).append(len(steps))
        wrong = []
        for record in records:
            own = (record["job_id"], record["restart"], record["step_id"], record["step_restarts"])
            done = begun.pop(own, [0])
            start, end = record["start_step"], record["end_step"]
            least = start if record["reason"] == "lost" else max(start, start + min(done) - 1)
            if not least <= end <= start + max(done):
                wrong.append(
                    f"attempt {record['attempt']} ({record['reason']}) began at step {start}, its ranks began {done} "
                    f"more, and its record says that it ended at step {end}"
                )
        return wrong + [f"an attempt that trained has no record: {own}" for own in begun]


@functools.cache
def expected(scenario: str, folder: Path) -> dict[str, Any]:
    """The result of the scenario on a disk without faults. Raises RuntimeError if that is not as it should be."""
    victim = Victim(folder / f"undisturbed-{scenario}")
    outcome = victim.lives(scenario, None)
    if outcome.wrong:
        raise RuntimeError(f"the undisturbed run {victim.run.path}: {outcome.wrong}")
    return fingerprint(victim.run)


def carry_out(
    scenario: str,
    fault: Fault,
    folder: Path,
    undisturbed: Mapping[str, Any],
    keep: Callable[[Path], object] | None = None,
    always: bool = False,
) -> Outcome:
    """One run with one fault. Its folder is removed; before that, `keep` gets it if a promise was broken, or always."""
    victim = Victim(folder, [fault])
    outcome = victim.lives(scenario, undisturbed)
    if outcome.wrong:
        outcome.said = (folder / "said.txt").read_text(errors="replace")[-6000:]
    if keep is not None and (outcome.wrong or always):
        keep(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome
