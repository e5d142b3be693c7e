"""How much of its time a run trains, and how often it best saves: a model, in pure functions. All times are in seconds.

An attempt takes `restart_s` until its first step. From then on it begins a save every `interval_s`: that costs the
training `save_s` (it stands still, and its steps beside the write are slower), and `commit_s` after its beginning the
checkpoint is on the disk. Two kinds of ends come at random (Poisson processes):

    a death     all ranks at once: what was done since the newest checkpoint on the disk is lost
    a stop      a signal with enough grace, or the death of some ranks, whom the others outlive: nothing is lost

With a = 1/death_s + 1/stop_every_s, T = interval_s and t = T - save_s, an attempt is expected to

    train       e^(-a restart_s) (1 - e^(-a t)) / (a (1 - e^(-a T)))
    have saved  t e^(-a (restart_s + commit_s - save_s)) / (e^(a T) - 1)

seconds' worth of steps until it ends. Without stops, and with commit_s = save_s, the second is Daly's model, so that
his best interval holds here too: neither a restart nor the time until a save is on the disk moves it (Vaidya 1997).

Young: A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974.
Vaidya: Impact of checkpoint latency on overhead ratio of a checkpointing scheme, IEEE Trans. Computers 46 (8), 1997.
Daly: A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node.
NODE_MTBF_S = 54 * 86400 * (16384 / 8) / 419  # 264 days


@dataclass(frozen=True)
class Conditions:
    """What a run meets, in seconds."""

    death_s: float  # mean time between two deaths of all ranks
    save_s: float  # what the training loses by a periodic save
    commit_s: float = 0.0  # from the beginning of a save until it is on the disk; save_s at least, an interval at most
    restart_s: float = 0.0  # from the end of an attempt to the first step of the next
    stop_every_s: float = math.inf  # mean time between two ends that keep every step
    stop_s: float = 0.0  # from the signal to the exit: the step under way, and the save
    grace_s: float = math.inf  # from the signal to SIGKILL: a stop that takes longer is a death


def young(save_s: float, death_s: float) -> float:
    """The best time between two saves, to the first order."""
    return math.sqrt(2 * save_s * death_s)


def daly(save_s: float, death_s: float) -> float:
    """The best time between the beginnings of two saves, to a higher order (Daly's tau_opt, and the save itself)."""
    if save_s >= 2 * death_s:
        return death_s + save_s
    ratio = save_s / (2 * death_s)
    return young(save_s, death_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def goodput(run: Conditions, interval_s: float) -> float:
    """The share of the time that becomes steps which are kept."""
    deadly, mild = _rates(run)
    kept = (deadly * _saved_s(run, interval_s) + mild * _trained_s(run, interval_s)) / (deadly + mild)
    return kept / ((1 + mild * run.stop_s) / (deadly + mild))


def lost_s(run: Conditions, interval_s: float) -> float:
    """How much training a death loses on average."""
    return _trained_s(run, interval_s) - _saved_s(run, interval_s)


def _rates(run: Conditions) -> tuple[float, float]:
    """Deaths and stops per second."""
    deaths, stops = 1 / run.death_s, 1 / run.stop_every_s
    return (deaths, stops) if run.stop_s <= run.grace_s else (deaths + stops, 0.0)


def _trained_s(run: Conditions, interval_s: float) -> float:
    """Training that an attempt comes to."""
    rate = sum(_rates(run))
    share = -math.expm1(-rate * (interval_s - run.save_s)) / -math.expm1(-rate * interval_s)
    return math.exp(-rate * run.restart_s) * share / rate


def _saved_s(run: Conditions, interval_s: float) -> float:
    """Training that an attempt has on the disk when it ends."""
    rate = sum(_rates(run))
    late_s = max(0.0, run.commit_s - run.save_s)
    return (interval_s - run.save_s) * math.exp(-rate * (run.restart_s + late_s)) / math.expm1(rate * interval_s)
