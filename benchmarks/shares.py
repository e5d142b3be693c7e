"""What train.shares costs: the time of a step, and the bytes that the ranks send.

`python -m benchmarks.shares [--pairs N]`. ResNet-50 (25.6 million parameters) on images of 64 x 64, eight per share, on
CPUs with one thread per rank. Two and four ranks with one share each are compared with plain
DistributedDataParallel, and one rank with four shares with plain accumulation over four micro-batches. The two take
turns of seconds, see benchmarks/_turns.py. The bytes are those of the loopback device, so nothing else should use it
meanwhile. If a median ratio is over its limit by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks import _turns
from benchmarks._measure import Check, conclude, spread
from benchmarks._turns import Training
from laststep.tasks.classification import Classification

PER_SHARE = 8  # images
STEPS = 400  # more than any machine does in all turns


class Pair(NamedTuple):
    """A number of ranks, what is compared on them, and the highest acceptable ratio."""

    ranks: int
    plain: str
    shares: str
    limit: float
    turn_s: float


PAIRS = (
    Pair(2, "train.accumulate=1", "train.shares=2", 1.05, 1.5),
    Pair(4, "train.accumulate=1", "train.shares=4", 1.05, 3.0),
    Pair(1, "train.accumulate=4", "train.shares=4", 1.03, 2.0),
)


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.shares", description="What train.shares costs.")
    parser.add_argument("--pairs", type=int, default=4, help="turns of each kind (default: 4)")
    pairs = parser.parse_args(words).pairs
    if pairs < 2:
        parser.error("--pairs must be at least 2")
    results, checks = [], []
    for pair in PAIRS:
        plain, ours = (partial(start, pair.ranks, option) for option in (pair.plain, pair.shares))
        found = _turns.compare(plain, ours, pair.turn_s, pairs)
        calls = _shares(pair.ranks, pair.shares) // pair.ranks  # of Task.step, in a step of the optimizer
        seconds = [calls * statistics.median(each) for each in (found.plain_s, found.ours_s)]
        sent = [calls * size for size in found.sent]
        ranks = f"{pair.ranks} rank{'s' * (pair.ranks > 1)}"
        print(
            f"{ranks}: {pair.plain} {seconds[0]:.3f} s, {pair.shares} {seconds[1]:.3f} s; sent per step "
            f"{sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} MB",
            flush=True,
        )
        checks.append(Check(f"step with {pair.shares} / {pair.plain}, {ranks}", pair.limit, found.ratios))
        figures: dict[str, Any] = {"ratio": spread(found.ratios), "step_s": [round(s, 4) for s in seconds]}
        results.append({**pair._asdict(), **figures, "sent_bytes": [round(size) for size in sent]})
    return conclude("shares", {"turns": pairs, "pairs": results}, checks)


class Timed(Classification):
    """Image classification that notes when its steps begin."""

    def model(self) -> nn.Module:
        """The same model."""
        self._note = _turns.clock()
        return super().model()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The same step."""
        self._note()
        return super().step(model, batch)


def start(ranks: int, option: str, folder: Path) -> Training:
    """Start to train on this many ranks."""
    shares = _shares(ranks, option)
    words = [
        "laststep", "--name=shares", f"launch.root={folder}", "device=cpu", "task=benchmarks.shares.Timed",
        "data.name=fake", "data.args.image_size=64", "data.args.classes=1000",
        f"data.args.samples={PER_SHARE * shares * STEPS}", "model.name=resnet50",
        f"train.batch_size={PER_SHARE * shares}", "train.epochs=1", "train.log_every=1",
        "checkpoint.every_epochs=null", "checkpoint.every_minutes=null", "optim.lr=0.01", option,
    ]  # fmt: skip
    return Training(words, ranks, {}, folder)


def _shares(ranks: int, option: str) -> int:
    return max(ranks, int(option.partition("=")[2]))


if __name__ == "__main__":
    sys.exit(main())
