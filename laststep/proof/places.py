"""Where a disturbed run is struck: places of every kind that the undisturbed run has shown."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from laststep.records.probes import Probed, Strike

STOP, KILL = "SIGTERM", "SIGKILL"
WITHIN = "within an epoch"
AT_AN_END = ("the last step of an epoch", "a validation", "the first step of an epoch")


class Place(NamedTuple):
    """A strike, and which kind of place it is in."""

    strike: Strike
    kind: str


def choose_places(undisturbed: Probed, ranks: int, seed: int) -> list[Place]:
    """The strikes of a disturbed run, in order, at most one per attempt. The same seed chooses the same ones.

    A stop within an epoch; stops in the last step of an epoch, in a validation, and in the first step of an epoch, as
    far as the run has them; and a killed rank. The first stop is followed by steps in the same epoch, which show
    whether a difference passes. No count of 2 to 6 divides its step, so that it parts updates that span several steps.
    """
    draw, last = random.Random(seed), undisturbed.last_step - 1  # the last attempt has a step to do
    lines = undisturbed.steps[0]
    firsts = [after["step"] for before, after in pairwise(lines) if after["epoch"] != before["epoch"]]
    edges = {step for first in firsts for step in (first - 1, first)}
    inner = [line["step"] for line in lines if 1 < line["step"] <= last and line["step"] not in edges]
    early = [step for step in inner if step < min(firsts, default=last + 2) - 3] or inner
    chosen: dict[tuple[int, int], Place] = {}  # by step, and batch of the validation after it

    def add(signal: str, step: int, kind: str, batch: int | None = None) -> None:
        strike = Strike(signal, draw.randrange(ranks), step, batch)
        if 0 < step <= last:
            chosen.setdefault((step, batch or 0), Place(strike, kind))

    if stop := _pick(draw, [step for step in early if math.gcd(step, 30) == 1], early):
        add(STOP, stop, WITHIN)
    if firsts:
        add(STOP, firsts[0] - 1, AT_AN_END[0])
        add(STOP, firsts[0], AT_AN_END[2])
    if batches := [line for line in undisturbed.batches if line["after"] <= last]:
        batch = draw.choice([line for line in batches if line["after"] == batches[0]["after"]])
        add(STOP, batch["after"], AT_AN_END[1], batch["validation_batch"])
    apart = [step for step in inner if all(abs(step - other) > 1 for other, _ in chosen)]
    if killed := _pick(draw, apart, [step for step in range(2, last + 1) if (step, 0) not in chosen]):
        add(KILL, killed, WITHIN)
    return [chosen[key] for key in sorted(chosen)]


def _pick(draw: random.Random, *choices: Sequence[int]) -> int | None:
    """One of the first of these choices that has any."""
    return next((draw.choice(steps) for steps in choices if steps), None)


def missing_kinds(places: Sequence[Place]) -> list[str]:
    """The kinds of places that the run did not have."""
    kinds = {place.kind for place in places}
    return [kind for kind in AT_AN_END if kind not in kinds]
