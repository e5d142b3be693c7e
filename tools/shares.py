"""Draws docs/shares.svg: three runs whose number of ranks changes again and again, on top of each other.

`python -m tools.shares`, in about a minute. Each run trains on this machine in four shares, and is stopped and
continued on other numbers of ranks. Fails if any value of their metrics differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from laststep.records.metrics import read_lines

PROJECT = Path(__file__).resolve().parents[1]
TARGET = PROJECT / "docs" / "shares.svg"
STEPS = 100
# The number of ranks, and the step until which it trains with them.
RUNS = {"a": ((1, STEPS),), "b": ((4, 30), (2, 60), (4, STEPS)), "c": ((2, 20), (1, 50), (4, 80), (2, STEPS))}
SETTINGS = [
    "train.shares=4", "optim.schedule=constant", "optim.lr=0.05", "data.args.augment=true", "model.args.width=16",
]  # fmt: skip
COLOURS = {"a": "#f2b134", "b": "#2f7fd0", "c": "#c2334d"}
WIDTHS = {"a": 9, "b": 5, "c": 1.8}
WIDTH, HEIGHT, LEFT, TOP, LANE = 760, 400, 60, 16, 26
PLOT_HEIGHT = 260


class Curve(NamedTuple):
    """A run: its loss at each step, and how many ranks computed which steps."""

    losses: Sequence[float]
    sizes: Sequence[tuple[int, int, int]]  # first step, last step, ranks


def main() -> None:
    """Train the runs, compare them, draw them."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = {name: train(Path(folder), name) for name in RUNS}
        attempts = {name: read_lines(Path(folder) / name / "attempts.jsonl") for name in RUNS}
    for one, other in pairwise(metrics.values()):
        assert one == other, "the runs differ"
    curves = {}
    for name, lines in metrics.items():
        sizes = [(each["start_step"], each["end_step"], each["world_size"]) for each in attempts[name]]
        curves[name] = Curve([line["loss"] for line in lines], sizes)
    TARGET.write_text(picture(curves))


def train(folder: Path, name: str) -> list[dict[str, Any]]:
    """Train one of the runs; returns the lines of its steps without their times."""
    command = [sys.executable, "launch.py"]
    for ranks, until in RUNS[name]:
        size = ["--local", "--tasks-per-node", str(ranks), f"launch.root={folder}", f"train.max_steps={until}"]
        begins = not (folder / name).exists()
        words = ["submit", "--name", name, *SETTINGS] if begins else ["resume", name]
        subprocess.run([*command, *words, *size], cwd=PROJECT, check=True)
    steps = [line for line in read_lines(folder / name / "metrics.jsonl") if "loss" in line]
    return [{key: value for key, value in line.items() if key not in ("time", "samples_per_s")} for line in steps]


def picture(curves: dict[str, Curve]) -> str:
    """The losses over the steps, and below them a lane per run with its numbers of ranks."""
    highest = max(max(curve.losses) for curve in curves.values())

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * step / STEPS

    def y(loss: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - loss / highest)

    body = [f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(0)}" y2="{y(0)}" class="axis"/>']
    for loss in range(int(highest) + 1):
        body.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" class="end">{loss}</text>')
    body.append(f'<text x="{WIDTH - 20}" y="{TOP + 8}" class="end">loss</text>')
    body += [f'<text x="{x(step)}" y="{y(0) + 18}" class="mid">{step}</text>' for step in range(0, STEPS + 1, 20)]
    for name, curve in curves.items():
        points = " ".join(f"{x(number + 1):.1f},{y(loss):.1f}" for number, loss in enumerate(curve.losses))
        body.append(f'<polyline points="{points}" stroke="{COLOURS[name]}" stroke-width="{WIDTHS[name]}"/>')
    for row, (name, curve) in enumerate(curves.items()):
        top = TOP + PLOT_HEIGHT + 32 + row * LANE
        body.append(f'<text x="{LEFT - 8}" y="{top + 14}" class="end">run {name}</text>')
        for first, last, ranks in curve.sizes:
            body.append(
                f'<rect x="{x(first):.1f}" y="{top}" width="{x(last) - x(first) - 2:.1f}" height="{LANE - 6}" '
                f'fill="{COLOURS[name]}" opacity=".35"/>'
                f'<text x="{(x(first) + x(last)) / 2:.1f}" y="{top + 14}" class="mid">'
                f"{ranks} rank{'s' * (ranks > 1)}</text>"
            )
    style = (
        "text{font:12px sans-serif;fill:#777}.end{text-anchor:end}.mid{text-anchor:middle}"
        "polyline{fill:none;stroke-linejoin:round}.axis{stroke:#999}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="the losses of three runs">\n<style>{style}</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
