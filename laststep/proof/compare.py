"""Where two runs part first, by what their ranks noted of each step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from laststep.records.probes import Probed, ProbedStep

# In the order of events within a step, and after it.
What = Literal["missing", "batch", "inputs", "metrics", "state", "epoch"]
ORDER: tuple[What, ...] = ("missing", "batch", "inputs", "metrics", "state", "epoch")


@dataclass(frozen=True)
class Difference:
    """The first place at which a run has other bits than the run it is compared with."""

    attempt: int
    step: int
    what: What
    rank: int  # the lowest that differs
    names: tuple[str, ...] = ()  # of the values that differ: metrics, or parts of the state


def first_difference(
    expected: Probed, found: Probed, ignored: Collection[str] = (), so_far: bool = False
) -> Difference | None:
    """None when every step of every attempt has the same bits, and both runs have the same steps.

    Metrics of the names `ignored` do not count. With `so_far` the second run has not ended yet.
    """
    differences = [*_steps(expected, found), *_metrics(expected, found, ignored)]
    if not so_far and (expected.last_step != found.last_step or len(expected.metrics) != len(found.metrics)):
        step = min(expected.last_step, found.last_step) + 1
        differences.append(Difference(found.last_attempt, step, "missing", 0))
    return min(differences, key=lambda one: (one.attempt, one.step, ORDER.index(one.what), one.rank), default=None)


def differs_by_rank(probed: Probed) -> Difference | None:
    """The first step after which registered state differs between the ranks, apart from what each has its rows of."""
    for line in probed.steps[0]:
        for rank in range(1, len(probed.steps)):
            other = probed.at(rank, line["step"])
            if other is None:
                continue
            if names := tuple(name for name in _differing(line["state"], other["state"]) if name not in line["rows"]):
                return Difference(line["attempt"], line["step"], "state", rank, names)
    return None


def _steps(expected: Probed, found: Probed) -> Iterator[Difference]:
    """The first difference that each rank noted itself."""
    for rank, lines in enumerate(found.steps):
        before = {line["step"]: line for line in expected.steps[rank]}
        for line in lines:
            if line["step"] in before and (difference := _compare(before[line["step"]], line, rank)):
                yield difference
                break


def _compare(expected: ProbedStep, found: ProbedStep, rank: int) -> Difference | None:
    attempt, step = found["attempt"], found["step"]
    if expected["batch"] != found["batch"]:
        return Difference(attempt, step, "batch", rank)
    if expected["inputs"] != found["inputs"]:
        return Difference(attempt, step, "inputs", rank)
    if names := _differing(expected["state"], found["state"]):
        return Difference(attempt, step, "state", rank, names)
    return None


def unsteady_metrics(one: Probed, other: Probed) -> set[str]:
    """The metrics that differ between two runs whose steps are the same, as those do that hold seconds."""
    if any(_steps(one, other)):
        return set()
    return {name for (_, a), (_, b) in zip(one.metrics, other.metrics) for name in _differing(a, b)} - {"step", "epoch"}


def _metrics(expected: Probed, found: Probed, ignored: Collection[str]) -> Iterator[Difference]:
    """The first line of metrics.jsonl that differs."""
    for (of_step, one), (_, other) in zip(expected.metrics, found.metrics):
        if names := tuple(name for name in _differing(one, other) if name not in ignored):
            step = int(one.get("step", 0))
            # An epoch's line is written by the attempt that does the step after it.
            written = found.at(0, step if of_step else step + 1)
            attempt = written["attempt"] if written else found.last_attempt
            yield Difference(attempt, step, "metrics" if of_step else "epoch", 0, names)
            return


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    missing = object()
    return tuple(name for name in {**one, **other} if one.get(name, missing) != other.get(name, missing))
