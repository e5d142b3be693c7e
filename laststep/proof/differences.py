"""Where two runs part first, by what their ranks noted of each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from laststep.records.probes import Probed, ProbedStep

# In the order of events within a step, and after it.
What = Literal["missing", "batch", "inputs", "metrics", "state", "beside", "epoch"]
ORDER: tuple[What, ...] = ("missing", "batch", "inputs", "metrics", "state", "beside", "epoch")
WEIGHTS: tuple[What, ...] = ("missing", "batch", "inputs", "state")  # all that the weights depend on


@dataclass(frozen=True)
class Difference:
    """The first place at which a run has other bits than the run it is compared with."""

    attempt: int
    step: int
    what: What
    rank: int  # the lowest that differs
    names: tuple[str, ...] = ()  # of the values that differ: metrics, or parts of the state


def first_of(differences: Collection[Difference]) -> Difference:
    """The one that comes first in the order of events."""
    return min(differences, key=lambda one: (one.attempt, one.step, ORDER.index(one.what), one.rank))


def differences_of(
    expected: Probed, found: Probed, ignored: Collection[str] = (), so_far: bool = False
) -> list[Difference]:
    """The first difference of each rank and each kind: none where every step of every attempt has the same bits, and
    both runs have the same steps.

    Values of the names `ignored`, which may be patterns, do not count. With `so_far` the second run has not ended yet.
    """
    differences = [*_steps(expected, found, ignored), *_metrics(expected, found, ignored)]
    if not so_far and (expected.last_step != found.last_step or len(expected.metrics) != len(found.metrics)):
        step = min(expected.last_step, found.last_step) + 1
        differences.append(Difference(found.last_attempt, step, "missing", 0))
    return differences


def beside_names(expected: Probed, found: Probed, ignored: Collection[str] = ()) -> list[str]:
    """All values besides the weights that differ anywhere: `loss in metrics`, or the name of a registered one."""
    names = list[str]()
    for (_, one), (_, other) in zip(expected.metrics, found.metrics):
        names += [f"{name} in metrics" for name in _counted(_differing(one, other), ignored)]
    for before, line in _pairs(expected, found, 0):
        names += [name for name in _counted(_differing(before["state"], line["state"]), ignored)]
    return list(dict.fromkeys(names))


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


def _steps(expected: Probed, found: Probed, ignored: Collection[str] = ()) -> Iterator[Difference]:
    """The first difference that each rank noted itself, and before it the first one beside the weights."""
    for rank in range(len(found.steps)):
        beside = False
        for before, line in _pairs(expected, found, rank):
            if (difference := _compare(before, line, rank, ignored)) is None:
                continue
            if difference.what != "beside":
                yield difference
                break
            if not beside:
                yield difference
                beside = True


def _pairs(expected: Probed, found: Probed, rank: int) -> Iterator[tuple[ProbedStep, ProbedStep]]:
    """The steps that both have, as this rank noted them, in the order of `found`."""
    before = {line["step"]: line for line in expected.steps[rank]}
    return ((before[line["step"]], line) for line in found.steps[rank] if line["step"] in before)


def _compare(expected: ProbedStep, found: ProbedStep, rank: int, ignored: Collection[str]) -> Difference | None:
    attempt, step = found["attempt"], found["step"]
    if expected["batch"] != found["batch"]:
        return Difference(attempt, step, "batch", rank)
    if expected["inputs"] != found["inputs"]:
        return Difference(attempt, step, "inputs", rank)
    if names := _counted(_differing(expected["state"], found["state"]), ignored):
        beside = set(names) <= {*expected["beside"], *found["beside"]}
        return Difference(attempt, step, "beside" if beside else "state", rank, names)
    return None


def _counted(names: Iterable[str], ignored: Collection[str]) -> tuple[str, ...]:
    """Those of these names that are not left out."""
    return tuple(
        name for name in names if name not in ignored and not any(fnmatchcase(name, pattern) for pattern in ignored)
    )


def unsteady(one: Probed, other: Probed) -> set[str]:
    """The metrics, and the registered numbers, that differ between two runs of the same weights and inputs, as those do
    that hold seconds. Of a list, all items if most differ: a clock may have shown a few of them twice."""
    if any(difference.what != "beside" for difference in _steps(one, other)):
        return set()
    names = {name for (_, a), (_, b) in zip(one.metrics, other.metrics) for name in _differing(a, b)}
    items: dict[str, set[str]] = {}  # of each list, by its name with a star for their numbers
    for before, line in _pairs(one, other, 0):
        names |= {*_differing(before["state"], line["state"])}
        for name in {*before["beside"], *line["beside"]}:
            parts = name.split(".")
            for number in (n for n, part in enumerate(parts) if part.isdigit()):
                items.setdefault(".".join([*parts[:number], "*", *parts[number + 1 :]]), set()).add(name)
    of_clocks = [of_list for of_list in items.values() if 2 * len(of_list & names) > len(of_list)]
    return names.union(*of_clocks) - {"step", "epoch"}


def _metrics(expected: Probed, found: Probed, ignored: Collection[str]) -> Iterator[Difference]:
    """The first line of metrics.jsonl that differs."""
    for (of_step, one), (_, other) in zip(expected.metrics, found.metrics):
        if names := _counted(_differing(one, other), ignored):
            step = int(one.get("step", 0))
            # An epoch's line is written by the attempt that does the step after it.
            written = found.at(0, step if of_step else step + 1)
            attempt = written["attempt"] if written else found.last_attempt
            yield Difference(attempt, step, "metrics" if of_step else "epoch", 0, names)
            return


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    missing = object()
    return tuple(name for name in {**one, **other} if one.get(name, missing) != other.get(name, missing))


RuleName = Literal[
    "prefetch",
    "accumulate",
    "second loader",
    "rank",
    "generator",
    "unregistered",
    "beside",
    "data set",
    "not deterministic",
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
        "Where K iterations make one update, write run.steps(..., accumulate=K), and update `if run.sync_gradients`.",
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
    "beside": Rule(
        "The weights do not depend on these values, which begin again in each attempt",
        "Register what they are computed from: run.restore(..., NAME={...}); or leave them out: --ignore NAME.",
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
# Where the loop is a framework's, the script has no run.restore(...) and no iteration to change.
FRAMEWORKS = ("lightning", "transformers")
IN_FRAMEWORK: dict[RuleName, str] = {
    "prefetch": "Give {framework} the batches as they are: run.loader(...), without a wrapper that loads ahead.",
    "accumulate": "Let {framework} accumulate: it knows when an update is due.",
    "second loader": "Draw additional batches in the data set or the collate function, by the sample's index.",
    "generator": "Draw from the global generators of torch, NumPy and Python, which are seeded before each step.",
    "unregistered": "Keep it in a buffer of the model, or where {framework} keeps state: {kept}.",
    "beside": "Keep it where {framework} keeps state: {kept}; or leave it out: --ignore NAME.",
}
KEPT = {
    "lightning": "on_save_checkpoint and on_load_checkpoint, or the state_dict of a callback",
    "transformers": "a callback that is an ExportableState",
}


def fix_of(rule: RuleName, probed: Probed) -> str:
    """What to write instead, where this script has its loop."""
    line = probed.steps[0][0]
    framework = next((name for name in FRAMEWORKS if any(each.startswith(f"{name}.") for each in line["state"])), None)
    if framework is None or rule not in IN_FRAMEWORK:
        return RULES[rule].fix
    return IN_FRAMEWORK[rule].format(framework=framework, kept=KEPT[framework])


def rule_of(difference: Difference, undisturbed: Probed, again: Probed, disturbed: Probed) -> RuleName:
    """The rule that the first difference of a disturbed run points to."""
    if difference.attempt == 0:
        return "not deterministic"
    if difference.what == "inputs" and _is_first_alone(difference, undisturbed, disturbed):
        return "prefetch"
    if difference.what == "beside":
        return "beside"
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


class Number(NamedTuple):
    """A number of the script's own that is another one after a resume: what it is and what it should be, and whether it
    counts the steps."""

    name: str
    step: int
    found: str
    expected: str
    counts: bool


def changed_numbers(expected: Probed, again: Probed, found: Probed, ignored: Collection[str] = ()) -> list[Number]:
    """The numbers in the script's variables on rank 0 that are the same in two undisturbed runs, and not after a
    resume: those that stay different the longest first."""
    numbers: dict[str, tuple[int, Number]] = {}
    same = {line["step"]: line["variables"] for line in again.steps[0]}
    for before, line in _pairs(expected, found, 0):
        for name in _counted(_differing(before["variables"], line["variables"]), ignored):
            one, other = before["variables"].get(name), line["variables"].get(name)
            if one is None or other is None or {one["kind"], other["kind"]} != {"number"}:
                continue
            if same.get(line["step"], {}).get(name) != one:
                continue
            times, number = numbers.get(name, (0, None))
            number = number or Number(name, line["step"], other["digest"], one["digest"], _counts(name, expected))
            numbers[name] = times + 1, number
    return [number for _, number in sorted(numbers.values(), key=lambda each: -each[0])]


def _counts(name: str, probed: Probed) -> bool:
    """Whether this variable grows by one with each step of an epoch."""
    values = [
        (line["epoch"], line["variables"][name]["digest"]) for line in probed.steps[0] if name in line["variables"]
    ]
    within = [(one, other) for (epoch, one), (of, other) in pairwise(values) if of == epoch]
    steps = [one.isdigit() and other.isdigit() and int(other) - int(one) for one, other in within]
    # The first number of an epoch is the last one of the epoch before, as the step begins.
    return steps.count(1) > 1 and steps.count(1) >= len(steps) - len({epoch for epoch, _ in values})


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
