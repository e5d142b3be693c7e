"""Run the benchmarks of docs/benchmarks.md one after another: `python -m benchmarks [NAME ...]`, about 15 minutes.

Each writes its figures to results/; at the end comes a table of all limits with their verdicts. The exit status is 1 if
a benchmark failed, or missed a limit by more than the noise. Run nothing else meanwhile. Where no Slurm can be started,
`submit` says so and measures nothing.

Only when named: `goodput`, `replicas`, `scale` and `step_profile`, which have no limits; `digest`, `memory`, `resume`,
`sharded_save`, `sharding` and `shares`, which take minutes each; and `gpu`. The comparison with other trainers is a
separate package, benchmarks.peers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._measure import CHECK_TITLES, MISSED, PROJECT, RESULTS, check_line

FOUND = {path.stem for path in Path(__file__).parent.glob("[!_]*.py")}
SLOW = {"digest", "memory", "resume", "sharded_save", "sharding", "shares"}
BY_NAME_ONLY = {"gpu", "goodput", "replicas", "scale", "step_profile", *SLOW}


def main() -> int:
    """Run each benchmark; returns 1 if any of them failed or missed a limit."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Run the benchmarks, and check their limits.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(sorted(FOUND))}")
    names = parser.parse_args().names
    if unknown := set(names) - FOUND:
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark")
    began = time.monotonic()
    failed: list[str] = []
    over: list[str] = []  # a limit, by more than the noise
    lines: list[str] = []
    for name in names or sorted(FOUND - BY_NAME_ONLY):
        started, results = time.monotonic(), RESULTS / f"{name}.json"
        before = results.stat().st_mtime_ns if results.exists() else 0
        print(f"== {name}, after {started - began:.0f} s", flush=True)
        # A separate process each: fragmented memory left behind by one would slow down the next.
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=PROJECT).returncode
        measured = results.exists() and results.stat().st_mtime_ns != before
        checks = json.loads(results.read_text()).get("checks", []) if measured else []
        if status:
            missed = any(check["verdict"] == MISSED for check in checks)
            (over if missed else failed).append(name)
        took = f"{name}, {time.monotonic() - started:.0f} s"
        lines += [f"{took}: failed" if name in failed else took, *map(check_line, checks)]
    print(f"\n{CHECK_TITLES} of limit", *lines, sep="\n")
    print(
        f"{time.monotonic() - began:.0f} s in total; failed: {', '.join(failed) or 'none'}; "
        f"over a limit: {', '.join(over) or 'none'}"
    )
    return int(bool(failed or over))


if __name__ == "__main__":
    sys.exit(main())
