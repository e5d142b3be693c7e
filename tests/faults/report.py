"""What is said of the faults: a line for each as it goes, one table at the end, a page for docs/."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults import site
from tests.faults.faults import FAULTS
from tests.faults.plan import Moment

COLUMNS = (
    "fault",
    "what it does",
    "times",
    "came back",
    "lost steps (allowed)",
    "worst time to a new step",
    "violations",
)


@dataclass
class Hit:
    """One fault that struck, and what came of it."""

    run: str
    fault: str
    moment: Moment  # where it found the run
    after_ms: int  # the planned delay
    back_s: float = 0.0  # from the fault to the first new step
    by: str = ""  # who brought the run back: itself, its user; or it stayed
    lost: int = 0
    allowed: int = 0
    recorded: str = ""  # the reason in attempts.jsonl
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What has happened so far."""

    seed: int
    planned: int
    at_once: int
    lacks: dict[str, str]
    hits: list[Hit] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # of runs as wholes
    runs: int = 0
    began: float = field(default_factory=time.time)

    @property
    def violations(self) -> list[str]:
        """All that was wrong, a line each."""
        return [f"{_place(hit)}: {what}" for hit in self.hits for what in hit.wrong] + self.wrong

    def line(self, hit: Hit) -> str:
        """One fault, as it goes."""
        outcome = f"{hit.by or 'lost'} after {hit.back_s:.1f} s".ljust(32) + f"lost {hit.lost}".ljust(10) + hit.recorded
        head = f"{len(self.hits):>3}/{self.planned}  {_minutes(time.time() - self.began)}  {_place(hit):<66}"
        return "".join([head, outcome, *(f"\n         WRONG  {what}" for what in hit.wrong)])

    def terminal(self) -> str:
        """The table, and all that was wrong."""
        rows = [COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        wrong = [f"VIOLATION  {violation}" for violation in self.violations]
        return "\n".join(["", *lines, "", *self._summary(), *wrong])

    def markdown(self) -> str:
        """The page."""
        table = [COLUMNS, ["---"] * len(COLUMNS), *self._rows()]
        return "\n".join(
            [
                f"{HEAD}",
                *(f"* {line}" for line in self._summary()),
                *(f"* VIOLATION: {violation}" for violation in self.violations),
                "",
                *(f"| {' | '.join(row)} |" for row in table),
                "",
                FOOT,
            ]
        )

    def _rows(self) -> list[tuple[str, ...]]:
        by_kind = {name: [hit for hit in self.hits if hit.fault == name] for name in FAULTS}
        rows = [_row(name, FAULTS[name].does, hits) for name, hits in by_kind.items() if hits]
        return [*rows, _row("all", "", self.hits)]

    def _summary(self) -> list[str]:
        moments = Counter(hit.moment for hit in self.hits)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "submitit")}
        slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.split()[-1]
        lines = [
            f"{len(self.hits)} faults of {self.planned} planned, seed {self.seed}, in {self.runs} runs, "
            f"{self.at_once} at once; {len(self.violations)} violations",
            f"where they found the run: {', '.join(f'{moment.words} {moments[moment]}' for moment in Moment)}",
            f"torch {versions['torch']}, submitit {versions['submitit']}, Slurm {slurm}, "
            f"Python {platform.python_version()}, {os.cpu_count()} cores",
            f"partitions {site.BATCH}, {site.NOTICE} (GraceTime={site.NOTICE_S}), {site.SCAVENGE} (PreemptMode=CANCEL, "
            f"GraceTime={site.CANCEL_NOTICE_S}), {site.URGENT} (preempts); KillWait={site.KILL_WAIT_S}, "
            f"SlurmdTimeout={site.SLURMD_TIMEOUT_S}",
            f"{time.strftime('%Y-%m-%d', time.localtime(self.began))}, {_minutes(time.time() - self.began)} (min:s)",
        ]
        return lines + [f"not tried, {what}: {why}" for what, why in self.lacks.items()]


HEAD = """\
# Faults

Random faults at random moments, on real training runs on a throwaway Slurm: written by `python -m tests.faults`, which
`make chaos` calls. After each fault the run must come back, and may have lost no more steps than are allowed; at its
end its weights and every line of its metrics must be those of a run that nobody touched.
"""
FOOT = """\
*Came back*: "itself" needed nobody; "launch.py resume" was typed by the harness, as a user would; "stayed" means that
the attempt was not ended at all. *Lost steps* are counted by the harness, from what each rank began, not taken from the
run's word, and are compared with it; allowed are none, or those since the last save (of a damaged checkpoint: since the
one before). *Time to a new step* is from the fault (of a time limit: from its signal) until the next attempt has done a
step; Slurm holds a requeued job for 6 s of it.

The plan of runs, faults, delays and targets is a function of the seed alone; where exactly a fault finds a run, and so
what it costs, depends on the machine's speed too.
"""


def _row(name: str, does: str, hits: Sequence[Hit]) -> tuple[str, ...]:
    ways = Counter(hit.by for hit in hits if hit.by)
    came = ", ".join(f"{count} {way}" for way, count in ways.most_common()) or "0"
    worst = max(hits, key=lambda hit: hit.lost, default=None)
    lost = f"{worst.lost} ({worst.allowed})" if worst else ""
    slowest = f"{max((hit.back_s for hit in hits), default=0.0):.1f} s"
    return name, does, str(len(hits)), came, lost, slowest, str(sum(bool(hit.wrong) for hit in hits))


def _place(hit: Hit) -> str:
    return f"{hit.run}  {hit.fault} in: {hit.moment.words} (+{hit.after_ms} ms)"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
