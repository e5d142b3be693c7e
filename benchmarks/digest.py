"""The cost of the digest of the state every 100 steps (train.digest_every, the default), in steps of 10 ms.

`python -m benchmarks.digest [--starts N] [--pairs N]`, three minutes. Two trainings of the same model on one thread of
a CPU, see benchmarks/overhead.py, take turns (benchmarks/_turns.py): one with the digest, one without. A turn has about
five digests. A ratio compares the mean time of a step in a turn with that of the turns before and after it. The median
ratio has a limit; if it is over it by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks import _turns, overhead
from benchmarks._measure import Check, conclude, interval, spread

LIMIT, EVERY, TURN_S = 1.01, 100, 5.0
STARTS, PAIRS = 2, 6


def main(words: list[str] | None = None) -> int:
    """Measure, print, write the results; returns 1 if the digest costs too much."""
    parser = argparse.ArgumentParser(prog="benchmarks.digest", description="The cost of a digest every 100 steps.")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"processes of each training (default: {STARTS})")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of turns of each start (default: {PAIRS})")
    given = parser.parse_args(words)
    if given.starts < 1 or given.pairs < 1 or given.starts * given.pairs < 2:
        parser.error("--starts and --pairs must be at least 1, and one of them 2")

    without, with_digest = (
        partial(overhead.start, "laststep", "10 ms", 1, {}, words=[f"train.digest_every={every}"])
        for every in ("null", EVERY)
    )
    found = _turns.compare(without, with_digest, TURN_S, given.pairs, given.starts)
    low, high = interval(found.ratios)
    figures = {"step_ms": spread([1e3 * s for s in found.plain_s], 2), "ratio": spread(found.ratios, 4)}
    print(f"step {figures['step_ms']['median']} ms; with a digest every {EVERY} steps", end=" ")
    print(f"{figures['ratio']['median']} times that (95 %: {low:.4f} - {high:.4f}, {len(found.ratios)} pairs of turns)")
    return conclude(
        "digest",
        {"starts": given.starts, "pairs": given.pairs, "turn_s": TURN_S, **figures},
        [Check(f"step with a digest every {EVERY} steps / without", LIMIT, found.ratios)],
    )


if __name__ == "__main__":
    sys.exit(main())
