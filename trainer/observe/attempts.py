"""attempts.jsonl: how each attempt of a run began and ended."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from trainer.observe.metrics import MetricsFile, read_lines
from trainer.rundir import RunDir
from trainer.world.detect import World


class AttemptLog:
    """Rank 0's record of its attempt.

    While the attempt runs it stands in attempt.json; its end moves it to attempts.jsonl. An attempt that could not say
    how it ended (a power cut, SIGKILL) leaves attempt.json behind, and the next one enters it as lost.
    """

    def __init__(self, run: RunDir, world: World) -> None:
        self.run = run
        self.unrecorded = self._left_behind()
        self.record: dict[str, Any] = {
            "attempt": len(read_lines(run.attempts)) + (self.unrecorded is not None),
            "job_id": world.job_id,
            "restart": world.restart,
            "hosts": list(world.hosts),
            "world_size": world.size,
            "start": time.time(),
            "end": None,
            "start_step": 0,
            "end_step": 0,
            "reason": None,
            "lost_steps": 0,
            "error": None,
        }

    def begin(self, start_step: int) -> None:
        """The state of `start_step` was restored. First enters the attempt that was left behind, if there is one."""
        if self.unrecorded is not None:
            reached = max(start_step, MetricsFile(self.run.metrics).last_step())
            self.unrecorded |= {
                "end": self.run.attempt_now.stat().st_mtime,
                "end_step": reached,
                "reason": "lost",
                "lost_steps": reached - start_step,
            }
            self._append(self.unrecorded)
        self.record |= {"start_step": start_step, "end_step": start_step}
        self.run.attempt_now.write_text(json.dumps(self.record) + "\n")

    def end(self, reason: str, end_step: int, lost_steps: int, error: str | None = None) -> None:
        """The attempt ends here. `lost_steps`: steps done and not kept."""
        self.record |= {
            "end": time.time(),
            "end_step": end_step,
            "reason": reason,
            "lost_steps": lost_steps,
            "error": error,
        }
        self._append(self.record)
        self.run.attempt_now.unlink(missing_ok=True)

    def _append(self, record: dict[str, Any]) -> None:
        with self.run.attempts.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _left_behind(self) -> dict[str, Any] | None:
        records = read_lines(self.run.attempt_now)
        return records[0] if records else None


def count_reasons(run: RunDir) -> Counter[str]:
    """How many attempts of a run ended for each reason."""
    return Counter(record["reason"] for record in read_lines(run.attempts))
