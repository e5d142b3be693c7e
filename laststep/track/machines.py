"""What the machines of a run do, as trackers show it: the lines of RUN/telemetry/NODE.jsonl, each once.

The lines of a node rise in time, so the time of the last one that was sent is all that has to be remembered.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from laststep.records.metrics import place_of
from laststep.rundir import RunDir

LINES = 5000  # of a node, of one reading
PLACE = ("time", "seconds", "attempt", "step")  # numbers that are no measures


class Measure(NamedTuple):
    """A line of one node."""

    node: str
    time: float  # Unix seconds
    step: int  # the newest one then; 0: before the first
    values: dict[str, float]  # means over the GPUs of the node


class Machines:
    """The new lines of all nodes."""

    def __init__(self, run: RunDir, known: Mapping[str, float]) -> None:
        """`known`: the time of the last line of each node that needs not be read."""
        self._run, self._known = run, dict(known)
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Measure]:
        """The lines that are new since the last call, of each node in order, at most LINES of each. Raises OSError."""
        return [measure for path in sorted(self._run.telemetry.glob("*.jsonl")) for measure in self._lines(path)]

    def _lines(self, path: Path) -> Iterator[Measure]:
        node = path.stem.replace(".", "_")  # trackers read a dot as a part of a part
        with path.open("rb") as file:
            if path not in self._offsets:
                self._offsets[path] = place_of(file, self._known.get(node, 0.0), "time")
            file.seek(self._offsets[path])
            given = 0
            while given < LINES and (line := file.readline()).endswith(b"\n"):
                self._offsets[path] += len(line)
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    record = json.loads(line)
                    at, step = float(record["time"]), int(record.get("step", 0))
                    if at > self._known.get(node, 0.0) and (values := dict(_values(record))):
                        self._known[node] = at
                        given += 1
                        yield Measure(node, at, step, values)


def means(measures: list[Measure]) -> dict[str, float]:
    """Several lines as one, by the names of the curves: the mean of each measure, and the last time of each node."""
    found: dict[str, list[float]] = {}
    for measure in measures:
        for name, value in measure.values.items():
            found.setdefault(curve(measure.node, name), []).append(value)
    times = {curve(measure.node, "time"): measure.time for measure in measures}
    return {name: fmean(values) for name, values in found.items()} | times


def curve(node: str, name: str) -> str:
    """The name of a curve in a tracker."""
    return f"system/{node}/{name}"


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, (int, float))]
        if numbers and name not in PLACE:
            yield name, fmean(numbers)
