"""The storm: a rank is killed every few seconds for as long as the run takes; the run must finish, with the same bits.

Beside it the same training under torchrun's elastic restart with a checkpoint after each epoch, which has as long as
Laststep took, twice. Goodput is the time that the kept steps take undisturbed, divided by the time that passed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._measure import write_results
from tests.faults import checks
from tests.faults.plan import RunPlan, Setting
from tests.faults.run import BACK_DEADLINE_S, Run
from tests.faults.site import BATCH, NODES, Site
from tests.support.project import PROJECT
from trainer.records.metrics import is_step, read_lines

PACE_MS = 100  # of a batch
EPOCH_STEPS = 50
SETTING = Setting(2, 1, BATCH, 0, disk=False, clock=False)
MARGIN = 1.1  # the run is long enough for more deaths than asked for
POLL_S = 0.1


@dataclass
class Outcome:
    """What a trainer made of the storm."""

    deaths: int
    finished: bool
    wall_s: float  # from the first step
    kept_steps: int
    repeated_steps: int  # done more than once
    step_s: float  # median

    @property
    def goodput(self) -> float:
        """The share of the time in which the run got on."""
        return self.kept_steps * self.step_s / self.wall_s


def run_storm(site: Site, period_s: float, deaths: int) -> int:
    """Carry out the storm; returns 1 if the run does not finish with the same bits or has too few deaths."""
    epochs = round(MARGIN * deaths * period_s / (EPOCH_STEPS * PACE_MS / 1000))
    words = [f"train.epochs={epochs}"]
    calm = Run(site, 0, RunPlan("storm-undisturbed", SETTING, ()), lambda _: None, words)
    calm.live(None)
    print(f"undisturbed: {calm.total} steps", flush=True)
    found = {"Laststep": _laststep(site, words, period_s, wrong := list(calm.wrong), calm)}
    found["torchrun"] = _torchrun(site, epochs, period_s, 2 * found["Laststep"].wall_s)
    print(f"one rank of two killed every {period_s:g} s; {EPOCH_STEPS * epochs} steps")
    for name, one in found.items():
        end = "finished" if one.finished else "did not finish"
        print(
            f"{name:>9}: goodput {one.goodput:.1%}, {one.deaths} deaths, {end} in {one.wall_s:.0f} s, "
            f"kept {one.kept_steps} steps, repeated {one.repeated_steps}"
        )
    if found["Laststep"].deaths < deaths:
        wrong.append(f"only {found['Laststep'].deaths} deaths of {deaths}")
    for what in wrong:
        print(f"VIOLATION  {what}")
    results = {name: {**asdict(one), "goodput": round(one.goodput, 4)} for name, one in found.items()}
    write_results("storm", {"period_s": period_s, "violations": wrong, **results})
    return int(bool(wrong))


def _laststep(site: Site, words: list[str], period_s: float, wrong: list[str], calm: Run) -> Outcome:
    run = Run(site, 0, RunPlan("storm", SETTING, ()), lambda _: None, words)
    victim = run.victim
    victim.set_pace(PACE_MS)
    run.submit()
    victim.wait(lambda: victim.log.last("step"), BACK_DEADLINE_S, "no step")
    began = time.time()
    with _killing(period_s, lambda: [rank.pid for rank in victim.ranks().values()]) as killed:
        while not victim.finished:
            if not victim.jobs and not victim.finished:
                wrong.append("its job left the queue before the run finished")
                break
            time.sleep(POLL_S)
    times = [line["time"] for line in read_lines(victim.run.metrics) if is_step(line)]
    lost = sum(record["lost_steps"] for record in victim.records())
    if not wrong:
        undisturbed = calm.result()
        wrong += checks.check_metrics(read_lines(victim.run.metrics), undisturbed.metrics)
        if run.result().weights != undisturbed.weights:
            wrong.append("the final weights differ from the undisturbed run's")
    return Outcome(len(killed), victim.finished, max(times) - began, len(times), lost, _median_gap(times))


def _torchrun(site: Site, epochs: int, period_s: float, longest_s: float) -> Outcome:
    folder = site.folder / "torchrun"
    folder.mkdir()
    (folder / "pace").write_text(str(PACE_MS))
    program = Path(sys.executable).with_name("torchrun")
    words = (str(program), "--standalone", "--nproc-per-node=2", "--max-restarts=100000", "-m", "tests.faults.elastic")
    command = f"cd {PROJECT}; OMP_NUM_THREADS=1 {shlex.join([*words, str(folder), str(epochs)])}"
    job = site.cluster.run(
        "sbatch", "--parsable", "-w", NODES[0], "-c", "2", "-o", str(folder / "log"), f"--wrap={command}"
    )
    steps, kept = folder / "steps.txt", folder / "epochs.txt"
    site.cluster.wait_for(steps.exists, BACK_DEADLINE_S, "torchrun did no step")
    began = time.time()

    def ranks() -> list[int]:
        pids = [int(file.read_text() or 0) for file in folder.glob("rank_*.pid")]
        return [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]

    def done() -> int:
        return int(kept.read_text() or 0) if kept.exists() else 0

    with _killing(period_s, ranks) as killed:
        while done() < epochs and time.time() < began + longest_s:
            time.sleep(POLL_S)
    wall_s = time.time() - began
    site.cluster.run("scancel", job.strip(), check=False)
    lines = [line.split() for line in steps.read_text().splitlines()]
    numbers, times = [int(number) for number, _ in lines], [float(at) for _, at in lines]
    repeated = len(numbers) - len(set(numbers))
    return Outcome(len(killed), done() == epochs, wall_s, done() * EPOCH_STEPS, repeated, _median_gap(times))


@contextlib.contextmanager
def _killing(period_s: float, ranks: Callable[[], list[int]]) -> Iterator[list[int]]:
    """Kill one of the ranks every `period_s`; gives the list of those killed."""
    done, killed, draw = threading.Event(), list[int](), random.Random(0)

    def kill() -> None:
        while not done.wait(period_s):
            while not (alive := ranks()) and not done.wait(POLL_S):
                pass
            with contextlib.suppress(ProcessLookupError, IndexError):
                pid = draw.choice(sorted(alive))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                print(f"death {len(killed)}", flush=True)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def _median_gap(times: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(times))
