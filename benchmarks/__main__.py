"""All benchmarks of Laststep alone, one after another: `python -m benchmarks`, a quarter of an hour on two cores.

Each writes its figures into results/. Where no Slurm can be started, `submit` says so and measures nothing. What needs
other trainers too is a package of its own: benchmarks.peers.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks._measure import PROJECT


def main() -> int:
    """Run each file; 1 when one of them misses its limit."""
    began, missed = time.monotonic(), []
    for path in sorted((PROJECT / "benchmarks").glob("[!_]*.py")):
        print(f"== {path.stem}, after {time.monotonic() - began:.0f} s", flush=True)
        # In a process of its own: memory that one leaves behind, in pieces, would slow down the next.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}"], cwd=PROJECT).returncode:
            missed.append(path.stem)
    print(f"== {time.monotonic() - began:.0f} s in all; limits missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
