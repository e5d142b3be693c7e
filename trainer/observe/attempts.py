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

    def __init__(self, run: RunDir, world: World, start_step: int) -> None:
        """The attempt begins, at the state of `start_step`. Call before metrics.jsonl is rewound to it: what a lost
        attempt had reached stands there."""
        self.run = run
        ended = read_lines(run.attempts)
        self._enter_lost({record["attempt"] for record in ended}, start_step)
        self.record: dict[str, Any] = {
            "attempt": len(read_lines(run.attempts)),
            "job_id": world.job_id,
            "restart": world.restart,
            "hosts": list(world.hosts),
            "world_size": world.size,
            "start": time.time(),
            "end": None,
            "start_step": start_step,
            "end_step": start_step,
            "reason": None,
            "lost_steps": 0,
            "error": None,
        }
        temporary = run.attempt_now.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.record) + "\n")
        temporary.replace(run.attempt_now)

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
        torn = self.run.attempts.exists() and not self.run.attempts.read_bytes().endswith(b"\n")
        with self.run.attempts.open("a") as file:
            # A line cut short by a power cut must not swallow this one.
            file.write(("\n" if torn else "") + json.dumps(record) + "\n")

    def _enter_lost(self, ended: set[int], start_step: int) -> None:
        """Enter the attempt that left attempt.json behind, unless it got as far as entering itself."""
        for record in read_lines(self.run.attempt_now):
            if record["attempt"] not in ended:
                last_sign = self.run.metrics if self.run.metrics.exists() else self.run.attempt_now
                reached = max(start_step, MetricsFile(self.run.metrics).last_step())
                record |= {
                    "end": max(record["start"], last_sign.stat().st_mtime),
                    "end_step": reached,
                    "reason": "lost",
                    "lost_steps": reached - start_step,
                }
                self._append(record)


def count_reasons(run: RunDir) -> Counter[str]:
    """How many attempts of a run ended for each reason."""
    return Counter(record["reason"] for record in read_lines(run.attempts))
