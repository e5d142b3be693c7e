"""A model of the share of its time that a run keeps, for benchmarks.goodput and docs/scale.md."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """The conditions that a run trains under, in seconds."""

    death_s: float  # mean time between two deaths of all ranks
    save_s: float  # training time lost to one periodic save
    commit_s: float = 0.0  # from the start of a save until it is on the disk; between save_s and the interval
    restart_s: float = 0.0  # from the end of an attempt to the first step of the next
    stop_every_s: float = math.inf  # mean time between two ends that lose no step
    stop_s: float = 0.0  # from the signal to the exit: the current step, and the save
    grace_s: float = math.inf  # from the signal to SIGKILL: a stop that takes longer counts as a death


def goodput(run: Conditions, interval_s: float) -> float:
    """The share of its time that a run spends on steps that it keeps."""
    deadly, mild = _rates(run)
    kept = (deadly * _saved_s(run, interval_s) + mild * _trained_s(run, interval_s)) / (deadly + mild)
    return kept / ((1 + mild * run.stop_s) / (deadly + mild))


def lost_s(run: Conditions, interval_s: float) -> float:
    """Seconds of training that a death loses on average."""
    return _trained_s(run, interval_s) - _saved_s(run, interval_s)


def _rates(run: Conditions) -> tuple[float, float]:
    """Deaths and stops per second."""
    deaths, stops = 1 / run.death_s, 1 / run.stop_every_s
    return (deaths, stops) if run.stop_s <= run.grace_s else (deaths + stops, 0.0)


def _trained_s(run: Conditions, interval_s: float) -> float:
    """Seconds of training that an attempt does before it ends."""
    rate = sum(_rates(run))
    share = -math.expm1(-rate * (interval_s - run.save_s)) / -math.expm1(-rate * interval_s)
    return math.exp(-rate * run.restart_s) * share / rate


def _saved_s(run: Conditions, interval_s: float) -> float:
    """Seconds of training that an attempt has on the disk when it ends."""
    rate = sum(_rates(run))
    late_s = max(0.0, run.commit_s - run.save_s)
    return (interval_s - run.save_s) * math.exp(-rate * (run.restart_s + late_s)) / math.expm1(rate * interval_s)
