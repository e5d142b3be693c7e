"""A short Slurm job in which every rank says hello: who came, who did not, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from submitit.core.utils import pickle_load

from trainer.cluster import code_copy, sbatch, submission
from trainer.cluster.queue import Queue
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.doctor.hello import Greeting, Hello, came
from trainer.rundir import RunDir
from trainer.world.slurm import SlurmError, command

LIMIT_MIN = 10
SIGNAL_S = 30  # before that limit; nobody listens, but submitit insists
POLL_S = 0.2
QUEUE_S = 5.0  # between two questions to the scheduler, which all users share
# When the others have failed or are done, a rank that has not even started by now will not come; and what one wrote
# on another node may take so long to be seen here.
LATE_S = 10.0


class RollCall:
    """The job, and what has become of its ranks so far."""

    def __init__(self, config: Config) -> None:
        """Submit it. Raises ConfigError when that cannot be; then nothing is left behind."""
        root = Path(config.launch.root).expanduser().absolute()
        launch = dataclasses.replace(config.launch, root=str(root), time_min=LIMIT_MIN, signal_delay_s=SIGNAL_S)
        config = dataclasses.replace(config, launch=launch)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
        except OSError as error:
            raise ConfigError(f"launch.root={root}: cannot be written: {error.strerror}") from None
        run = RunDir(self.folder)
        try:
            code_copy.copy_code(run, config)  # as every run does: its nodes must see it, and run it
            executor = sbatch.job_executor(launch, run, [], [], {"no-requeue": True})
            executor.update_parameters(job_name="doctor")
            (self.job,) = submission.submit_jobs(executor, [Hello(config, self.folder)])
        except ConfigError:
            self.remove()
            raise
        self.size = launch.world_size
        self.greetings: dict[int, Greeting] = {}
        self.errors: dict[int, str] = {}

    def wait(self, tell: Callable[[str], None]) -> None:
        """Until every rank has said something, or no more will. `tell` is called with how the job stands."""
        asked_at, last, gone = 0.0, "", False
        heard_at = time.monotonic()
        while len(self.greetings) + len(self.errors) < self.size:
            if self._listen():
                heard_at = time.monotonic()
            waited_for = came(self.folder).keys() - self.greetings.keys() - self.errors.keys()
            late = time.monotonic() > heard_at + LATE_S
            if late and (gone or ((self.greetings or self.errors) and not waited_for)):
                return
            if not gone and time.monotonic() > asked_at + QUEUE_S:
                asked_at = time.monotonic()
                jobs = Queue.ask([RunDir(self.folder)]).jobs
                found = (jobs or {}).get(self.job.job_id)
                stands = f"{found.state} {found.reason}".strip().lower() if found else last
                if stands != last:
                    tell(stands)
                    last = stands
                if jobs is not None and found is None:
                    gone, heard_at = True, time.monotonic()
            time.sleep(POLL_S)

    def absences(self) -> list[str]:
        """Each rank that did not say hello, and why, as far as is known."""
        hosts = came(self.folder)
        lines = []
        for rank in sorted(set(range(self.size)) - self.greetings.keys()):
            where = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
            if rank in self.errors:
                why = self.errors[rank]
            elif rank in hosts:
                why = "came, and was ended before it was done"
            else:
                why = f"never came: its node does not see {self.folder}, or Python does not start there"
            lines.append(f"{where}: {why}")
        return lines

    def cancel(self) -> None:
        """End the job, if it has not ended yet."""
        with contextlib.suppress(SlurmError):
            command("scancel", self.job.job_id)

    def remove(self) -> None:
        """Remove all that it has left."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self) -> bool:
        """Read what ranks have said since; whether there was anything."""
        news = False
        for rank in set(range(self.size)) - self.greetings.keys() - self.errors.keys():
            result = self.job.task(rank).paths.result_pickle
            # Not there yet, or on a network file system not all of it.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                outcome, said = pickle_load(result)
                news = True
                if outcome == "success":
                    self.greetings[rank] = said
                else:
                    self.errors[rank] = str(said).strip().splitlines()[-1]
        return news
