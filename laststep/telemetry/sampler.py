"""Takes the measures of one node every few seconds, and writes a line every LINE_S to its file in the run folder.

Each node has a file of its own, as two nodes cannot append to one file on a network disk. A line holds means since the
line before, and totals since the run began on this node, so that what a run has used stands in its last lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from laststep.attempt.preflight import load_nvml
from laststep.compat import event_file_parts
from laststep.config.errors import ConfigError
from laststep.ranks.beside import SAY, read_signpost
from laststep.ranks.launchers import detect_world
from laststep.ranks.world import hostname
from laststep.records.append_only import append, append_line
from laststep.records.attempt_record import read_attempts
from laststep.records.metrics import last_lines, newest_step
from laststep.records.tensorboard_writer import framed
from laststep.rundir import RunDir
from laststep.say import say
from laststep.telemetry import readings
from laststep.telemetry.measure import GB, MB, Gpu, Gpus, Host, read_host

SAMPLE_S = 2.0
LINE_S = 10.0
LOOK_S = 60.0  # how often the first node looks whether any idles
GAP_S = 15.0  # between two samples: the job was suspended, or the machine frozen, and nothing is known of that time
PLACE = ("time", "seconds", "node", "attempt", "step", "doing", "total", "gpu_throttled")  # no measures
TOTALS = ("gpu_s", "busy_s", "energy_j")
# The fields of a line that have a value for each GPU, and where they are from.
PER_GPU = {
    "gpu_use": "use",
    "gpu_memory_gb": "memory_gb",
    "gpu_memory_total_gb": "memory_total_gb",
    "gpu_power_w": "power_w",
    "gpu_temperature_c": "temperature_c",
    "gpu_pcie_mb_s": "pcie_mb_s",
}


class Sampler:
    """The measures of this node since its last line."""

    def __init__(self, run: RunDir, gpus: Gpus, node: str | None = None) -> None:
        self._run, self._gpus, self._node = run, gpus, node or hostname()
        self.path = run.telemetry / f"{self._node}.jsonl"
        before = next(iter(last_lines(self.path)[-1:]), {}).get("total", {})  # of the attempts before
        self._total = {name: float(before.get(name, 0.0)) for name in TOTALS}
        self._last: tuple[float, list[Gpu], Host] | None = None
        self._begin(time.time())

    def _begin(self, at: float, host: Host | None = None, gpus: Sequence[Gpu] = ()) -> None:
        """A new line begins."""
        self._since, self._seconds, self._first, self._first_gpus = at, 0.0, host, list(gpus)
        self._taken: list[list[Gpu]] = []
        self._doing: Counter[str] = Counter()

    def sample(self, at: float | None = None, host: Host | None = None) -> dict[str, Any] | None:
        """Take the measures now, and write a line if one is due; returns it. `at` and `host` are for tests. Raises
        OSError."""
        at, host, gpus = time.time() if at is None else at, host or read_host(), self._gpus.read()
        last, self._last = self._last, (at, gpus, host)
        if last is None or not 0 < at - last[0] <= GAP_S or len(last[1]) != len(gpus):
            self._begin(at, host, gpus)
            return None
        seconds = at - last[0]
        self._seconds += seconds
        self._taken.append(gpus)
        for before, now in zip(last[1], gpus):
            self._count(before, now, seconds)
        if what := read_signpost(self._run.path):
            self._doing[what] += 1
        if at - self._since >= LINE_S - SAMPLE_S / 2:
            line = self._line(at, host, gpus)
            self._begin(at, host, gpus)
            self.path.parent.mkdir(exist_ok=True)
            append_line(self.path, json.dumps(line))
            return line
        return None

    def _count(self, before: Gpu, now: Gpu, seconds: float) -> None:
        self._total["gpu_s"] += seconds
        self._total["busy_s"] += seconds * (now.use or 0.0) / 100
        if now.energy_j is not None and before.energy_j is not None and now.energy_j >= before.energy_j:
            self._total["energy_j"] += now.energy_j - before.energy_j
        else:
            self._total["energy_j"] += seconds * (now.power_w or 0.0)

    def _line(self, at: float, host: Host, gpus: Sequence[Gpu]) -> dict[str, Any]:
        first = self._first or host
        line: dict[str, Any] = {"time": round(at, 3), "node": self._node, **self._place()}
        line["seconds"] = round(self._seconds, 3)
        if counted := sum(self._doing.values()):
            line["doing"] = {what: round(count / counted, 3) for what, count in self._doing.most_common()}
        line["cpu_cores"] = self._rate(first.cpu_s, host.cpu_s, 1.0)
        line["memory_gb"] = None if host.memory is None else round(host.memory / GB, 3)
        line["memory_limit_gb"] = None if host.memory_limit is None else round(host.memory_limit / GB, 3)
        for prefix, then, now in (("network", first.network, host.network), ("disk", first.disk, host.disk)):
            for way in now:
                line[f"{prefix}_{way}_mb_s"] = self._rate(then.get(way), now[way], MB)
        if gpus:
            line |= self._gpu_fields(gpus)
        line["total"] = {name: round(value, 1) for name, value in self._total.items()}
        return {name: value for name, value in line.items() if value is not None}

    def _place(self) -> Mapping[str, Any]:
        """The attempt under way, and the newest step."""
        place: dict[str, Any] = {}
        with suppress(OSError):
            for record in read_attempts(self._run.attempt_now):
                place["attempt"] = record["attempt"]
            if newest := newest_step(self._run.metrics):
                place["step"] = newest["step"]
        return place

    def _gpu_fields(self, gpus: Sequence[Gpu]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, source in PER_GPU.items():
            columns = [[getattr(taken[number], source) for taken in self._taken] for number in range(len(gpus))]
            means = [_mean([value for value in column if value is not None]) for column in columns]
            if any(mean is not None for mean in means):
                fields[name] = means
        links = [self._rate(then.nvlink_mb, now.nvlink_mb, 1.0) for then, now in zip(self._first_gpus, gpus)]
        if any(link is not None for link in links):
            fields["gpu_nvlink_mb_s"] = links
        throttled = [[taken[number].throttled for taken in self._taken] for number in range(len(gpus))]
        reasons = [sorted({why for sample in of_gpu for why in sample}) for of_gpu in throttled]
        if any(reasons):
            fields["gpu_throttled"] = reasons
        return fields

    def _rate(self, then: float | None, now: float | None, unit: float) -> float | None:
        """What a counter has grown by per second; None where it is not known, or was set back."""
        if then is None or now is None or now < then or not self._seconds:
            return None
        return round((now - then) / unit / self._seconds, 3)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


class Board:
    """The lines of this node for TensorBoard, as a run of its own beside that of the training: what a step measures is
    there once, and this is of the clock, so it may have several values for a step that was done again."""

    def __init__(self, run: RunDir, node: str) -> None:
        self._path = run.tensorboard / "telemetry" / node / f"events.out.tfevents.{time.time():014.3f}.telemetry"

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line, with the means over its GPUs; nothing before the first step. Raises OSError."""
        if "step" not in line:
            return
        Event, _, Summary, _ = event_file_parts()
        values = {f"telemetry/{name}": _value(value) for name, value in line.items() if name not in PLACE}
        numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        event = framed(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=numbers)))
        begins = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        header = framed(Event(wall_time=line["time"], file_version="brain.Event:2")) if begins else b""
        append(self._path, header + event)


def _value(value: Any) -> float | None:
    if isinstance(value, list):
        return _mean([one for one in value if isinstance(one, (int, float))])
    return value if isinstance(value, (int, float)) else None


class IdleWarning:
    """A line for the log that people read, once in an attempt for each node whose GPUs idle for minutes."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._looked_at, self._nodes = run, -LOOK_S, set[str]()

    def look(self, now: float) -> str | None:
        """The line, if there is one to be said now."""
        if not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at = now
            if (idle := readings.idle(self._run, now)) is not None and idle.node not in self._nodes:
                self._nodes.add(idle.node)
                return f"WARNING: {readings.said(idle)}"
        return None


def _is_first_node() -> bool:
    with suppress(ConfigError):
        return detect_world().rank == 0
    return False


def main(words: Sequence[str]) -> None:
    """Sample until SIGTERM: `python -m laststep.telemetry.sampler FOLDER`."""
    run, over = RunDir(words[0]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    nvml = load_nvml()
    if nvml is None:
        say("the GPUs are not read: nvidia-ml-py is not installed here (pip install nvidia-ml-py)")
    sampler, warned = Sampler(run, Gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))), False
    first = _is_first_node()
    board = Board(run, hostname()) if first else None
    warning = IdleWarning(run) if first else None
    while not over.is_set():
        try:
            if (line := sampler.sample()) is not None and board is not None:
                board.add(line)
            if warning is not None and (text := warning.look(time.time())):
                print(f"{SAY}{text}", flush=True)
        except ImportError as error:
            board = None
            say(f"no telemetry for TensorBoard: {error}")
        except OSError as error:  # the next line may have more luck
            if not warned:
                say(f"WARNING: {error}")
            warned = True
        over.wait(SAMPLE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
