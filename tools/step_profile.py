"""Writes the section of docs/benchmarks.md on where the time of a small step goes."""

from __future__ import annotations

from typing import Any

from tools.scale import table
from trainer.say import counted

SECTION = """
## Where the time of a small step goes

Microseconds of a step of the 64-64-10 perceptron in the bare loop and in Laststep with everything on (`step_profile`).
The last row is the step as it is. In the others a clock is read where a part begins and ends, which takes time itself:
the parts add up to the step with that clock.{two}

{parts}
"""


TWO = """ On two ranks they are means over the ranks, and the wait for the other
rank varies by more than most differences: `overhead`, which compares turn by turn, says what the step costs."""


def section(profile: dict[str, Any]) -> str:
    """The section, from benchmarks/results/step_profile.json."""
    loops = [of["loops"][name] for of in profile["results"] for name in ("bare", "laststep")]
    ranks = [counted(of["ranks"], "rank") for of in profile["results"]]
    head = [f"{column}, {size}" for size in ranks for column in ("bare", "Laststep", "difference")]
    parts = [_row(part, [loop["parts_us"][part] for loop in loops]) for part in loops[0]["parts_us"]]
    parts += [
        _row("the step with the clock", [loop["timed_step_us"] for loop in loops]),
        _row("the step as it is", [loop["step_us"] for loop in loops]),
    ]
    return SECTION.format(two=TWO if len(ranks) > 1 else "", parts=table(["part", *head], parts))


def _row(what: str, us: list[float]) -> list[str]:
    """A row of a table: of each pair of a bare loop and Laststep both times, and the difference."""
    pairs = zip(us[::2], us[1::2])
    return [what, *(text for bare, ours in pairs for text in (f"{bare:.1f}", f"{ours:.1f}", f"{ours - bare:+.1f}"))]
