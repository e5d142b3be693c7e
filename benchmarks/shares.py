"""What train.shares costs: the time of a step, and the bytes that the ranks send.

`python -m benchmarks.shares [--turns N] [--steps N]`. ResNet-50 (25.6 million parameters) on images of 64 x 64, eight
per share, on CPUs with one thread per rank. Two and four ranks with one share each are compared with plain
DistributedDataParallel, and one rank with four shares with plain accumulation over four micro-batches. The two of a
pair take turns; a ratio is that of the median times of a step in the same turn. The bytes are those of the loopback
device, per step, so nothing else should use it meanwhile. If a median ratio is over its limit, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks._measure import PROJECT, spread, write_results
from trainer.records.metrics import read_lines

PER_SHARE = 8  # images
DEADLINE_S = 600.0


class Pair(NamedTuple):
    """A number of ranks, what is compared on them, and the highest acceptable ratio."""

    ranks: int
    plain: str
    shares: str
    limit: float


PAIRS = (
    Pair(2, "train.accumulate=1", "train.shares=2", 1.05),
    Pair(4, "train.accumulate=1", "train.shares=4", 1.05),
    Pair(1, "train.accumulate=4", "train.shares=4", 1.03),
)


class Trial(NamedTuple):
    """One training."""

    step_s: float  # median
    sent: float  # bytes per step of all ranks


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.shares", description="What train.shares costs.")
    parser.add_argument("--turns", type=int, default=3, help="trainings of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each training (default: 20)")
    given = parser.parse_args(words)
    if given.turns < 2 or given.steps < 4:
        parser.error("--turns must be at least 2, --steps at least 4")
    missed, results = 0, []
    for pair in PAIRS:
        turns = [
            (trial(pair.ranks, pair.plain, given.steps), trial(pair.ranks, pair.shares, given.steps))
            for _ in range(given.turns)
        ]
        ratio = spread([ours.step_s / plain.step_s for plain, ours in turns])
        sent = [statistics.median(turn[which].sent for turn in turns) for which in (0, 1)]
        seconds = [statistics.median(turn[which].step_s for turn in turns) for which in (0, 1)]
        late = ratio["median"] > pair.limit
        missed += late
        print(
            f"{pair.ranks} rank{'s' * (pair.ranks > 1)}: {pair.plain} {seconds[0]:.3f} s, {pair.shares} "
            f"{seconds[1]:.3f} s, ratio {ratio['median']:.3f} (limit {pair.limit}); sent per step "
            f"{sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} MB",
            flush=True,
        )
        results.append({**pair._asdict(), "ratio": ratio, "step_s": seconds, "sent_bytes": [round(n) for n in sent]})
    write_results("shares", {"turns": given.turns, "steps": given.steps, "limits_missed": missed, "pairs": results})
    return int(missed > 0)


def trial(ranks: int, option: str, steps: int) -> Trial:
    """Train on this many ranks; the first third of the steps does not count."""
    shares = max(ranks, int(option.partition("=")[2]))
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--name=shares", f"launch.root={folder}", "device=cpu", "data.name=fake", "data.args.image_size=64",
            "data.args.classes=1000", f"data.args.samples={PER_SHARE * shares * steps}", "model.name=resnet50",
            f"train.batch_size={PER_SHARE * shares}", "train.epochs=1", "train.log_every=1",
            "checkpoint.every_epochs=null", "checkpoint.every_minutes=null", "optim.lr=0.01", option,
        ]  # fmt: skip
        command = [sys.executable, "-m", "trainer", *(["--spawn", str(ranks)] if ranks > 1 else []), *words]
        log, before = Path(folder) / "log", _sent()
        with log.open("wb") as output:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=PROJECT, env=env, stdout=output, stderr=output, timeout=DEADLINE_S)
        sent = _sent() - before
        lines = [line for line in read_lines(Path(folder) / "shares" / "metrics.jsonl") if "lr" in line]
        if len(lines) != steps:
            raise RuntimeError(f"did not train:\n{log.read_text()}")
    took = [after["time"] - before["time"] for before, after in pairwise(lines[steps // 3 :])]
    return Trial(statistics.median(took), sent / (steps + 1))  # the warm-up sends as much as a step


def _sent() -> int:
    """The bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


if __name__ == "__main__":
    sys.exit(main())
