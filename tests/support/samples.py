"""Which samples a run has learned from, as tests.support.tasks.Recorded notes them."""

from __future__ import annotations

import random
from pathlib import Path

from laststep.data.order import Order, seed_generators, seed_of
from laststep.records.metrics import read_lines


def check_samples(notes: Path, order: Order, total_steps: int) -> None:
    """Each step has learned once from the plain order's batch, which its ranks share in their order."""
    lines = sorted(read_lines(notes), key=lambda line: (line["step"], line["rank"]))
    learned: list[list[tuple[int, float]]] = [[] for _ in range(total_steps)]
    for line in lines:
        learned[line["step"]] += map(tuple, line["samples"])
    for step, samples in enumerate(learned):
        expected = []
        for index in order.batch(step).tolist():
            seed_generators(seed_of("sample", order.seed, order.epoch(step), index))
            expected.append((index, random.random()))
        assert samples == expected, f"step {step}"
