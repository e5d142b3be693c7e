"""The nodes that the runs of a folder have blamed for faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from laststep.doctor.problem import Problem
from laststep.records.attempt_record import read_attempts
from laststep.records.retry import times_blamed
from laststep.runs import run_folders
from laststep.say import counted

OFTEN = 2  # one fault may be chance
MOST_RUNS = 3  # that a problem names


def check_bad_nodes(root: str) -> Iterator[Problem]:
    """Nodes that the runs in this folder have blamed for several faults of the last day together."""
    now, total = time.time(), Counter[str]()
    runs: dict[str, list[str]] = {}
    for run in run_folders.all_runs(root):
        blamed = times_blamed(read_attempts(run.attempts), now)
        total += blamed
        for node, times in blamed.items():
            runs.setdefault(node, []).append(f"{run.name} {times}")
    for node, times in total.most_common():
        if times >= OFTEN:
            more = len(runs[node]) - MOST_RUNS
            by = ", ".join([*runs[node][:MOST_RUNS], *([f"{counted(more, 'more run')}"] if more > 0 else [])])
            yield Problem(
                f"node {node} was blamed for {counted(times, 'fault')} within a day, by run: {by}",
                f"have it checked; launch.exclude={node} keeps new runs from it",
            )
