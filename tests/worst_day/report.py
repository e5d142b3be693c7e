"""The report on the runs of a disk's worst day: on the terminal, in a file of results, and in docs/reports.md."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.report import machine_lines

ABOUT = """\
## The worst day of a disk

`make chaos IO=1 N=300`, in some forty minutes: short runs with a death, a restart, a stop, a requeue and a `resume` are
traced. Then one of their file operations fails in each run: with an error (EIO, ENOENT, ESTALE, ENOLCK, EROFS, ENOSPC,
EDQUOT), once or for three seconds; after a stall; with an old listing, or a name that the client believes absent; with
half a read or write; or done, and reported as failed; or the process is killed there, in the middle of a write or
after it. A command that has ended is typed again.
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
        """A section of docs/reports.md."""
        done = list(self.done.values())
        hit = [one for one in done if one["fired"]]
        outcomes = Counter(one["outcome"] for one in hit)
        lines = [
            ABOUT,
            f"* {self.operations:,} file operations traced, {self.calls:,} of them different by process, function and "
            f"path; {self.possible:,} runs possible",
            f"* {len(done):,} runs made, {len(hit):,} of them hit (the operation came again); "
            f"{len(self.violations)} violations",
            f"* {'; '.join(f'{outcome} {count}' for outcome, count in outcomes.most_common())}",
            *(f"* {line}" for line in machine_lines()),
            *(f"* VIOLATION: {what}" for what in self.violations),
        ]
        return "\n".join(lines) + "\n"
