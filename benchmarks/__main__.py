"""All benchmarks of Laststep alone, one after another: `python -m benchmarks`, about half an hour.

Each writes its figures into results/. Where no Slurm can be started, `submit` says so and measures nothing. What needs
other trainers too is a package of its own: benchmarks.peers.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> int:
    """Run each file's `main`; 1 when one of them misses its limit."""
    status = 0
    for path in sorted(Path(__file__).resolve().parent.glob("[!_]*.py")):
        print(f"== {path.stem}", flush=True)
        status |= importlib.import_module(f"benchmarks.{path.stem}").main([])
    return status


if __name__ == "__main__":
    sys.exit(main())
