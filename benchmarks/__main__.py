"""Run all benchmarks one after another: `python -m benchmarks`, about 15 minutes on two cores.

Each writes its figures to results/. Where no Slurm can be started, `submit` says so and measures nothing. The
comparison with other trainers is a separate package, benchmarks.peers.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks._measure import PROJECT


def main() -> int:
    """Run each benchmark; returns 1 if any of them missed its limit or failed."""
    began, missed = time.monotonic(), []
    for path in sorted((PROJECT / "benchmarks").glob("[!_]*.py")):
        print(f"== {path.stem}, after {time.monotonic() - began:.0f} s", flush=True)
        # A separate process each: fragmented memory left behind by one would slow down the next.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}"], cwd=PROJECT).returncode:
            missed.append(path.stem)
    print(f"== {time.monotonic() - began:.0f} s in total; limits missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
