"""The report on the runs of a disk's worst day: on the terminal, in a file of results, and as docs/worst-day.md."""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.worst_day.disk import ROLES

ABOUT = """
Made by `make chaos IO=1`. A short run is traced once: two ranks train; rank 1 dies, they start again in place, SIGTERM
stops them, `resume` continues the run to its end. So is a job of one rank that is killed, restarted by its batch shell,
and requeued. Then the run is done once for each of its file operations, with that one failing: with an error, once or
for three seconds; after a stall; with an old listing, or a name that the client believes absent; with half a read or
write; or done, and reported as failed. A command that has ended is typed again.

Allowed: the attempt ends, and the next one continues. Never: a step lost that was kept, other bits than those of the
undisturbed run, a hang, a run that ends for good, a record that is not true.
"""
HOW = """
It needs Linux and a C compiler, and takes some forty minutes on two cores for 300 runs. Typed again, an interrupted
command continues, and repeats the runs that broke a promise. `python -m tests.worst_day --help` has the options. `make
test` carries out some of the runs.
"""


@dataclass
class Report:
    """What is known so far."""

    operations: int = 0  # in the undisturbed runs
    calls: int = 0  # that differ by role, process, function and path
    possible: int = 0  # runs, one for each call and kind of failure
    done: dict[str, dict[str, Any]] = field(default_factory=dict)  # what became of each run, by its name

    def load(self, file: Path) -> None:
        """Continue with what an interrupted command has kept."""
        if file.exists():
            self.done = json.loads(file.read_text())

    def save(self, file: Path) -> None:
        """Keep what is known for a later command."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.done, indent=1))
        temporary.replace(file)

    @property
    def violations(self) -> list[str]:
        """What was broken, with the fault that broke it."""
        return [f"{name}: {'; '.join(one['wrong'])}" for name, one in self.done.items() if one["wrong"]]

    def markdown(self) -> str:
        """The page."""
        done = list(self.done.values())
        hit = [one for one in done if one["fired"]]
        lines = [
            "# The worst day of a disk",
            "",
            *_paragraphs(ABOUT),
            "| | |",
            "|---|---:|",
            f"| file operations traced | {self.operations:,} |",
            f"| of these different by process, function and path | {self.calls:,} |",
            f"| runs that are possible: each of these with each kind of failure | {self.possible:,} |",
            f"| runs made | {len(done):,} |",
            f"| of these hit: the operation came again | {len(hit):,} |",
            f"| **violations** | **{len(self.violations)}** |",
            "",
            "## By kind of failure",
            "",
            *_table([(one["kind"], one["outcome"]) for one in hit], "failure"),
            "",
            "## By process",
            "",
            *_table([(one["role"], one["outcome"]) for one in hit], "process"),
            "",
        ]
        if self.violations:
            lines += ["## Violations", "", *(f"* {what}" for what in self.violations), ""]
        lines += [
            "## How to run it",
            "",
            "    make chaos IO=1 N=300 SEED=1",
            "",
            *_paragraphs(HOW),
        ]
        return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    """The lines of a text, each paragraph wrapped anew."""
    wrapped = (textwrap.fill(" ".join(one.split()), 120) for one in text.strip().split("\n\n"))
    return [*"\n\n".join(wrapped).splitlines(), ""]


def _table(rows: list[tuple[str, str]], head: str) -> list[str]:
    """How often which outcome followed."""
    outcomes = sorted({outcome for _, outcome in rows})
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in rows:
        counts[name][outcome] += 1
    return [
        f"| {head} | {' | '.join(outcomes)} |",
        f"|---|{'---:|' * len(outcomes)}",
        *(f"| {name} | {' | '.join(str(counts[name][o]) for o in outcomes)} |" for name in sorted(counts, key=_order)),
    ]


def _order(name: str) -> tuple[int, str]:
    return (ROLES.index(name), "") if name in ROLES else (len(ROLES), name)
