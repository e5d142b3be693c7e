"""Which rule a script breaks, by the first difference between its runs: the table of rules, and how each one shows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from laststep.proof.compare import Difference
from laststep.records.probes import Probed

RuleName = Literal[
    "prefetch", "accumulate", "second loader", "rank", "generator", "unregistered", "data set", "not deterministic"
]


class Rule(NamedTuple):
    """What the script does, as far as the difference shows, and what to write instead."""

    finding: str
    fix: str


RULES: dict[RuleName, Rule] = {
    "prefetch": Rule(
        "Only the first step after a resume has another batch: the model gets one that was taken one step earlier",
        "Take each batch in the iteration that uses it. run.loader(num_workers=...) loads ahead, and resumes exactly.",
    ),
    "accumulate": Rule(
        "The step before the stop made no update: gradients are carried into the next step, and no checkpoint has them",
        "Make one update per iteration of run.steps(...): loop over the micro-batches within it.",
    ),
    "second loader": Rule(
        "run.steps(...) handed out the same batch, but the model gets others besides it: they come from a loader or an "
        "iterator that begins again in each attempt",
        "Take them from run.batches(run.loader(...)), or choose them by run.step: data[run.step % len(data)].",
    ),
    "rank": Rule(
        "The registered state differs between ranks, and a checkpoint holds one state for all of them",
        "Wrap the model in DistributedDataParallel. Average other values over the ranks, or do not register them.",
    ),
    "generator": Rule(
        "Random numbers come from a generator of the script's own, which begins again in each attempt",
        "Draw from the global generators of torch, NumPy and Python, which are seeded before each step; or seed yours "
        "in each iteration, from run.step.",
    ),
    "unregistered": Rule(
        "Batch and registered state were the same before, so the result depends on something that is not registered",
        "Register it: run.restore(..., NAME=...), any object with state_dict and load_state_dict, or a dict.",
    ),
    "data set": Rule(
        "The data set gave another sample: a sample depends on what was loaded before it",
        "Let a sample depend on its index and on the global generators alone, which are seeded for each sample.",
    ),
    "not deterministic": Rule(
        "Two undisturbed runs differ: the script is not deterministic on this machine, so no resume can be exact",
        "Seed every generator, and leave the clock out of it. On a GPU leave train.deterministic=true.",
    ),
}
MOST_NAMES = 6


def rule_of(difference: Difference, undisturbed: Probed, again: Probed, disturbed: Probed) -> RuleName:
    """The rule that the first difference of a disturbed run points to."""
    if difference.attempt == 0:
        return "not deterministic"
    if difference.what == "inputs" and _is_first_alone(difference, undisturbed, disturbed):
        return "prefetch"
    before = undisturbed.at(difference.rank, _first_step(difference, disturbed) - 1)
    if difference.what in ("metrics", "state") and before is not None and not before["updates"]:
        return "accumulate"
    if variables_of(difference, undisturbed, again, disturbed, "generator"):
        return "generator"
    by_what: dict[str, RuleName] = {"batch": "data set", "inputs": "second loader"}
    return by_what.get(difference.what, "unregistered")


def variables_of(
    difference: Difference, expected: Probed, again: Probed, found: Probed, kind: str | None = None
) -> list[str]:
    """The user's variables that differ as the step of the difference begins, but not between two undisturbed runs;
    with `kind`, only those of that kind."""
    rank, step = difference.rank, difference.step
    one, same, other = expected.at(rank, step), again.at(rank, step), found.at(rank, step)
    if one is None or same is None or other is None:
        return []
    return [
        name
        for name, variable in one["variables"].items()
        if (kind is None or variable["kind"] == kind)
        and same["variables"].get(name) == variable
        and name in other["variables"]
        and other["variables"][name] != variable
    ]


def iterators_of(difference: Difference, found: Probed) -> list[str]:
    """The user's variables that are iterators, which a resumed attempt begins again."""
    line = found.at(difference.rank, difference.step)
    variables = {} if line is None else line["variables"]
    return [name for name, variable in variables.items() if variable["kind"] == "iterator"]


def _is_first_alone(difference: Difference, undisturbed: Probed, disturbed: Probed) -> bool:
    """Whether the model's inputs differ in the first step of an attempt, and in no later one."""
    later = [
        line["inputs"] == expected["inputs"]
        for line in disturbed.of(difference.rank, difference.attempt)
        if line["step"] > difference.step and (expected := undisturbed.at(difference.rank, line["step"]))
    ]
    return difference.step == _first_step(difference, disturbed) and bool(later) and all(later)


def _first_step(difference: Difference, disturbed: Probed) -> int:
    """The first step of the attempt with the difference."""
    lines = disturbed.of(difference.rank, difference.attempt)
    return lines[0]["step"] if lines else difference.step
