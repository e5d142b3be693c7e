"""The roll call: a short Slurm job in which every rank says hello. It shows which ranks failed, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from submitit.core.utils import pickle_load

from laststep.code import code_copy
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.doctor.greeting import Greeting, Hello, signed_in
from laststep.ranks.disk import FreshView
from laststep.ranks.slurm import SlurmError, command
from laststep.rundir import RunDir
from laststep.runs.queue import Queue
from laststep.submission import sbatch

LIMIT_MIN = 10  # time limit of the job
SIGNAL_S = 30  # the job is signalled this long before its limit: submitit requires a value, but no rank uses the signal
POLL_S = 0.2
QUEUE_POLL_S = 5.0  # the scheduler is shared by all users, so it is asked less often
# Once the other ranks have failed or finished, give up on a rank that has not even started after this long. The files
# of another node may take a while to become visible here.
GIVE_UP_S = 10.0


class RollCall:
    """The job, and the results of its ranks so far."""

    def __init__(self, config: Config) -> None:
        """Submit the job. Raises ConfigError when that fails, and then leaves nothing behind."""
        root = Path(os.path.expanduser(config.launch.root)).absolute()
        launch = dataclasses.replace(config.launch, root=str(root), time_min=LIMIT_MIN, signal_delay_s=SIGNAL_S)
        config = dataclasses.replace(config, launch=launch)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
        except OSError as error:
            raise ConfigError(f"launch.root={root}: cannot be written: {error.strerror}") from None
        run = RunDir(self.folder)
        try:
            code_copy.copy_code(run, config)  # as for every run, which tests that the nodes can see and import it
            executor = sbatch.job_executor(config, run, options={"no-requeue": True})
            executor.update_parameters(job_name="doctor")
            (self._job,) = sbatch.submit_jobs(executor, [Hello(config, self.folder)])
        except ConfigError:
            self.remove()
            raise
        self.job_id = str(self._job.job_id)
        self.size = launch.world_size  # number of ranks
        self.greetings: dict[int, Greeting] = {}  # by rank
        self.errors: dict[int, str] = {}  # by rank

    def wait(self, on_state: Callable[[str], None]) -> None:
        """Wait until every rank has a result, or no more results can be expected. Calls `on_state` with each new state
        of the job in the queue."""
        asked_at, state, job_ended = 0.0, "", False
        last_news_at = time.monotonic()
        view = FreshView(1, self.folder, RunDir(self.folder).logs)
        while self._pending():
            view.refresh()
            if self._read_results():
                last_news_at = time.monotonic()
            working = signed_in(self.folder).keys() & self._pending()
            overdue = time.monotonic() > last_news_at + GIVE_UP_S
            if overdue and (job_ended or ((self.greetings or self.errors) and not working)):
                return
            if not job_ended and time.monotonic() > asked_at + QUEUE_POLL_S:
                asked_at = time.monotonic()
                jobs = Queue.ask([RunDir(self.folder)]).jobs
                job = (jobs or {}).get(self.job_id)
                new_state = f"{job.state} {job.reason}".strip().lower() if job else state
                if new_state != state:
                    on_state(new_state)
                    state = new_state
                if jobs is not None and job is None:
                    job_ended, last_news_at = True, time.monotonic()
            time.sleep(POLL_S)

    def failures(self) -> list[str]:
        """One line for each rank that did not say hello, with the reason as far as it is known."""
        hosts = signed_in(self.folder)
        lines = []
        for rank in sorted(set(range(self.size)) - self.greetings.keys()):
            who = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
            if rank in self.errors:
                why = self.errors[rank]
            elif rank in hosts:
                why = "started, but was ended before it finished"
            else:
                why = f"did not start: its node cannot see {self.folder}, or Python does not start there"
            lines.append(f"{who}: {why}")
        return lines

    def cancel(self) -> None:
        """Cancel the job, if it has not ended yet."""
        with contextlib.suppress(SlurmError):
            command("scancel", self.job_id)

    def remove(self) -> None:
        """Remove the job's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pending(self) -> set[int]:
        """The ranks that have no result yet."""
        return set(range(self.size)) - self.greetings.keys() - self.errors.keys()

    def _read_results(self) -> bool:
        """Read the results that ranks have written; returns whether there was a new one."""
        found = False
        for rank in self._pending():
            path = self._job.task(rank).paths.result_pickle
            # Not written yet or, on a network file system, not completely visible yet.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                outcome, result = pickle_load(path)
                found = True
                if outcome == "success":
                    self.greetings[rank] = result
                else:
                    self.errors[rank] = str(result).strip().splitlines()[-1]
        return found
