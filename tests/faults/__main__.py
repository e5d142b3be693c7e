"""`python -m tests.faults --faults N --seed S`: inject N random faults into real runs on a throwaway Slurm.

With --results FILE the outcome of each run is kept there until all are done; the same command, typed again after an
interruption, continues with the runs that are missing, also with newer code. --report then says what was found so far,
and names the commits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.faults import local
from tests.faults.checks import Undisturbed
from tests.faults.faults import ALL, FAULTS, PROCESSES
from tests.faults.plan import RunPlan, layouts, make_plan
from tests.faults.processes import plan_in_turn
from tests.faults.report import Hit, Report, machine_lines, minutes, processes_page
from tests.faults.run import Run
from tests.faults.site import Site
from tests.faults.slurm_day import HOW, PHASES, run_slurm_day
from tests.faults.storm import run_storm
from tests.slurm.cluster import missing
from tools.sections import put

LIVES = 3  # how many runs may try a fault before it is reported as never injected


class Harness:
    """Carries out the plan, several runs at a time, and collects their reports."""

    def __init__(
        self, sites: Sequence[Site], plan: Sequence[RunPlan], report: Report, keep: Path, results: Path | None
    ) -> None:
        self.sites = sites
        self.plan = deque(run for run in plan if run.name not in report.done)
        self.results = results
        self.report = report
        self.keep = keep
        self.undisturbed: dict[str, Undisturbed] = {}
        self._layouts = deque(layouts(self.plan))
        self._taken: dict[str, list[Hit]] = {}  # by runs of which a part is left
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Carry out the whole plan: first the undisturbed runs, then the others."""
        for work in (self._undisturbed, self._under_faults):
            # Daemon threads: an interrupted harness must not wait for runs whose cluster it stops.
            threads = [threading.Thread(target=self._do, args=(work, site), daemon=True) for site in self.sites]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._errors:
                raise self._errors[0]

    def _do(self, work: Callable[[Site], None], site: Site) -> None:
        try:
            work(site)
        except BaseException as error:  # the main thread raises it again
            self._errors.append(error)

    def _undisturbed(self, site: Site) -> None:
        while self._layouts:
            setting = self._layouts.popleft()
            run = Run(site, RunPlan(f"undisturbed-{setting.layout}", setting, ()), self._tell)
            run.live(None)
            if run.wrong:
                raise RuntimeError(f"the undisturbed run {run.victim.run.path}: {run.wrong}")
            self.undisturbed[setting.layout] = run.result()

    def _under_faults(self, site: Site) -> None:
        while self.plan:
            plan = self.plan.popleft()
            hits: list[Hit] = []

            def tell(hit: Hit, hits: list[Hit] = hits) -> None:
                hits.append(hit)
                self._tell(hit)

            run = Run(site, plan, tell)
            try:
                left = run.live(self.undisturbed[plan.setting.layout])
            except Exception as error:  # the reports of the other runs are still worth having
                run.wrong.append(f"the harness failed: {error!r}")
                left = []
            run.close(self.keep)
            with self._lock:
                self.report.runs += 1
                self.report.wrong += [f"{plan.name}: {what}" for what in run.wrong]
                for what in run.wrong:
                    print(f"         WRONG  {plan.name}: {what}", flush=True)
            name, _, life = plan.name.partition(".")
            if left and int(life or 1) < LIVES:
                # At the front: the run's faults are kept together with those that it has taken.
                self.plan.appendleft(replace(plan, name=f"{name}.{int(life or 1) + 1}", shots=tuple(left)))
                self._taken.setdefault(name, []).extend(hits)
                continue
            if left:
                self.report.wrong.append(f"{plan.name}: never injected: {', '.join(shot.fault for shot in left)}")
            with self._lock:
                self.report.done[name] = [*self._taken.pop(name, []), *hits]
                if self.results is not None:
                    self.report.save(self.results)

    def _tell(self, hit: Hit) -> None:
        with self._lock:
            self.report.hits.append(hit)
            print(self.report.line(hit), flush=True)


def main(words: Sequence[str]) -> int:
    """Returns 1 if there was a violation, 2 if no fault could be injected."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=30, metavar="N", help="faults to inject (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plan (default: 0)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=2 * (os.cpu_count() or 1),
        metavar="K",
        help="runs at a time, each on a Slurm of its own (default: 2 per core)",
    )
    parser.add_argument(
        "--only", action="append", choices=sorted({**ALL, **local.KINDS}), help="inject this kind only; repeatable"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="a page to write a section of: docs/reports.md")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the outcome of each run here meanwhile")
    parser.add_argument("--silent", action="store_true", help="collectives do not fail when a rank dies, as NCCL's")
    parser.add_argument("--processes", action="store_true", help="the worst day of processes, instead of random faults")
    storm = parser.add_argument_group("storm", "a rank is killed again and again, until the run has finished")
    storm.add_argument("--storm", action="store_true", help="do this instead of random faults")
    storm.add_argument("--period", type=float, default=15, metavar="S", help="a death every so often (default: 15 s)")
    storm.add_argument("--deaths", type=int, default=40, metavar="N", help="least number of deaths (default: 40)")
    slurm = parser.add_argument_group("Slurm", "each call of a Slurm command fails once, in each way")
    slurm.add_argument("--slurm", action="store_true", help="do this instead of random faults")
    slurm.add_argument("--how", action="append", choices=tuple(HOW), help="misbehave in this way only; repeatable")
    slurm.add_argument("--phase", action="append", choices=PHASES, help="only calls of this phase; repeatable")
    given = parser.parse_args(words)
    if lack := missing():
        print(lack, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the cluster is stopped too
    if given.slurm:
        return run_slurm_day(given.faults, given.seed, given.at_once, given.report, given.how, given.phase)
    folder = Path(tempfile.mkdtemp(prefix="laststep-faults-"))
    with contextlib.ExitStack() as stack:
        count = 1 if given.storm else min(given.at_once, given.faults)
        sites = [
            stack.enter_context(contextlib.closing(_site(folder, number, given.silent))) for number in range(count)
        ]
        if given.processes:
            status = _processes(given, sites, folder)
        elif given.storm:
            status = run_storm(sites[0], given.period, given.deaths, given.report)
        else:
            status = _chaos(given, sites, folder / "kept")
    if status == 0:
        shutil.rmtree(folder)
    return status


def _site(folder: Path, number: int, silent: bool) -> Site:
    (own := folder / f"site-{number}").mkdir()
    return Site(own, accounting=number == 0, silent=silent)


def _processes(given: argparse.Namespace, sites: Sequence[Site], folder: Path) -> int:
    """Strike processes at each moment in turn, on Slurm and under --local at the same time; returns the exit status."""
    lacks, forks = sites[0].lacks, sites[0].forks
    kinds = {name: fault for name, fault in PROCESSES.items() if not given.only or name in given.only}
    kinds_here = {name: fault for name, fault in local.KINDS.items() if not given.only or name in given.only}
    turns, turns_here = (sum(len(fault.moments) for fault in some.values()) for some in (kinds, kinds_here))
    count_here = round(given.faults * turns_here / (turns + turns_here))
    plan = plan_in_turn(kinds, given.faults - count_here, given.seed, lacks.keys()) if kinds else []
    report = Report(given.seed, plan, len(sites), lacks)
    hits: list[Hit] = []
    missed: list[str] = []

    def tell(hit: Hit) -> None:
        hits.append(hit)
        print(report.line(hit), flush=True)

    def here() -> None:
        try:
            shots = local.shots_in_turn(kinds_here, count_here, random.Random(given.seed))
            missed.extend(local.run_local(folder, shots, forks, tell))
        except Exception as error:
            missed.append(f"the harness failed under --local: {error!r}")

    thread = threading.Thread(target=here, daemon=True)
    thread.start()
    try:
        Harness(sites, plan, report, folder / "kept", None).run()
        thread.join()
    except (KeyboardInterrupt, SystemExit):
        missed.append("interrupted")
    lines = [
        f"{report.runs} runs on Slurm, {len(hits)} under --local, seed {given.seed}, in "
        f"{minutes(report.elapsed_s)} (min:s)",
        *machine_lines(report.commits),
        *(f"not tested ({what}): {why}" for what, why in lacks.items()),
    ]
    page = processes_page([*report.hits, *hits], {**PROCESSES, **local.KINDS}, lines, [*report.wrong, *missed])
    print(page)
    if given.report:
        put(page, given.report)
    return int("VIOLATION" in page)


def _chaos(given: argparse.Namespace, sites: Sequence[Site], kept: Path) -> int:
    """Inject random faults; returns the exit status."""
    kinds = {name: fault for name, fault in FAULTS.items() if not given.only or name in given.only}
    plan = make_plan(kinds, given.faults, given.seed, sites[0].lacks.keys())
    report = Report(given.seed, plan, len(sites), sites[0].lacks, silent=given.silent)
    if given.results:
        try:
            report.load(given.results)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    try:
        Harness(sites, plan, report, kept, given.results).run()
    except (KeyboardInterrupt, SystemExit):  # what was found so far is worth having
        report.interrupted = True
    print(report.terminal())
    if given.report:
        put(report.markdown(), given.report)
    if report.violations:
        print(f"the folders of runs with violations are in {kept}")
    if report.interrupted:
        return 130
    if given.results and report.violations:
        report.keep_good(given.results)
        print("the same command repeats these runs, and no others")
    elif given.results:
        given.results.unlink(missing_ok=True)  # the same command begins anew
    return int(bool(report.violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
