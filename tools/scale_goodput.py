"""The part of docs/scale.md about goodput: what each failure costs large runs, and which term holds them back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._goodput import Conditions, goodput, lost_s
from laststep.checkpoint.interval import NODE_MTBF_S, best_interval

REQUEUE_DELAY_S = 121.0  # Slurm's default before a requeued job may start again: cred_expire, and a second


@dataclass(frozen=True)
class Size:
    """What a failure costs a run of this size, in seconds."""

    gpus: int
    nodes: int
    save_s: float  # that a save costs the training
    commit_s: float  # from the start of a save until it is on the disk
    rescue_s: float  # from the failure until the survivors have saved the last step
    start_s: float  # python, torch, the first batch
    meeting_s: float
    restore_s: float

    @property
    def failure_s(self) -> float:
        """Mean time between two failures."""
        return NODE_MTBF_S / self.nodes

    @property
    def restart_s(self) -> float:
        """From the end of an attempt to the first step of the next, in the same allocation."""
        return self.start_s + self.meeting_s + self.restore_s


@dataclass(frozen=True)
class Row:
    """A way to continue after a failure: the share of time that each term takes, and what is left."""

    size: Size
    way: str
    terms: dict[str, float]
    kept: float

    @property
    def cells(self) -> list[str]:
        """For the table; the largest term is bold."""
        largest = max(self.terms, key=lambda name: self.terms[name])
        shares = [f"**{_percent(s)}**" if name == largest else _percent(s) for name, s in self.terms.items()]
        every = self.size.failure_s
        time = f"{every / 86400:.3g} days" if every > 86400 else f"{every / 3600:.3g} h"
        return [f"{self.size.gpus:,}", time, self.way, *shares, f"{100 * self.kept:.2f} %"]


HEAD = ["GPUs", "a failure every", "after it", "saves", "lost steps", "rescue", "restart", "queue", "goodput"]


def rows(size: Size) -> list[Row]:
    """What follows at this size, for each way to continue."""
    ways = [
        ("rescue, restart in the allocation", True, 0.0),
        ("rescue, requeue, no queue", True, REQUEUE_DELAY_S),
        ("newest checkpoint, restart in the allocation", False, 0.0),
    ]
    return [_row(size, way, rescued, queue_s) for way, rescued, queue_s in ways]


def _row(size: Size, way: str, rescued: bool, queue_s: float) -> Row:
    every = size.failure_s
    interval_s = best_interval(size.save_s, every)
    restart_s = size.restart_s + queue_s
    if rescued:
        run = Conditions(math.inf, size.save_s, size.commit_s, restart_s, stop_every_s=every, stop_s=size.rescue_s)
    else:
        run = Conditions(every, size.save_s, size.commit_s, restart_s)
    terms = {
        "saves": size.save_s / interval_s,
        "lost steps": 0.0 if rescued else lost_s(run, interval_s) / every,
        "rescue": size.rescue_s / every if rescued else 0.0,
        "restart": size.restart_s / every,
        "queue": queue_s / every,
    }
    return Row(size, way, terms, goodput(run, interval_s))


def summary(sizes: Sequence[Size], kill_wait_s: float) -> str:
    """What the table means, in words."""
    lines = []
    for size in sizes:
        parts = {
            "reading the checkpoint": size.restore_s,
            "the rescue": size.rescue_s,
            "meeting": size.meeting_s,
            "starting Python and torch": size.start_s,
        }
        costs = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in sorted(parts.items(), key=lambda p: -p[1]))
        lines.append(f"* {size.gpus:,} GPUs: a failure costs {costs}.")
        rescued, _, without = rows(size)
        if size.rescue_s > kill_wait_s:
            lines.append(f"  The rescue needs KillWait={math.ceil(size.rescue_s)} or more.")
        if without.kept > rescued.kept:
            lines.append("  The rescue costs more than the steps that it saves.")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share else "-"
