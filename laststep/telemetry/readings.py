"""What the lines of all nodes say: how busy the GPUs are, what a run has used and lost, whether its GPUs idle, and the
curves for the report; at the end, what the core asks for (see laststep/rooms.py). Reading the use so far takes the last
line of each node, however long the run was."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from laststep.ranks.beside import Beside
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.metrics import last_lines, parsed, place_of
from laststep.records.progress import duration
from laststep.rundir import RunDir

DRIVER = Path("/proc/driver/nvidia/gpus")
TAIL = 16 << 10  # bytes at the end of a file: several lines, also of a node with 16 GPUs
NOW_S = 60.0  # a line that is older says nothing of now
IDLE_S = 300.0  # that GPUs may idle: sites cancel such jobs after some half an hour or more
IDLE_USE = 5.0  # percent
NO_LINE_S = 60.0  # between two lines: nothing is known of what was in between
# What the loop does while its GPUs idle, by the name that its signpost shows, and what helps.
CAUSES = {
    "waiting for data": "the loop waits for data: more data.workers, with a core of launch.cpus_per_task for each, or "
    "a faster disk",
    "saving": "the loop is in a save: the disk is slow, or hangs",
    "validation": "the loop is in a validation, which does not use the GPU",
    "preparing data": "the data set is being prepared",
    "reading checkpoint": "the checkpoint is being read: the disk is slow, or hangs",
    "restoring": "the checkpoint is being read: the disk is slow, or hangs",
    "starting": "the ranks are starting: imports, or the user's code before its first step",
    "training": "the loop is within a step: a rank that waits for others, or work of the user's on the CPU",
}


@dataclass(frozen=True)
class Use:
    """GPUs over a time: seconds that they were allocated, those in which they worked, and what they took."""

    gpu_s: float = 0.0
    busy_s: float = 0.0
    energy_j: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(self.gpu_s + other.gpu_s, self.busy_s + other.busy_s, self.energy_j + other.energy_j)

    def __sub__(self, other: Use) -> Use:
        return self + Use(-other.gpu_s, -other.busy_s, -other.energy_j)

    @property
    def gpu_hours(self) -> float:
        """GPUs times hours."""
        return self.gpu_s / 3600

    @property
    def energy_kwh(self) -> float:
        """What the GPUs alone have taken; the rest of a node takes as much again, or half as much."""
        return self.energy_j / 3.6e6

    @property
    def share(self) -> float | None:
        """The share of the time in which the GPUs worked."""
        return self.busy_s / self.gpu_s if self.gpu_s else None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Use:
        """A node's use up to this line."""
        total = line.get("total", {})
        return cls(*(float(total.get(name, 0.0)) for name in ("gpu_s", "busy_s", "energy_j")))


@dataclass(frozen=True)
class Idle:
    """GPUs of a node that do nothing."""

    node: str
    since: float  # Unix seconds
    seconds: float
    doing: str  # what the loop does meanwhile; empty where it does not say
    step: int | None

    @property
    def cause(self) -> str:
        """The likely cause, and what helps."""
        return CAUSES.get(self.doing, f"the loop is in: {self.doing}" if self.doing else "the loop does not say why")


def files(run: RunDir) -> list[Path]:
    """The file of each node; none without telemetry."""
    return sorted(run.telemetry.glob("*.jsonl"))


def use_of(run: RunDir) -> Use:
    """What the run has used so far, on all nodes."""
    lasts = (next(iter(last_lines(path, TAIL)[-1:]), {}) for path in files(run))
    return sum(map(Use.of, lasts), Use())


def lost_use_of(run: RunDir) -> Use:
    """What of it was spent on steps that were lost: the attempt's means count for the time that they took, not what was
    used while a hang was waited for."""
    lost, paths = Use(), files(run)
    for record in read_ended_attempts(run.attempts):
        if record["lost_s"] and record["end"] > record["start"]:
            lasted = record["end"] - record["start"]
            for path in paths:
                used = Use.of(line_at(path, record["end"])) - Use.of(line_at(path, record["start"]))
                part = min(1.0, record["lost_s"] / lasted)
                lost += Use(used.gpu_s * part, used.busy_s * part, used.energy_j * part)
    return lost


def busy_now(run: RunDir, now: float) -> float | None:
    """The GPUs' mean use in the newest lines, in percent; None where no line is of now, or there are no GPUs."""
    lines = [line for path in files(run) for line in last_lines(path, TAIL)[-1:] if line.get("time", 0.0) > now - NOW_S]
    uses = [use for line in lines for use in line.get("gpu_use", []) if use is not None]
    return fmean(uses) if uses else None


def idle(run: RunDir, now: float, least_s: float = IDLE_S) -> Idle | None:
    """The node whose GPUs have all done nothing for longest, if that is longer than `least_s`, and they still idle."""
    found = (_idle(path, now, least_s) for path in files(run))
    return max(filter(None, found), key=lambda one: one.seconds, default=None)


def said(idle: Idle) -> str:
    """The warning."""
    return f"the GPUs of {idle.node} have been idle for {duration(idle.seconds)}: {idle.cause}"


def _idle(path: Path, now: float, least_s: float) -> Idle | None:
    size = TAIL
    while True:
        lines = last_lines(path, size)
        idling = list(_idle_lines(lines, now))
        whole = len(idling) < len(lines) or size >= path.stat().st_size
        if whole or (idling and now - idling[-1]["time"] > 4 * least_s):
            break
        size *= 4
    if not idling:
        return None
    since = idling[-1]["time"] - idling[-1].get("seconds", 0.0)
    if idling[0]["time"] - since < least_s:
        return None
    doing: Counter[str] = Counter()
    for line in idling:
        doing.update(line.get("doing", {}))
    what = doing.most_common(1)[0][0] if doing else ""
    return Idle(str(idling[0].get("node", "")), since, idling[0]["time"] - since, what, idling[0].get("step"))


def _idle_lines(lines: Sequence[Mapping[str, Any]], now: float) -> Iterator[Mapping[str, Any]]:
    """The newest lines, the newest first, as long as the GPUs idle and no line is missing."""
    later, attempt = now, None
    for line in reversed(lines):
        uses = [use for use in line.get("gpu_use", []) if use is not None]
        if not uses or max(uses) > IDLE_USE or later - line["time"] > NO_LINE_S:
            return
        if attempt is not None and line.get("attempt") != attempt:
            return
        later, attempt = line["time"], line.get("attempt")
        yield line


def line_at(path: Path, at: float) -> Mapping[str, Any]:
    """The last line that was written by then; empty before the first. A long file is searched by bisection."""
    found: Mapping[str, Any] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(place_of(file, at, "time"))
        for line in parsed(file):
            if line.get("time", 0.0) > at:
                break
            found = line
    return found


def figures(run: RunDir) -> dict[str, Any]:
    """The curves by step, by title (laststep.report.curves.Curve). A point has the range over GPUs, nodes and
    lines."""
    from laststep.report.curves import Curve  # a room that may not be here

    found: dict[str, Curve] = {}
    for path in files(run):
        with path.open("rb") as file:
            for line in parsed(file):
                if isinstance(step := line.get("step"), int) and step > 0:
                    for title, field in CURVES.items():
                        values = line.get(field)
                        for value in values if isinstance(values, list) else [values]:
                            if value is not None:
                                found.setdefault(title, Curve()).add(step, value)
    return {title: found[title] for title in CURVES if title in found}


# Titles of the report's figures, with their units, and the fields that they show.
CURVES = {
    "GPU use (%)": "gpu_use",
    "GPU memory (GB)": "gpu_memory_gb",
    "GPU power (W)": "gpu_power_w",
    "GPU temperature (°C)": "gpu_temperature_c",
    "PCIe (MB/s)": "gpu_pcie_mb_s",
    "NVLink (MB/s)": "gpu_nvlink_mb_s",
    "CPU (cores)": "cpu_cores",
    "Memory (GB)": "memory_gb",
    "Network, received (MB/s)": "network_rx_mb_s",
    "Network, sent (MB/s)": "network_tx_mb_s",
    "Disk, read (MB/s)": "disk_read_mb_s",
    "Disk, written (MB/s)": "disk_write_mb_s",
}


def programs(config: Any, run: RunDir) -> Iterator[Beside]:
    """One on each node."""
    record, gpus = config.telemetry.record, config.device != "cpu" and (config.launch.gpus > 0 or DRIVER.is_dir())
    if record == "always" or (record == "auto" and gpus):
        yield Beside("telemetry", "laststep.telemetry.sampler", "node")


def cells(run: RunDir) -> dict[str, str]:
    """How busy the GPUs are now."""
    busy = busy_now(run, time.time())
    return {} if busy is None else {"GPUs": f"{busy:.0f}%"}


def facts(run: RunDir) -> dict[str, str]:
    """What the run has used, what of it was lost, and whether its GPUs idle."""
    found: dict[str, str] = {}
    use = use_of(run)
    if use.gpu_s:
        busy = busy_now(run, time.time())
        now = "" if busy is None else f", {busy:.0f}% now"
        found["GPUs"] = f"{use.share:.0%} busy{now}; {_amounts(use)}{_lost(lost_use_of(run))}"
    if (idling := idle(run, time.time())) is not None:
        found["WARNING"] = said(idling)
    return found


def fields(run: RunDir) -> dict[str, Any]:
    """The same, for programs; None without GPUs, or without telemetry."""
    known = (use := use_of(run)).gpu_s > 0
    lost = lost_use_of(run) if known else Use()
    found = idle(run, time.time()) if known else None
    numbers = {
        "gpu_busy": use.share or 0.0,
        "gpu_hours": use.gpu_hours,
        "gpu_hours_lost": lost.gpu_hours,
        "energy_kwh": use.energy_kwh,
        "energy_lost_kwh": lost.energy_kwh,
    }
    return {name: round(value, 4) if known else None for name, value in numbers.items()} | {
        "gpus_idle_s": round(found.seconds) if found else None,
        "gpus_idle_why": found.cause if found else None,
    }


def _amounts(use: Use) -> str:
    return f"{use.gpu_hours:,.2f} GPU hours, {use.energy_kwh:,.2f} kWh"


def _lost(use: Use) -> str:
    return f"; lost: {_amounts(use)}" if use.gpu_s else "; none of it lost"
