"""What must hold after every fault and at the end of every run. A check returns what it found wrong, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from tests.faults.plan import Loss
from tests.support.curves import expected, on_disk
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

CLOCKS = ("time", "samples_per_s")
Record = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Attempt:
    """One start of a job."""

    job_id: str
    restart: int

    @classmethod
    def of(cls, record: Record) -> Attempt:
        """That of a line of attempts.jsonl."""
        return cls(str(record["job_id"]), int(record["restart"]))

    def __str__(self) -> str:
        return f"{self.job_id}-{self.restart}"


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nobody touched gave."""

    weights: str
    metrics: Sequence[Record]


@dataclass(frozen=True)
class Seen:
    """What the harness saw of a run by means of its own."""

    begun: Mapping[Attempt, int]  # training batches that each attempt began
    resumed: Sequence[int]  # steps that the log says its attempts started after
    damaged: AbstractSet[int]  # steps whose checkpoints, as they stand, it damaged
    set_back: AbstractSet[Attempt]  # attempts after which it damaged the newest checkpoint
    unwritten: AbstractSet[Attempt]  # attempts that had no disk to write on what they did


def check_run(
    run: RunDir, verified: Sequence[Record], undisturbed: Undisturbed, seen: Seen, log_every: int
) -> list[str]:
    """All that must hold of a finished run's folder; `verified` is what `launch.py verify --json` says of it."""
    return [
        *check_metrics(read_lines(run.metrics), undisturbed.metrics),
        *check_checkpoints(verified, seen.damaged, undisturbed.weights),
        *check_attempts(read_lines(run.attempts), seen, log_every),
    ]


def check_curves(run: RunDir, log_every: int) -> list[str]:
    """TensorBoard's event files have each point that metrics.jsonl tells of, once and in order."""
    wrong = []
    told, shown = expected(run, log_every), on_disk(run)
    for tag in sorted({*told, *shown}):
        if shown[tag] != told[tag]:
            lacking = [step for _, step, _ in Counter(told[tag]) - Counter(shown[tag])]
            excess = [step for _, step, _ in Counter(shown[tag]) - Counter(told[tag])]
            wrong.append(f"TensorBoard's {tag}: lacking steps ({_some(lacking)}), too many ({_some(excess)})")
    return wrong


def without_clocks(line: Record) -> dict[str, Any]:
    """A line of metrics.jsonl, but for what no two runs have in common."""
    return {key: value for key, value in line.items() if key not in CLOCKS}


def check_metrics(lines: Sequence[Record], undisturbed: Sequence[Record]) -> list[str]:
    """Each step and each epoch exactly once, in order, and equal to the undisturbed run's."""
    wrong = []
    steps = [line["step"] for line in lines if "loss" in line]
    if twice := sorted(step for step, count in Counter(steps).items() if count > 1):
        wrong.append(f"metrics.jsonl has more than one line of steps {_some(twice)}")
    if missing := sorted({line["step"] for line in undisturbed if "loss" in line} - set(steps)):
        wrong.append(f"metrics.jsonl has no line of steps {_some(missing)}")
    if steps != sorted(steps):
        wrong.append("metrics.jsonl has its steps out of order")
    if wrong:
        return wrong
    pairs = zip(map(without_clocks, lines), map(without_clocks, undisturbed))
    if differ := [one["step"] for one, other in pairs if one != other]:
        wrong.append(f"metrics.jsonl differs from the undisturbed run's at steps {_some(differ)}")
    elif len(lines) != len(undisturbed):
        wrong.append(f"metrics.jsonl has {len(lines)} lines, the undisturbed run's {len(undisturbed)}")
    return wrong


def check_checkpoints(verified: Sequence[Record], damaged: AbstractSet[int], weights: str) -> list[str]:
    """What `verify --json` says: every checkpoint is whole but those `damaged` by us, and the last has `weights`."""
    wrong = []
    for checkpoint in verified:
        step = checkpoint["step"]
        if not checkpoint["ok"] and step not in damaged:
            wrong.append(f"the checkpoint of step {step} is damaged, and not by us: {checkpoint['error']}")
        if checkpoint["ok"] and step in damaged:
            wrong.append(f"the checkpoint of step {step} was damaged by us, and verify takes it for whole")
    if not verified:
        return ["there is no checkpoint"]
    if verified[-1]["weights_sha256"] != weights:
        wrong.append(f"the final weights differ from the undisturbed run's: {verified[-1]['weights_sha256']}")
    return wrong


def check_attempts(records: Sequence[Record], seen: Seen, log_every: int) -> list[str]:
    """attempts.jsonl tells what happened. What a lost attempt did is known but for its last `log_every` steps."""
    wrong = []
    numbers = [record["attempt"] for record in records]
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + len(numbers))):
        wrong.append(f"attempts.jsonl counts {numbers}")
    known = [Attempt.of(record) for record in records]
    if twice := [str(attempt) for attempt, count in Counter(known).items() if count > 1]:
        wrong.append(f"attempts.jsonl has more than one record of {', '.join(twice)}")
    if missing := sorted(str(attempt) for attempt, count in seen.begun.items() if count > 0 and attempt not in known):
        wrong.append(f"attempts.jsonl has no record of {', '.join(missing)}, which trained")
    reasons = [record["reason"] for record in records]
    if "finished" not in reasons[-1:] or "finished" in reasons[:-1]:
        wrong.append(f"attempts.jsonl ends as {reasons[-1:]}, finished {reasons.count('finished')} times")
    for attempt, record in zip(known, records):
        did, trained = record["end_step"] - record["start_step"], seen.begun.get(attempt, 0)
        least = 0 if attempt in seen.unwritten and record["reason"] == "lost" else trained - 1 - log_every
        if not least <= did <= trained:
            wrong.append(f"attempt {attempt} is recorded with {did} steps, but began {trained}")
    for (attempt, record), after in zip(zip(known, records), records[1:]):
        kept = record["end_step"] - record["lost_steps"]
        if after["start_step"] != kept and attempt not in seen.set_back:
            wrong.append(
                f"attempt {attempt} kept step {kept} by its record, but the next started at {after['start_step']}"
            )
    if unknown := sorted(set(seen.resumed) - {record["start_step"] for record in records}):
        wrong.append(f"the log says that it resumed after steps {_some(unknown)}, attempts.jsonl does not")
    return wrong


def lost_steps(start: int, begun: int, resumed: int) -> int:
    """Whole steps that an attempt surely did after `start` and that are to be done again: a step is whole when the next
    has begun."""
    return max(0, start + begun - 1 - resumed)


def spares(loss: Loss, nodes: int) -> bool:
    """Whether no step may be lost in a run on so many nodes."""
    return loss is Loss.NOTHING or (loss is Loss.UNLESS_A_NODE_LIVES and nodes > 1)


def check_loss(loss: Loss, nodes: int, resumed: int, lost: int, kept: int) -> list[str]:
    """A fault cost no more than it may. `kept` is the newest good checkpoint when it struck, of NEWEST then after."""
    if loss is Loss.NEWEST:
        return [f"resumed after step {resumed}, but {kept} was the newest whole checkpoint"] if resumed != kept else []
    if spares(loss, nodes):
        return [f"{lost} steps lost, 0 allowed"] if lost else []
    return [f"resumed after step {resumed}, but step {kept} had been saved"] if resumed < kept else []


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
