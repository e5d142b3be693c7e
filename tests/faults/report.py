"""Reports about the faults: a line for each one as it happens, a table at the end, and sections of docs/reports.md."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import site
from tests.faults.faults import ALL
from tests.faults.plan import Fault, Moment, RunPlan
from tests.support.project import PROJECT

COLUMNS = (
    "fault",
    "what happens",
    "count",
    "recovered",
    "lost steps (allowed)",
    "longest time to the next step",
    "violations",
)


@dataclass
class Hit:
    """One injected fault and its outcome."""

    run: str
    fault: str
    moment: Moment  # what the run was doing
    after_ms: int  # the planned delay
    back_s: float = 0.0  # from the fault to the first step of the next attempt
    by: str = ""  # what continued the run: "itself", "launch.py resume", or "stayed" if the attempt did not end
    lost: int = 0
    allowed: int = 0
    recorded: str = ""  # the reason in attempts.jsonl
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The faults injected so far."""

    seed: int
    plan: Sequence[RunPlan]
    at_once: int
    lacks: dict[str, str]
    hits: list[Hit] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # violations of a whole run, not of one fault
    runs: int = 0
    began: float = field(default_factory=time.time)
    spent_s: float = 0.0  # before this process
    done: dict[str, list[Hit]] = field(default_factory=dict)  # the faults of each run that is complete
    commits: list[str] = field(default_factory=lambda: [commit()])  # of the code under faults, the newest last
    repeated: list[str] = field(default_factory=list)  # runs that had a violation before
    interrupted: bool = False
    silent: bool = False  # whether collectives do not fail when a rank dies

    @property
    def planned(self) -> int:
        """How many faults are planned."""
        return sum(len(run.shots) for run in self.plan)

    def save(self, path: Path) -> None:
        """Keep what is known of complete runs, for `load`."""
        done = {run: [{**asdict(hit), "moment": hit.moment.name} for hit in hits] for run, hits in self.done.items()}
        kept = {"plan": fingerprint(self.plan), "runs": self.runs, "wrong": self.wrong, "done": done}
        kept |= {"commits": self.commits, "repeated": self.repeated}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**kept, "spent_s": self.elapsed_s}))
        temporary.replace(path)

    def keep_good(self, path: Path) -> None:
        """Keep the runs without violations: the next process repeats the others, once what they showed is corrected."""
        names = [hit.run for hit in self.hits if hit.wrong] + [line.partition(":")[0] for line in self.wrong]
        bad = {name.partition(".")[0] for name in names}
        self.done = {run: hits for run, hits in self.done.items() if run not in bad}
        self.runs, self.wrong, self.repeated = self.runs - len(bad), [], sorted({*self.repeated, *bad})
        self.save(path)

    def load(self, path: Path) -> None:
        """Continue with the results of an interrupted harness, if there are any. Raises ValueError if they are those of
        another plan."""
        if not path.exists():
            return
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["plan"] != fingerprint(self.plan):
            raise ValueError(f"{path} has the results of other faults: remove it, or name another file")
        self.runs, self.wrong, self.spent_s = kept["runs"], kept["wrong"], kept["spent_s"]
        self.commits = list(dict.fromkeys([*kept["commits"], *self.commits]))
        self.repeated = kept["repeated"]
        for run, hits in kept["done"].items():
            self.done[run] = [Hit(**{**hit, "moment": Moment[hit["moment"]]}) for hit in hits]
            self.hits += self.done[run]

    @property
    def elapsed_s(self) -> float:
        """Seconds that the harness has taken so far."""
        return self.spent_s + time.time() - self.began

    @property
    def violations(self) -> list[str]:
        """All violations, one line each."""
        return [f"{_place(hit)}: {what}" for hit in self.hits for what in hit.wrong] + self.wrong

    def line(self, hit: Hit) -> str:
        """The line for one fault."""
        outcome = f"{hit.by or 'lost'} after {hit.back_s:.1f} s".ljust(32) + f"lost {hit.lost}".ljust(10) + hit.recorded
        head = f"{len(self.hits):>3}/{self.planned}  {minutes(self.elapsed_s)}  {_place(hit):<66}"
        return "".join([head, outcome, *(f"\n         WRONG  {what}" for what in hit.wrong)])

    def terminal(self) -> str:
        """The table and all violations, as text."""
        rows = [COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        wrong = [f"VIOLATION  {violation}" for violation in self.violations]
        return "\n".join(["", *lines, "", *self._summary(), f"the runs were doing: {_moments(self.hits)}", *wrong])

    def markdown(self) -> str:
        """The table and all violations, as a section of a page."""
        *rows, total = self._rows()
        lines = [*self._summary(), f"recovered: {total[3]}", *(f"VIOLATION: {wrong}" for wrong in self.violations)]
        return page(lines, [*rows, total], self.silent)

    def _rows(self) -> list[tuple[str, ...]]:
        by_kind = {name: [hit for hit in self.hits if hit.fault == name] for name in ALL}
        rows = [_row(name, ALL[name].does, hits) for name, hits in by_kind.items() if hits]
        return [*rows, _row("all", "", self.hits)]

    def _summary(self) -> list[str]:
        lines = [
            f"{len(self.hits)} faults of {self.planned} planned, seed {self.seed}, in {self.runs} runs, "
            f"{self.at_once} at a time; {len(self.violations)} violations",
            *machine_lines(self.commits),
            f"GraceTime={site.NOTICE_S}, with PreemptMode=CANCEL {site.CANCEL_NOTICE_S}; KillWait={site.KILL_WAIT_S}, "
            f"SlurmdTimeout={site.SLURMD_TIMEOUT_S}",
            f"{minutes(self.elapsed_s)} (min:s)",
        ]
        if self.repeated:
            lines.append(f"repeated after a correction: {', '.join(self.repeated)}")
        return lines + [f"not tested ({what}): {why}" for what, why in self.lacks.items()]


HEAD = """\
## Random faults

`make chaos N=1000 SEED=3`: random faults at random moments of a run.
"""
SILENT_HEAD = """\
## Random faults on silent collectives

`make chaos SILENT=1 N=500 SEED=7`: as above, but gloo's collectives behave like NCCL's: when a rank dies, those of the
others neither end nor fail. No GPU has run this.
"""


def page(lines: Sequence[str], rows: Sequence[Sequence[str]], silent: bool) -> str:
    """The section about random faults: what was done, and what each fault cost."""
    *costs, total = [(row[1] or row[0], row[2], *row[4:6]) for row in rows]
    if silent:
        return "\n".join([SILENT_HEAD, *(f"* {line}" for line in lines), _most(total), ""])
    counts = [int(count) for _, count, lost, _ in costs if lost.startswith("0 ")]
    some = f"{sum(counts)} faults, of {len(counts)} kinds (`tests/faults/faults.py`), cost no step"
    columns = (COLUMNS[0], COLUMNS[2], *COLUMNS[4:6])
    table = (columns, ["---"] * len(columns), *(row for row in costs if not row[2].startswith("0 ")), total)
    return "\n".join(
        [
            HEAD,
            *(f"* {line}" for line in lines),
            f"* {some}",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
        ]
    )


def _most(total: Sequence[str]) -> str:
    """The most that one fault cost, as a line of a section."""
    *_, lost, longest = total
    return f"* steps lost by one fault (allowed): at most {lost}; the longest time to the next step: {longest}"


PROCESSES_HEAD = """\
## The worst day of processes

`make chaos PROCESSES=1 N=80`: no process or thread starts, SIGKILL of each process, clocks apart, a node's reboot, at
each moment of a run of two ranks. The attempt may end, if the next one continues.

"""
PROCESSES_FOOT = """\
At the moments "rescue" and "restart in place" a rank has just been killed, so the fault may take the last one, and cost
the steps since the last save. Under --local the run waits for its user [where nothing is
retried](guarantees.md#which-errors-are-retried). A supervisor that is killed before the ranks have met ends that start
after a minute.
"""


def processes_page(hits: Sequence[Hit], kinds: Mapping[str, Fault], lines: Sequence[str], wrong: Sequence[str]) -> str:
    """The section about the worst day of processes."""
    met = [name for name in kinds if any(hit.fault == name for hit in hits)]
    total = _row("all", "", hits)
    violations = [f"{_place(hit)}: {what}" for hit in hits for what in hit.wrong] + list(wrong)
    return PROCESSES_HEAD + "\n".join(
        [
            f"* {len(hits)} faults of {len(met)} kinds; {len(violations)} violations",
            f"* recovered: {total[3]}",
            _most(total[4:6]),
            *(f"* {line}" for line in lines),
            *(f"* VIOLATION: {violation}" for violation in violations),
            "",
            PROCESSES_FOOT,
        ]
    )


def _moments(hits: Sequence[Hit]) -> str:
    counts = Counter(hit.moment for hit in hits)
    return ", ".join(f"{moment.words} {counts[moment]}" for moment in Moment if counts[moment])


def fingerprint(plan: Sequence[RunPlan]) -> str:
    """A string that differs between any two plans."""
    return hashlib.sha256(repr(list(plan)).encode()).hexdigest()


def machine_lines(commits: Sequence[str] = ()) -> list[str]:
    """What was tested, where, and when."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "submitit")}
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.split()[-1]
    return [
        f"{time.strftime('%Y-%m-%d')}, commit {', '.join(commits or [commit()])}",
        f"torch {versions['torch']}, submitit {versions['submitit']}, Slurm {slurm}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores",
    ]


def commit() -> str:
    """The commit of the code under faults, with "-dirty" if files have been changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True).stdout.strip() or "unknown"


def minutes(seconds: float) -> str:
    """Such as 2:05."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02}"


def _row(name: str, does: str, hits: Sequence[Hit]) -> tuple[str, ...]:
    ways = Counter(hit.by for hit in hits if hit.by)
    came = ", ".join(f"{count} {way}" for way, count in ways.most_common()) or "0"
    worst = max(hits, key=lambda hit: hit.lost, default=None)
    lost = f"{worst.lost} ({worst.allowed})" if worst else ""
    slowest = f"{max((hit.back_s for hit in hits), default=0.0):.1f} s"
    return name, does, str(len(hits)), came, lost, slowest, str(sum(bool(hit.wrong) for hit in hits))


def _place(hit: Hit) -> str:
    return f"{hit.run}  {hit.fault} in: {hit.moment.words} (+{hit.after_ms} ms)"
