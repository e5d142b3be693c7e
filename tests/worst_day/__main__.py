"""`python -m tests.worst_day --runs N --seed S`: every file operation of a short run fails once, in turn.

With --results FILE the outcome of each run is kept there; the same command, typed again after an interruption,
continues with the runs that are missing, and repeats those that broke a promise.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from tests.support.project import make_shared_folder, remove_shared_folder
from tests.worst_day.disk import ROLES, Call
from tests.worst_day.plan import make_plan
from tests.worst_day.report import Report
from tests.worst_day.scenario import Victim, carry_out, expected
from tools.sections import put

SCENARIOS = ("local", "job")


def main(words: Sequence[str]) -> int:
    """Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.worst_day", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, metavar="N", help="the most runs to make (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the plan (default: 1)")
    parser.add_argument("--at-once", type=int, default=2, metavar="K", help="runs at a time (default: 2)")
    parser.add_argument("--only", metavar="TEXT", help="only the faults whose names contain this")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the outcome of each run here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a page to write a section of: docs/reports.md")
    parser.add_argument("--keep", action="store_true", help="keep the folder of each run, not only of bad ones")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    make_shared_folder()
    folder = Path(tempfile.mkdtemp(prefix="laststep-worst-day-"))
    try:
        return _run(given, folder)
    finally:
        remove_shared_folder()
        if not any(folder.glob("kept/*")):
            shutil.rmtree(folder, ignore_errors=True)


def _run(given: argparse.Namespace, folder: Path) -> int:
    traces = {scenario: _trace(scenario, folder) for scenario in SCENARIOS}
    undisturbed = {scenario: expected(scenario, folder) for scenario in SCENARIOS}
    plan = make_plan(traces, given.seed)
    report = Report(sum(map(Counter.total, traces.values())), sum(map(len, traces.values())), len(plan))
    if given.results:
        report.load(given.results)
        report.done = {name: one for name, one in report.done.items() if not one["wrong"]}
    chosen = [planned for planned in plan if not given.only or given.only in str(planned)][: given.runs]
    left = deque(planned for planned in chosen if str(planned) not in report.done)
    lock, stopped, numbers = threading.Lock(), threading.Event(), iter(range(1 << 30))

    def work() -> None:
        while True:
            try:
                planned, number = left.popleft(), next(numbers)
            except IndexError:
                return
            kept: list[Path] = []

            def keep(path: Path, kept: list[Path] = kept) -> None:
                kept.append(Path(shutil.copytree(path, folder / "kept" / path.name)))

            outcome = carry_out(
                planned.scenario,
                planned.fault,
                folder / f"run-{number}",
                undisturbed[planned.scenario],
                keep,
                given.keep,
            )
            if stopped.is_set():  # what such a run needs is being removed
                return
            with lock:
                report.done[str(planned)] = {
                    "kind": planned.fault.kind,
                    "role": ROLES[planned.fault.call.role],
                    "outcome": outcome.kind,
                    "wrong": outcome.wrong,
                    "fired": outcome.fired,
                    "reasons": outcome.reasons,
                    "redone": outcome.redone,
                    "seconds": round(outcome.seconds, 1),
                }
                if given.results:
                    report.save(given.results)
                print(f"{outcome.seconds:5.1f} s  {outcome.kind:50} {planned}", flush=True)
                for what in outcome.wrong:
                    print(f"         WRONG  {what}; {', '.join(map(str, kept))}", flush=True)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(given.at_once)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except (KeyboardInterrupt, SystemExit):
        stopped.set()
        left.clear()
        print("interrupted; the same command continues", file=sys.stderr)
    if given.report:
        put(report.markdown(), given.report)
    outcomes = Counter(one["outcome"] for one in report.done.values())
    print(f"{len(report.done)} runs: {', '.join(f'{count} {what}' for what, count in outcomes.most_common())}")
    return int(bool(report.violations))


def _trace(scenario: str, folder: Path) -> Counter[Call]:
    """The calls of an undisturbed run."""
    victim = Victim(folder / f"traced-{scenario}", tracing=True)
    outcome = victim.lives(scenario, None)
    if outcome.wrong:
        raise RuntimeError(f"the undisturbed run {victim.run.path}: {outcome.wrong}")
    return victim.disk.calls()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
