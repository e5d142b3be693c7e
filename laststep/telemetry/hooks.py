"""What the room of telemetry adds to a run, see laststep.rooms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laststep.ranks.beside import Beside
from laststep.rundir import RunDir
from laststep.telemetry import readings

DRIVER = Path("/proc/driver/nvidia/gpus")


def programs(config: Any, run: RunDir) -> Iterator[Beside]:
    """One on each node."""
    record, gpus = config.telemetry.record, config.device != "cpu" and (config.launch.gpus > 0 or DRIVER.is_dir())
    if record == "always" or (record == "auto" and gpus):
        yield Beside("telemetry", "laststep.telemetry.sampler", "node")


def cell(run: RunDir) -> tuple[str, str] | None:
    """How busy the GPUs are now."""
    busy = readings.busy_now(run, time.time())
    return None if busy is None else ("GPUs", f"{busy:.0f}%")


def facts(run: RunDir) -> dict[str, str]:
    """What the run has used, what of it was lost, and whether its GPUs idle."""
    found: dict[str, str] = {}
    use = readings.use_of(run)
    if use.gpu_s:
        busy = readings.busy_now(run, time.time())
        now = "" if busy is None else f", {busy:.0f}% now"
        found["GPUs"] = f"{use.share:.0%} busy{now}; {_amounts(use)}{_lost(readings.lost_use_of(run))}"
    if (idle := readings.idle(run, time.time())) is not None:
        found["WARNING"] = readings.said(idle)
    return found


def fields(run: RunDir) -> dict[str, Any]:
    """The same, for programs; None without GPUs, or without telemetry."""
    use = readings.use_of(run)
    known = use.gpu_s > 0
    lost = readings.lost_use_of(run) if known else readings.Use()
    idle = readings.idle(run, time.time()) if known else None
    return {
        "gpu_busy": round(use.share, 4) if known and use.share is not None else None,
        "gpu_hours": round(use.gpu_hours, 4) if known else None,
        "gpu_hours_lost": round(lost.gpu_hours, 4) if known else None,
        "energy_kwh": round(use.energy_kwh, 4) if known else None,
        "energy_lost_kwh": round(lost.energy_kwh, 4) if known else None,
        "gpus_idle_s": round(idle.seconds) if idle else None,
        "gpus_idle_why": idle.cause if idle else None,
    }


def figures(run: RunDir) -> dict[str, Any]:
    """The curves of the machines."""
    return readings.curves(run)


def _amounts(use: readings.Use) -> str:
    return f"{use.gpu_hours:,.2f} GPU hours, {use.energy_kwh:,.2f} kWh"


def _lost(use: readings.Use) -> str:
    return f"; lost: {_amounts(use)}" if use.gpu_s else "; none of it lost"
