"""Where two runs part: what differs around them, the first step, and the first operator whose result differs."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from laststep import rooms
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.metrics import CLOCK, DIGEST, read_lines
from laststep.records.probes import Probed, ProbePlan
from laststep.replay import again
from laststep.replay.again import Stretch
from laststep.rundir import RunDir
from laststep.runs import run_config

MOST_WATCHED = 20  # steps whose operators are noted in the first pass; of more, only the state is
OBSERVER = "laststep.replay.operators:Observer"
# How a run is run, not what it computes.
NOT_COMPARED = ("launch.", "checkpoint.", *(f"{name}." for name in rooms.section_names()))


@dataclass(frozen=True)
class Operator:
    """The first operator whose result differs. The texts are of either run; where they do the same, they are equal."""

    rank: int
    number: int  # of the operator within its step, from 0
    first: Mapping[str, Any] | None  # None: this run did nothing more in this step
    second: Mapping[str, Any] | None
    bits: int | None = None  # that differ; None where that is not known


@dataclass
class Parting:
    """What `diff` has found."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # keys of the configuration that differ
    code: list[str] = field(default_factory=list)  # files
    environment: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    recorded: int | None = None  # the first step whose records differ; None: those of no step do
    fields: list[str] = field(default_factory=list)  # in which they differ
    steps: int = 0  # that both have done
    known_same: int = 0  # the last step up to which both certainly had the same state
    step: int | None = None  # the first step that differs when both are done again
    what: list[str] = field(default_factory=list)  # in that step: batch of rank 0, inputs, values of the state
    operator: Operator | None = None
    not_again: list[str] = field(default_factory=list)  # the runs whose replay differs from their own records


def around(first: RunDir, second: RunDir) -> Parting:
    """What differs before anything is done again: configuration, code, environment, records."""
    parting = Parting()
    configs = [run_config.as_submitted(run) for run in (first, second)]
    found = run_config.changes(*configs)
    parting.settings = {key: pair for key, pair in found.items() if not key.startswith(NOT_COMPARED)}
    if (threads := [config.launch.cpus_per_task for config in configs])[0] != threads[1]:
        parting.settings["launch.cpus_per_task"] = (threads[0], threads[1])
    if configs[0].launch.env != configs[1].launch.env:
        parting.settings["launch.env"] = (configs[0].launch.env, configs[1].launch.env)
    parting.code = list(_changed_code(first, second))
    numerics = [_numerics(run) for run in (first, second)]
    parting.environment = {
        name: (numerics[0].get(name), numerics[1].get(name))
        for name in sorted(numerics[0].keys() | numerics[1].keys())
        if numerics[0] and numerics[1] and numerics[0].get(name) != numerics[1].get(name)
    }
    packages = [_packages(run) for run in (first, second)]
    if all(packages):
        for name in sorted(packages[0].keys() | packages[1].keys()):
            if packages[0].get(name) != packages[1].get(name):
                parting.environment[name] = (packages[0].get(name), packages[1].get(name))
    _compare_records(parting, first, second)
    return parting


def _compare_records(parting: Parting, first: RunDir, second: RunDir) -> None:
    lines = [again.steps_of(run) for run in (first, second)]
    both = sorted(lines[0].keys() & lines[1].keys())
    parting.steps = len(both)
    for step in both:
        one, other = lines[0][step], lines[1][step]
        fields = sorted(name for name in one.keys() & other.keys() - {*CLOCK, "lr"} if one[name] != other[name])
        if fields or ("lr" in one and one.get("lr") != other.get("lr")):
            parting.recorded, parting.fields = step, fields or ["lr"]
            return
        if DIGEST in one and DIGEST in other:
            parting.known_same = step


def _numerics(run: RunDir) -> Mapping[str, Any]:
    from laststep.checkpoint.store import CheckpointStore

    store = CheckpointStore(run.checkpoints)
    for step in reversed(store.steps()):
        try:
            return store.manifest(step).numerics
        except Exception:  # a damaged checkpoint says nothing
            continue
    return {}


def _packages(run: RunDir) -> dict[str, str]:
    try:
        return dict(line.split("==", 1) for line in run.packages.read_text().splitlines() if "==" in line)
    except OSError:
        return {}


def _changed_code(first: RunDir, second: RunDir) -> Iterator[str]:
    """The files of the runs' copies of the code that differ."""
    if not (first.code.exists() and second.code.exists()):
        return
    names = [
        {path.relative_to(run.code) for path in run.code.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        for run in (first, second)
    ]
    for name in sorted(names[0] | names[1]):
        texts = [_text(run.code / name) for run in (first, second)]
        if texts[0] != texts[1] and not name.name.startswith("."):
            changed = [line for line in difflib.ndiff(texts[0].splitlines(), texts[1].splitlines()) if line[0] in "+-"]
            yield f"{name} ({len(changed)} lines)"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def find(parting: Parting, first: RunDir, second: RunDir, folder: Path) -> None:
    """Do the steps of both runs again, in `folder`, in which they part by their records, and name the first operator
    whose result differs. Raises ConfigError, and RuntimeError where a run fails."""
    assert parting.recorded is not None
    since, last = parting.known_same + 1, parting.recorded
    watched = last - since < MOST_WATCHED
    runs = _both_again(first, second, since, last, folder / "wide", watched)
    ranks = _ranks(runs)
    probed = [Probed.read(run, ranks) for run in runs]
    for name, run, done_again in zip((first.name, second.name), (first, second), runs):
        if again.differences(run, done_again, since, last):
            parting.not_again.append(name)
    parting.step = None
    for step in range(since, last + 1):
        if what := [*_differing(probed[0], probed[1], step, ranks), *_differing_metrics(runs, step)]:
            parting.step, parting.what = step, what
            break
    if parting.step is None:
        return
    if not watched:
        runs = _both_again(first, second, parting.step, parting.step, folder / "close", True)
    parting.operator = first_operator(runs, ranks, parting.step)


def _both_again(
    first: RunDir, second: RunDir, since: int, last: int, folder: Path, watched: bool
) -> tuple[RunDir, RunDir]:
    stretches = [Stretch.of(run, since, last, as_done=True) for run in (first, second)]
    if len({stretch.ranks for stretch in stretches}) > 1:  # with train.shares both can be done by one
        stretches = [Stretch.of(run, since, last) for run in (first, second)]
    sizes = {stretch.ranks for stretch in stretches}
    if len(sizes) > 1:
        raise ConfigError(
            f"{first.name} was trained by {stretches[0].ranks} ranks, {second.name} by {stretches[1].ranks}: without "
            "train.shares their steps cannot be compared"
        )
    found = []
    for stretch in stretches:
        again.check_gpus(stretch)
    for name, stretch in zip("ab", stretches):
        (place := folder / name).mkdir(parents=True)
        run = again.copy_of(stretch, place)
        again.train(stretch, run, ProbePlan(since=since, observer=OBSERVER if watched else None), _eager)
        found.append(run)
    return found[0], found[1]


def _eager(config: Config) -> Config:
    train = dataclasses.replace(config.train, compile=False, cuda_graphs=False)
    return dataclasses.replace(config, train=train)


def _ranks(runs: Sequence[RunDir]) -> int:
    return len(list(runs[0].probes.glob("[0-9]*.jsonl")))


def _differing(first: Probed, second: Probed, step: int, ranks: int) -> Iterator[str]:
    """What differs in a step, by the notes of all ranks: first what goes in, then what has come out."""
    both = []
    for rank in range(ranks):
        one, other = first.at(rank, step), second.at(rank, step)
        if one is None or other is None:
            if (one is None) != (other is None):
                yield f"rank {rank}: only one of the runs has done it"
            continue
        both.append((rank, one, other))
        if one["batch"] != other["batch"]:
            yield f"rank {rank}: the batch"
        elif one["inputs"] != other["inputs"]:
            yield f"rank {rank}: the inputs of the model"
    for rank, one, other in both:
        names = one["state"].keys() | other["state"].keys()
        for name in sorted(names):
            if not name.startswith("position.") and one["state"].get(name) != other["state"].get(name):
                yield f"rank {rank}: {name}"


def _differing_metrics(runs: Sequence[RunDir], step: int) -> Iterator[str]:
    """The metrics of a step that differ: what is only logged changes nothing of the state."""
    one, other = (again.steps_of(run, step, step).get(step, {}) for run in runs)
    for name in sorted(one.keys() & other.keys() - {*CLOCK, DIGEST}):
        if one[name] != other[name]:
            yield f"metrics: {name}"


def first_operator(runs: Sequence[RunDir], ranks: int, step: int) -> Operator | None:
    """The first operator of a step whose result differs: of the earliest in any rank, the lowest rank."""
    from laststep.replay.operators import differing_bits, notes_of

    found: list[Operator] = []
    for rank in range(ranks):
        notes = [[line for line in read_lines(notes_of(run, rank)) if line["step"] == step] for run in runs]
        for number, (one, other) in enumerate(zip_longest(*notes)):
            if one is None or other is None or json.dumps(one) != json.dumps(other):
                same_kind = one and other and all(one[key] == other[key] for key in ("operator", "shapes", "types"))
                bits = differing_bits(runs[0], runs[1], rank, step, number) if same_kind else None
                found.append(Operator(rank, number, one, other, bits))
                break
    return min(found, key=lambda each: (each.number, each.rank), default=None)
