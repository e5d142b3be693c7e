"""A run that a Python program or a notebook trains on this machine: `submit(config, local=True)`."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.metrics import is_step, last_lines
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.live_log import LiveLog
from laststep.submission.local import POLL_S, LocalRanks


class LocalJob:
    """The ranks of a run on this machine. They train in the background; a program that ends waits for them first."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self.run = run
        self._ranks = LocalRanks(config, run)
        # A thread of its own, because ranks stop when the thread that started them ends. Python waits for it at exit.
        with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        self._end = with_one_thread.submit(self._train)
        with_one_thread.shutdown(wait=False)

    @property
    def job_id(self) -> str:
        """The id of this start, as in submissions.jsonl and in the names of the logs."""
        return self._ranks.job_id

    def done(self) -> bool:
        """Whether the ranks have ended."""
        return self._end.done()

    def cancel(self) -> None:
        """Ask the ranks to stop after the present step and to save it; `python launch.py resume` continues the run."""
        self._ranks.send(signal.SIGINT)

    def result(self) -> dict[str, float]:
        """Print rank 0's log until the run ends; returns the metrics of the last epoch.

        An interrupt (Ctrl-C, or a notebook's stop button) stops the ranks, which save their last step; a second one
        kills them. Raises ConfigError when the ranks refuse the configuration, RuntimeError when the run did not
        finish.
        """
        try:
            self._follow()
        except KeyboardInterrupt:
            self.cancel()
            try:
                self._follow()
            except KeyboardInterrupt:
                self._ranks.send(signal.SIGKILL)
            raise
        return self._end.result()

    def _follow(self) -> None:
        with LiveLog(self.run, self._ranks.logs[0]) as log:
            while not self._end.done():
                log.update()
                time.sleep(POLL_S)
            log.update()

    def _train(self) -> dict[str, float]:
        self._ranks.start()
        while self._ranks.alive():
            time.sleep(POLL_S)
        status = self._ranks.status()
        if status == 2:
            refusal = self._ranks.refusal()
            if not self.run.checkpoints.exists():
                run_folders.remove(self.run)
            raise ConfigError(refusal)
        if status:
            how = "stopped" if status > 128 else "failed"
            raise RuntimeError(f"{self.run.name} {how} before its end; the ranks' logs are in {self.run.logs}")
        return next((line for line in reversed(last_lines(self.run.metrics)) if not is_step(line)), {})
