"""The attempt that has signed the run's lock: whether it lives, or its survivors may be saving its last step.

When rank 0 dies, the lock is free at once. Its survivors need a moment to notice, and then as long as the state takes
to write. If an attempt of another job signed the lock meanwhile, none could commit any more. What is known of them:

    attempt.json            it is there until the end of the attempt is recorded: then there is nothing left to save
    the lock                a survivor that writes holds it
    rescue/ATTEMPT/         the leader rewrites its file in every round, see laststep.attempt.rescue
    Slurm                   says whether the job has ended: then no rank is left, whatever attempt.json says
    the job itself          a start of the same job begins once the earlier one has ended
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import NamedTuple

from laststep.attempt.rescue import leader_file
from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config, changed_ends
from laststep.config.errors import ConfigError
from laststep.config.schema import COMMAND
from laststep.ranks.disk import LOCK_START_S, Before, Patience, look_anew
from laststep.ranks.process import is_running
from laststep.ranks.slurm import NEVER, UNENDED, SlurmError, UnknownJob, is_job_id, show_other_job, unix_time
from laststep.ranks.world import World, hostname
from laststep.records import kept_files
from laststep.records.attempt_record import OpenAttempt, read_attempts, read_ended_attempts, record_start
from laststep.records.plan import read_plan
from laststep.rundir import RunDir
from laststep.say import say

# How long nothing may be seen of survivors before the run is begun without them. On one host they notice a death within
# a second, and another of them leads after 5 s; across nodes a dead host is noticed later. Where Slurm shows that their
# job lives, there is time: ranks wait for a rank 0 that begins for a minute at least.
UNSEEN_S = {True: 40.0, False: 6.0}  # if Slurm shows their job, else
ASK_SLURM_S = 5.0
LOOK_S = 1.0
CLOCKS_S = 120.0  # by which the clocks of a node and of the controller may differ


class Predecessor(Before):
    """What the run folder and Slurm say about the attempt that has signed the lock."""

    def __init__(self, run: RunDir, world: World, patience_s: float = LOCK_START_S) -> None:
        """`patience_s`: how long to wait for a disk that does not show attempt.json; then OSError is raised."""
        self._run, self._world, self._patience_s = run, world, patience_s
        self._seen_at = time.monotonic()
        self._leaders: tuple[object, ...] = ()  # the files of the leaders of its rescue, as last seen
        self._may_save: tuple[float, bool] | None = None
        self._slurm: tuple[float, bool | None] | None = None

    def holds(self) -> None:
        """At this moment a process of it holds the lock."""
        self._seen_at = time.monotonic()

    def may_save(self, signed: str) -> bool:
        """Whether its survivors may be about to save its last step, although its rank 0 does not hold the lock."""
        now = time.monotonic()
        if self._may_save is None or now >= self._may_save[0] + LOOK_S:
            self._may_save = now, self._look(signed)
        return self._may_save[1]

    def lives(self, signed: str, process: str) -> bool:
        """Whether its rank 0 lives, for file systems without locks: False in doubt."""
        record = self._open_record(signed)
        if record is None:
            return False
        if signed.rpartition(", on ")[2] == hostname():
            return is_running(process)
        return record["job_id"] != self._world.job_id and bool(self._lives_on_slurm(record))

    def _look(self, signed: str) -> bool:
        record = self._open_record(signed)
        if record is None or record["world_size"] == 1 or record["job_id"] == self._world.job_id:
            return False
        on_slurm = self._lives_on_slurm(record)
        if on_slurm is False:
            return False
        leaders = self._look_at_rescue()
        if leaders != self._leaders:
            self._leaders, self._seen_at = leaders, time.monotonic()
        if time.monotonic() < self._seen_at + UNSEEN_S[bool(on_slurm)]:
            return True
        say(f"no survivor of that attempt was seen for {UNSEEN_S[bool(on_slurm)]:.0f} s: beginning without them")
        return False

    def _open_record(self, signed: str) -> OpenAttempt | None:
        """The record of the attempt, if its end is not recorded."""
        look_anew(self._run.path)
        for record in Patience(self._patience_s, say).insist(lambda: read_attempts(self._run.attempt_now)):
            if not record["reason"] and signed.startswith(f"{record_start(record)}, on "):
                return record
        return None

    def _lives_on_slurm(self, record: OpenAttempt) -> bool | None:
        """Whether Slurm still has processes of its job; None if it does not say, or does not know such jobs."""
        now = time.monotonic()
        if self._slurm is None or now >= self._slurm[0] + ASK_SLURM_S:
            self._slurm = now, _lives_on_slurm(record) if is_job_id(record["job_id"]) else None
        return self._slurm[1]

    def _look_at_rescue(self) -> tuple[object, ...]:
        """The leaders' files: the survivors' heartbeat. The folder of an attempt that has not begun has none."""
        found: list[object] = []
        look_anew(self._run.rescues)
        for folder in sorted(self._run.rescues.glob("*")):
            if folder.name == self._world.attempt:
                continue
            look_anew(folder)
            for term in itertools.count():
                try:
                    found.append((folder.name, term, leader_file(folder, term).read_bytes()))
                except OSError:
                    break
        return tuple(found)


def _lives_on_slurm(record: OpenAttempt) -> bool | None:
    try:
        job = show_other_job(record["job_id"])
    except UnknownJob:
        return False
    except SlurmError:
        return None
    if int(job.get("Restarts", record["restart"])) != record["restart"]:
        return False  # started again, so that start is over
    if record["start"] + CLOCKS_S < unix_time(job.get("StartTime", "")) < NEVER:
        return False  # another job has the id now
    return job.get("JobState") in (*UNENDED, "COMPLETING")


class Finish(NamedTuple):
    """The end of a run."""

    step: int
    total_steps: int
    metrics: dict[str, float]  # those of its last epoch


def finish_of(run: RunDir, config: Config) -> Finish | None:
    """The end of the run if it has come to it; None if it has not, if this configuration ends later, or in doubt."""
    ended = read_ended_attempts(run.attempts)
    if not ended or ended[-1]["reason"] != "finished" or run.attempt_now.exists():
        return None
    step, plan = ended[-1]["end_step"], read_plan(run.plan)
    if config.task == COMMAND:
        # Of that attempt: the next one may be beginning just now, with this configuration's words.
        words = kept_files.words_of(run, ended[-1]["attempt"])
        return Finish(step, step, {}) if words == config.script else None
    with contextlib.suppress(CheckpointError, ConfigError):
        manifest = CheckpointStore(run.checkpoints).manifest(step)
        if not changed_ends(Config.parse(manifest.config), config):
            return Finish(step, plan["total_steps"] if plan else step, manifest.metrics)
    return None
