"""A model of goodput: what share of its time a run spends on steps that it keeps, and which save interval is best.

Pure functions; all times are in seconds. An attempt takes `restart_s` until its first step. From then on it starts a
save every `interval_s`. Each costs the training `save_s` (the loop stands still, and steps are slower while the save is
written), and its checkpoint is on the disk `commit_s` after the start of the save. Attempts end at random in two ways,
both of them Poisson processes:

    a death     all ranks at once: everything since the newest checkpoint on the disk is lost
    a stop      a signal with enough grace, or the death of only some of the ranks: nothing is lost

With a = 1/death_s + 1/stop_every_s, T = interval_s and t = T - save_s, an attempt is expected until its end to

    train for   e^(-a restart_s) (1 - e^(-a t)) / (a (1 - e^(-a T)))           seconds, and to have
    saved       t e^(-a (restart_s + commit_s - save_s)) / (e^(a T) - 1)       seconds of that training

Without stops, and with commit_s = save_s, the second formula is Daly's model. So his best interval holds here too: it
depends neither on the time of a restart nor on the time until a save is on the disk (Vaidya 1997).

Young: A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974.
Vaidya: Impact of checkpoint latency on overhead ratio of a checkpointing scheme, IEEE Trans. Computers 46 (8), 1997.
Daly: A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 per node.
NODE_MTBF_S = 54 * 86400 * (16384 / 8) / 419  # 264 days


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


def young(save_s: float, death_s: float) -> float:
    """The best time between two saves, by Young's first-order formula."""
    return math.sqrt(2 * save_s * death_s)


def daly(save_s: float, death_s: float) -> float:
    """The best time between the starts of two saves, by Daly's higher-order formula (tau_opt plus the save itself)."""
    if save_s >= 2 * death_s:
        return death_s + save_s
    ratio = save_s / (2 * death_s)
    return young(save_s, death_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


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
