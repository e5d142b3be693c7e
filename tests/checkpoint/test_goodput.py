"""The model of goodput, compared with a simulation that uses none of its formulas and with published figures."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks._goodput import Conditions, goodput, lost_s
from laststep.checkpoint.interval import NODE_MTBF_S, daly, young
from tools.scale_goodput import Size, rows

HOUR = 3600.0


def attempts(run: Conditions, interval_s: float, count: int, seed: int) -> list[tuple[float, float, float]]:
    """Simulate `count` attempts event by event: (seconds, training kept, training lost to a death or nan) of each."""
    draw = random.Random(seed)
    played = []
    for _ in range(count):
        death_s, stop_s = run.death_s * draw.expovariate(1), run.stop_every_s * draw.expovariate(1)
        end_s = min(death_s, stop_s)
        now, trained, saved = run.restart_s, 0.0, 0.0
        writing: tuple[float, float] | None = None  # the current save: when it is on the disk, and what it has
        while now < end_s:
            work_s = min(interval_s - run.save_s, end_s - now)
            trained, now = trained + work_s, now + work_s
            if writing and writing[0] <= now:
                saved = writing[1]
            writing = (now + max(run.commit_s, run.save_s), trained)
            now += run.save_s
            if writing[0] <= min(now, end_s):
                saved = writing[1]
        if stop_s < death_s and run.stop_s <= run.grace_s:
            played.append((end_s + run.stop_s, trained, math.nan))
        else:
            played.append((end_s, saved, trained - saved))
    return played


@pytest.mark.parametrize(
    ("run", "interval_s"),
    [
        (Conditions(death_s=6 * HOUR, save_s=300, commit_s=300, restart_s=600), 57 * 60),  # Daly's figure 4
        (Conditions(death_s=HOUR, save_s=2), 120),
        (Conditions(death_s=HOUR, save_s=2, commit_s=60, restart_s=120), 120),  # written while training continues
        (Conditions(death_s=2 * HOUR, save_s=5, commit_s=20, restart_s=90, stop_every_s=HOUR, stop_s=15), 300),
        (Conditions(death_s=2 * HOUR, save_s=5, restart_s=90, stop_every_s=HOUR, stop_s=40, grace_s=30), 300),
        (Conditions(death_s=60, save_s=20, commit_s=30, restart_s=30), 40),  # hardly ever a step
    ],
)
def test_the_model_agrees_with_a_simulation(run: Conditions, interval_s: float) -> None:
    """A wrong formula would lead to wrong intervals for months without anybody noticing."""
    played = attempts(run, interval_s, count=40_000, seed=1)
    seconds, kept, lost = (list(column) for column in zip(*played))
    expected = goodput(run, interval_s)
    # The standard error of a ratio of two means is that of the mean of the residuals, over the mean of the divisor.
    left = [one - expected * taken for one, taken in zip(kept, seconds)]
    error = statistics.stdev(left) / math.sqrt(len(left)) / statistics.mean(seconds)
    assert statistics.mean(kept) / statistics.mean(seconds) == pytest.approx(expected, abs=4 * error)
    assert error < 0.01 * expected or expected < 0.1

    losses = [value for value in lost if not math.isnan(value)]
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    assert statistics.mean(losses) == pytest.approx(lost_s(run, interval_s), abs=4 * error)


@pytest.mark.parametrize(("death_min", "best_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_gives_the_figures_of_his_paper(death_min: float, best_min: float) -> None:
    """Figures 3 to 5 of the paper: a save takes five minutes, and the interval excludes the save itself."""
    assert daly(5, death_min) - 5 == pytest.approx(best_min, rel=0.01)


@pytest.mark.parametrize("save_s", [0.1, 1, 10, 100])
@pytest.mark.parametrize("death_s", [900, HOUR, 24 * HOUR, NODE_MTBF_S])
@pytest.mark.parametrize("commit_s", [0, 300])
def test_no_other_interval_gives_more(save_s: float, death_s: float, commit_s: float) -> None:
    """This is what `auto` promises. Even where a save takes a tenth of the time between two deaths, it is less than a
    thousandth from the best."""
    run = Conditions(death_s, save_s, commit_s, restart_s=60)
    best = goodput(run, daly(save_s, death_s))
    for factor in (0.1, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 10):
        other = daly(save_s, death_s) * factor
        if other > save_s:
            assert goodput(run, other) < best * 1.001
    assert young(save_s, death_s) == pytest.approx(daly(save_s, death_s), rel=0.1)


def test_stops_cost_no_step_however_rare_the_saves() -> None:
    """Preemptions, time limits and rescued ranks are no reason to save often: if nothing else happens, a run that
    hardly ever saves keeps the most."""
    run = Conditions(death_s=1e12, save_s=1, restart_s=20, stop_every_s=HOUR, stop_s=5)
    assert goodput(run, 60) < goodput(run, 600) < goodput(run, 6 * HOUR)
    assert goodput(run, 1e6) == pytest.approx(math.exp(-20 / HOUR) / (1 + 5 / HOUR), rel=1e-4)


@pytest.mark.parametrize("gpus", [1024, 16_384])
def test_the_terms_explain_what_is_lost(gpus: int) -> None:
    """docs/scale.md says which term holds a run back. Terms that do not add up would name the wrong one."""
    size = Size(gpus, gpus // 8, save_s=0.3, commit_s=10, rescue_s=20, start_s=2, meeting_s=5, restore_s=60)
    for row in rows(size):
        assert sum(row.terms.values()) == pytest.approx(1 - row.kept, rel=0.05), row.way
