"""How long `launch.py` takes to respond, compared with the imports that it cannot do without.

`python -m benchmarks.start [--runs N]`. The commands take turns, so that other load on the machine affects all of them
alike. Each must take at most 1.5 times as long as the imports of its turn; if a median misses that by more than the
noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks._measure import PROJECT, Check, conclude

LAUNCH = [sys.executable, str(PROJECT / "launch.py")]
BASELINE = "import submitit, omegaconf"
COMMANDS = {
    BASELINE: [sys.executable, "-c", BASELINE],
    "launch.py --help": [*LAUNCH, "--help"],
    "launch.py --dry-run --nodes 2": [*LAUNCH, "--config", "mnist", "--dry-run", "--nodes", "2"],
}
LIMIT = 1.5  # times the baseline


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a command is over the limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.start", description="How long launch.py takes to respond.")
    parser.add_argument("--runs", type=int, default=20, help="runs of each command (default: 20)")
    runs = parser.parse_args(words).runs
    if runs < 2:
        parser.error("--runs must be at least 2")

    times = measure(runs)
    baseline = statistics.median(times[BASELINE])
    results = {name: summary(taken, baseline) for name, taken in times.items()}
    print(f"{'median':>8}  {'10-90 %':>13}  {'ratio':>5}  command ({runs} runs each)")
    for name, r in results.items():
        print(f"{r['median_ms']:>5.0f} ms  {r['p10_ms']:>4.0f} - {r['p90_ms']:>3.0f} ms  {r['ratio']:>5.2f}  {name}")
    checks = [
        Check(f"{name} / {BASELINE}", LIMIT, [ours / least for ours, least in zip(times[name], times[BASELINE])])
        for name in COMMANDS
        if name != BASELINE
    ]
    return conclude("start", {"runs": runs, "results": results}, checks)


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds that each command took, by round. The first round, which fills caches, is dropped."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs + 1):
            for name, command in COMMANDS.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
                times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def summary(taken: list[float], baseline: float) -> dict[str, float]:
    """Median and spread in milliseconds, and the ratio of the median to the baseline's."""
    tenths = statistics.quantiles(taken, n=10)
    median = statistics.median(taken)
    return {
        "median_ms": round(1000 * median, 1),
        "p10_ms": round(1000 * tenths[0], 1),
        "p90_ms": round(1000 * tenths[-1], 1),
        "ratio": round(median / baseline, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
