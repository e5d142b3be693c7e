"""Whether runs lose what the model of goodput says: all ranks killed at random moments, again and again.

`python -m benchmarks.goodput [--deaths N] [--seed S]`, a quarter of a minute for each death. One run of two ranks,
which saves every few seconds, is killed (SIGKILL of both) and resumed. How long an attempt lives after its first step
is drawn from the seed, as from a Poisson process. Compared are the seconds of training lost by a death, and the share
of the time that was kept, with what `trainer.checkpoint.goodput` says for the interval and the restart that were
measured. The exit status says whether the losses agree within three standard errors.
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

from benchmarks._measure import Ranks, ended, new_run, write_results
from trainer.checkpoint.goodput import Conditions, goodput, lost_s
from trainer.checkpoint.store import CheckpointStore
from trainer.records.attempts import ended_attempts
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

EVERY_S = 5.0
DEATH_S = 2 * EVERY_S  # mean life after the first step
OPTIONS = ("train.epochs=10000", "train.log_every=1", "checkpoint.every_epochs=null", "checkpoint.keep_last=10000")


@dataclass(frozen=True)
class Death:
    """Of one attempt, in seconds."""

    restart_s: float  # until its first step
    lived_s: float  # from then on
    lost_s: float  # since the beginning of the newest save on the disk, or since the first step
    intervals_s: list[float]  # between the beginnings of two saves
    commits_s: list[float]  # from the beginning of a save until it is on the disk


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; 1 when the losses are not the model's."""
    parser = argparse.ArgumentParser(prog="benchmarks.goodput", description="Do runs lose what the model says?")
    parser.add_argument("--deaths", type=int, default=5, help="times that all ranks are killed (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
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
    # The save of a state so small costs milliseconds of these seconds. Nobody was killed before a first step.
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

    print(f"{'lived':>7}  {'lost':>7}  attempts.jsonl says   (a save every {interval_s:.2f} s, on the disk after "
          f"{1000 * commit_s:.0f} ms; {restart_s:.1f} s to the first step)")  # fmt: skip
    for death, record_s in zip(deaths, said):
        print(f"{death.lived_s:>5.1f} s  {death.lost_s:>5.2f} s  {record_s:>5.2f} s")
    print(f"lost by a death: {measured['lost_s']:.2f} +- {error_s:.2f} s, the model says {expected['lost_s']:.2f} s")
    print(f"goodput: {measured['goodput']:.3f}, the model says {expected['goodput']:.3f}")
    settings = {"seed": given.seed, "deaths": given.deaths, "death_s": DEATH_S, "unit": "s"}
    inputs = {"interval_s": interval_s, "commit_s": commit_s, "restart_s": restart_s}
    results = {**inputs, "measured": measured, "standard_error_s": error_s, "model": expected, "lost": lost}
    write_results("goodput", {**settings, **_rounded({**results, "attempts.jsonl": said})})
    return int(abs(measured["lost_s"] - expected["lost_s"]) > 3 * error_s)


def die(run: RunDir, lives_s: float) -> Death:
    """Resume the run, and kill all its ranks so long after the first step."""
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: "first step after" in ranks.logs[0].read_text(), "no first step")
        first = time.time()
        time.sleep(lives_s)
        for rank in range(len(ranks.processes)):
            killed = ranks.signal(signal.SIGKILL, rank)
        ranks.wait()
    store = CheckpointStore(run.checkpoints)
    # A line is written right before the save of its step begins.
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
    """Floats to a millisecond, in whatever they are nested in."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
