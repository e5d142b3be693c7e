"""Check the goodput model: the training lost when all ranks are killed at random moments.

`python -m benchmarks.goodput [--deaths N] [--seed S]`, about 9 seconds per death. One run of two ranks, which saves
every few seconds, is repeatedly killed (SIGKILL of both ranks) and resumed. The lifetime of an attempt after its first
step is drawn at random, as in a Poisson process. The seconds of training lost per death and the goodput are compared
with the predictions of `laststep.checkpoint.interval` for the measured save interval and restart time. If the losses
differ by more than three standard errors, the exit status is 1.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._goodput import Conditions, goodput, lost_s
from benchmarks._measure import Check, Ranks, conclude, ended, new_run
from laststep.checkpoint.store import CheckpointStore
from laststep.records.attempts import ended_attempts
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir

EVERY_S = 3.0
DEATH_S = 2 * EVERY_S  # mean lifetime after the first step
OPTIONS = ("train.epochs=10000", "train.log_every=1", "checkpoint.every_epochs=null", "checkpoint.keep_last=10000")


@dataclass(frozen=True)
class Death:
    """One attempt and the death that ended it, in seconds."""

    restart_s: float  # from the start to the first step
    lived_s: float  # from the first step to the kill
    lost_s: float  # from the start of the newest committed save, or from the first step, to the kill
    intervals_s: list[float]  # between the starts of successive saves
    commits_s: list[float]  # from the start of a save to its commit


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if the losses differ from the model."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.goodput", description="Do runs lose as much as the model predicts?"
    )
    parser.add_argument("--deaths", type=int, default=5, help="times to kill all ranks (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random moments (default: 0)")
    given = parser.parse_args(words)
    if given.deaths < 2:
        parser.error("--deaths must be at least 2")

    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), *OPTIONS, f"checkpoint.every_minutes={EVERY_S / 60}")
        draw = random.Random(given.seed)
        deaths = [die(run, draw.expovariate(1 / DEATH_S)) for _ in range(given.deaths)]
        records = ended_attempts(run, lambda: CheckpointStore(run.checkpoints).steps()[-1])
    said = [record["lost_s"] for record in records]

    interval_s = statistics.median(taken for death in deaths for taken in death.intervals_s)
    commit_s = statistics.median(taken for death in deaths for taken in death.commits_s)
    restart_s = statistics.mean(death.restart_s for death in deaths)
    # Saving such a small state costs milliseconds, so save_s is 0. No attempt is killed before its first step.
    model = Conditions(DEATH_S, save_s=0.0, commit_s=commit_s)
    expected = {
        "lost_s": lost_s(model, interval_s),
        "goodput": goodput(model, interval_s) * DEATH_S / (DEATH_S + restart_s),
    }
    lost = [death.lost_s for death in deaths]
    lived_s, error_s = sum(death.lived_s for death in deaths), statistics.stdev(lost) / math.sqrt(len(lost))
    measured = {
        "lost_s": statistics.mean(lost),
        "goodput": (lived_s - sum(lost)) / (lived_s + restart_s * len(deaths)),
    }

    print(f"{'lived':>7}  {'lost':>7}  attempts.jsonl says   (a save every {interval_s:.2f} s, committed after "
          f"{1000 * commit_s:.0f} ms; {restart_s:.1f} s to the first step)")  # fmt: skip
    for death, record_s in zip(deaths, said):
        print(f"{death.lived_s:>5.1f} s  {death.lost_s:>5.2f} s  {record_s:>5.2f} s")
    print(f"lost per death: {measured['lost_s']:.2f} +- {error_s:.2f} s, predicted {expected['lost_s']:.2f} s")
    print(f"goodput: {measured['goodput']:.3f}, predicted {expected['goodput']:.3f}")
    settings = {"seed": given.seed, "deaths": given.deaths, "death_s": DEATH_S, "unit": "s"}
    inputs = {"interval_s": interval_s, "commit_s": commit_s, "restart_s": restart_s}
    results = {**inputs, "measured": measured, "standard_error_s": error_s, "model": expected, "lost": lost}
    difference = abs(measured["lost_s"] - expected["lost_s"]) / error_s
    check = Check("loss per death, difference from the model in standard errors", 3, [difference])
    return conclude("goodput", {**settings, **_rounded({**results, "attempts.jsonl": said})}, [check])


def die(run: RunDir, lives_s: float) -> Death:
    """Resume the run and kill all its ranks `lives_s` seconds after the first step."""
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: "first step after" in ranks.logs[0].read_text(), "no first step")
        first = time.time()
        time.sleep(lives_s)
        for rank in range(len(ranks.processes)):
            killed = ranks.signal(signal.SIGKILL, rank)
        ranks.wait()
    store = CheckpointStore(run.checkpoints)
    # A step's line in metrics.jsonl is written just before the save of that step starts.
    done = {line["step"]: line["time"] for line in read_lines(run.metrics) if line.get("time", 0) >= ranks.started}
    began = {step: done[step] for step in store.steps() if step in done}
    return Death(
        restart_s=first - ranks.started,
        lived_s=killed - first,
        lost_s=killed - max(began.values(), default=first),
        intervals_s=[later - sooner for sooner, later in zip(began.values(), list(began.values())[1:])],
        commits_s=[store.path(step).stat().st_ctime - moment for step, moment in began.items()],
    )


def _rounded(value: Any) -> Any:
    """A nested value with all floats rounded to three decimals."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
