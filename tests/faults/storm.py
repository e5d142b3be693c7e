"""The storm: a rank is killed every few seconds for as long as the run takes; the run must finish, with the same bits.

Beside it, at the same time, the same training under torchrun's elastic restart with a checkpoint after each epoch.
Goodput is the time that the kept steps take undisturbed, divided by the time that passed.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from laststep.records.metrics import is_step, newest_step, read_lines
from tests.faults import checks
from tests.faults.checks import Attempt
from tests.faults.plan import RunPlan, Setting
from tests.faults.report import machine_lines, minutes
from tests.faults.run import BACK_DEADLINE_S, Run
from tests.faults.site import BATCH, SPARE, Site
from tests.support.project import PROJECT
from tools.sections import put

PACE_MS = 100  # of a batch
EPOCH_STEPS = 50
SETTING = Setting(2, 1, BATCH, 0, disk=False, clock=False)
MARGIN = 1.1  # the run is long enough for more deaths than asked for
TOO_LONG = 3  # a run that takes this many times as long as undisturbed gets nowhere
POLL_S = 0.1


@dataclass
class Outcome:
    """What a trainer made of the storm."""

    died: list[float] = field(default_factory=list)  # when ranks were killed, in Unix time
    finished: bool = False
    wall_s: float = 0.0  # from the first step
    kept_steps: int = 0
    lost_steps: int = 0  # completed, and done again
    step_times: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The median time of a step."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.step_times))

    @property
    def goodput(self) -> float:
        """The share of the time in which the run got on."""
        return self.kept_steps * self.step_s / self.wall_s

    @property
    def pauses_s(self) -> list[float]:
        """After each death but one at the end: the longest time between two steps until the next death."""
        gaps = list(itertools.pairwise(self.step_times))
        spans = list(itertools.pairwise([*self.died, float("inf")]))
        around = [[end - begin for begin, end in gaps if end > died and begin < later] for died, later in spans]
        return [max(found) for found in around if found]


def run_storm(site: Site, period_s: float, deaths: int, report: Path | None) -> int:
    """Carry out the storm; returns 1 if the run does not finish with the same bits or has too few deaths."""
    epochs = round(MARGIN * deaths * period_s / (EPOCH_STEPS * PACE_MS / 1000))
    words = [f"train.epochs={epochs}", "train.log_every=1"]  # which dates each step by itself
    calm = Run(site, RunPlan("storm-undisturbed", SETTING, ()), lambda _: None, words)
    calm.live(None)
    if calm.wrong:
        raise RuntimeError(f"the undisturbed run {calm.victim.run.path}: {calm.wrong}")
    print(f"undisturbed: {calm.total} steps", flush=True)
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(_torchrun, site, epochs, period_s, over)
        try:
            laststep, wrong = _laststep(site, words, period_s, calm)
        finally:
            over.set()
    torchrun = other.result()
    if len(laststep.died) < deaths:
        wrong.append(f"only {len(laststep.died)} deaths of {deaths}")
    page = _page(period_s, calm.total, laststep, torchrun, wrong)
    print(page)
    if report:
        put(page, report)
    return int(bool(wrong))


def _laststep(site: Site, words: list[str], period_s: float, calm: Run) -> tuple[Outcome, list[str]]:
    run = Run(site, RunPlan("storm", SETTING, ()), lambda _: None, words)
    victim = run.victim
    victim.set_pace(PACE_MS)
    run.submit()
    victim.wait(lambda: victim.log.last("step"), BACK_DEADLINE_S, "no step")
    began, found = time.time(), Outcome()

    def step() -> int:
        newest = newest_step(victim.run.metrics)
        return int(newest["step"]) if newest else 0

    with _killing("Laststep", period_s, lambda: [rank.pid for rank in victim.ranks().values()], step) as found.died:
        while not victim.finished:
            if not victim.jobs and not victim.finished:
                run.wrong.append("its job left the queue before the run finished")
                break
            if time.time() > began + TOO_LONG * calm.total * PACE_MS / 1000 + BACK_DEADLINE_S:
                run.wrong.append(f"HANGS: not finished after {time.time() - began:.0f} s")
                break
            time.sleep(POLL_S)
            victim.log.poll()
    if not run.wrong:
        run.check(calm.result())
    found.step_times = [line["time"] for line in read_lines(victim.run.metrics) if is_step(line)]
    records, begun = victim.records(), victim.traces()
    for record, after in itertools.pairwise(records):
        trained = begun.get(Attempt.of(record), 0)
        found.lost_steps += checks.lost_steps(record["start_step"], trained, after["start_step"])
    found.finished, found.kept_steps = victim.finished, len(found.step_times)
    found.wall_s = max(found.step_times) - began
    return found, run.wrong


def _torchrun(site: Site, epochs: int, period_s: float, over: threading.Event) -> Outcome:
    folder = site.folder / "torchrun"
    folder.mkdir()
    (folder / "pace").write_text(str(PACE_MS))
    program = Path(sys.executable).with_name("torchrun")
    words = (str(program), "--standalone", "--nproc-per-node=2", "--max-restarts=100000", "-m", "tests.faults.elastic")
    command = f"cd {PROJECT}; OMP_NUM_THREADS=1 {shlex.join([*words, str(folder), str(epochs)])}"
    job = site.cluster.run(
        "sbatch", "--parsable", "-w", SPARE, "-c", "2", "-o", str(folder / "log"), f"--wrap={command}"
    )
    steps, kept = folder / "steps.txt", folder / "epochs.txt"
    site.cluster.wait_for(steps.exists, BACK_DEADLINE_S, "torchrun did no step")
    began, found = time.time(), Outcome()

    def ranks() -> list[int]:
        pids = [int(file.read_text() or 0) for file in folder.glob("rank_*.pid")]
        return [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]

    def done() -> int:
        return int(kept.read_text() or 0) if kept.exists() else 0

    with _killing("torchrun", period_s, ranks, lambda: EPOCH_STEPS * done()) as found.died:
        while done() < epochs and not over.wait(POLL_S):
            pass
    found.wall_s = time.time() - began
    site.cluster.run("scancel", job.strip(), check=False)
    lines = [line.split() for line in steps.read_text().splitlines()]
    found.step_times = [float(at) for _, at in lines]
    numbers = [int(number) for number, _ in lines]
    # A step is certainly complete once the next has begun, as for `checks.lost_steps`.
    found.lost_steps = sum(max(0, last - first) for last, first in itertools.pairwise(numbers))
    found.finished, found.kept_steps = done() == epochs, EPOCH_STEPS * done()
    return found


@contextlib.contextmanager
def _killing(
    name: str, period_s: float, ranks: Callable[[], list[int]], step: Callable[[], int]
) -> Iterator[list[float]]:
    """Kill one of the ranks every `period_s`, and print how far the run is; gives the list of the times."""
    done, died, draw, began = threading.Event(), list[float](), random.Random(0), time.time()

    def kill() -> None:
        while not done.wait(period_s):
            while not (alive := ranks()) and not done.wait(POLL_S):
                pass
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(draw.choice(sorted(alive)), signal.SIGKILL)
                died.append(time.time())
                print(f"{name}: death {len(died)} after {minutes(died[-1] - began)}, step {step()}", flush=True)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield died
    finally:
        done.set()
        thread.join()


def _page(period_s: float, total: int, laststep: Outcome, torchrun: Outcome, wrong: Sequence[str]) -> str:
    lines = [
        f"2 nodes with a rank each, {total} steps of {PACE_MS / 1000:g} s and more; one rank, chosen at random, is "
        f"killed every {period_s:g} s; {len(wrong)} violations",
        *machine_lines(),
        *(f"VIOLATION: {what}" for what in wrong),
    ]
    both = (laststep, torchrun)
    rows = [
        ("ranks killed", *(str(len(one.died)) for one in both)),
        ("time", *(f"{one.wall_s:.0f} s, {'finished' if one.finished else 'not finished'}" for one in both)),
        ("steps kept", *(f"{one.kept_steps} of {total}" for one in both)),
        ("finished steps done again", *(str(one.lost_steps) for one in both)),
        ("pause after a death: median, longest", *(_pauses(one.pauses_s) for one in both)),
        ("goodput", *(f"{one.goodput:.1%}" for one in both)),
    ]
    return "\n".join(
        [
            HEAD,
            *(f"* {line}" for line in lines),
            "",
            "| | Laststep | torchrun |",
            "| --- | --- | --- |",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            FOOT.format(steps=EPOCH_STEPS, seconds=EPOCH_STEPS * PACE_MS / 1000),
        ]
    )


def _pauses(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.1f} s, {max(found):.1f} s" if found else ""


HEAD = """\
## The storm

`python -m tests.faults --storm --report docs/reports.md`: a rank is killed again and again until the run has finished;
so is one of the same model under torchrun's elastic restart.
"""
FOOT = """\
*Goodput*: the time that the kept steps take undisturbed (their number times the median time of a step), divided by the
time since the first step. *torchrun*: `torchrun --max-restarts`, DistributedDataParallel and a checkpoint after each
epoch ({steps} steps, {seconds:g} s), as in torch's own examples.
"""
