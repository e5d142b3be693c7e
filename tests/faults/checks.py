"""What must be true after every fault and at the end of every run. A check returns its violations, one line each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.say import counted
from tests.faults.plan import Loss
from tests.records.curves import expected, on_disk

CLOCKS = ("time", "samples_per_s")
NO_STEP = -1  # of an attempt that never began
Record = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Attempt:
    """One start of the ranks: the job's id and restart count, Slurm's step, and the restarts within that step."""

    job_id: str
    restart: int
    step: int = 0
    again: int = 0

    @classmethod
    def of(cls, record: Record) -> Attempt:
        """The attempt that a line of attempts.jsonl is about."""
        step = record.get("step_id", 0)
        step_id = NO_STEP if step is None else step
        return cls(str(record["job_id"]), int(record["restart"]), step_id, record.get("step_restarts", 0))

    @property
    def never_began(self) -> Attempt:
        """How its record names it if it ended before it began: the batch shell does not know the step."""
        return Attempt(self.job_id, self.restart, NO_STEP)

    @classmethod
    def named(cls, name: str) -> Attempt:
        """The attempt that World has a name for, such as 7-0-0 or, after two restarts in place, 7-0-0-2."""
        found = re.fullmatch(r"(local-\d+-\d+-\d+|[^-]+)-(\d+)-(\d+)(?:-(\d+))?", name)
        assert found is not None, name
        job_id, *numbers = found.groups()
        return cls(job_id, *(int(number) for number in numbers if number))

    def __str__(self) -> str:
        return f"{self.job_id}-{self.restart}-{self.step}" + (f"-{self.again}" if self.again else "")


@dataclass(frozen=True)
class Undisturbed:
    """The result of an undisturbed run."""

    weights: str
    metrics: Sequence[Record]


@dataclass(frozen=True)
class Seen:
    """What the harness observed of a run, independently of the run's own records."""

    begun: Mapping[Attempt, int]  # training batches that each attempt began
    resumed: Sequence[int]  # steps after which attempts resumed, according to the log
    damaged: AbstractSet[int]  # steps of existing checkpoints that the harness damaged
    set_back: AbstractSet[Attempt]  # attempts after which the harness damaged the newest checkpoint
    unwritten: AbstractSet[Attempt]  # attempts that could not write their records, as the disk was full


def check_run(
    run: RunDir, verified: Sequence[Record], undisturbed: Undisturbed, seen: Seen, unwritten: int
) -> list[str]:
    """Check the folder of a finished run; `verified` is the output of `launch.py verify --json`."""
    return [
        *check_metrics(read_lines(run.metrics), undisturbed.metrics),
        *check_checkpoints(verified, seen.damaged, undisturbed.weights),
        *check_attempts(read_lines(run.attempts), seen, unwritten),
    ]


def check_curves(run: RunDir, log_every: int) -> list[str]:
    """TensorBoard's event files have each point of metrics.jsonl, once and in order."""
    wrong = []
    recorded, shown = expected(run, log_every), on_disk(run)
    for tag in sorted({*recorded, *shown}):
        if shown[tag] != recorded[tag]:
            lacking = [step for _, step, _ in Counter(recorded[tag]) - Counter(shown[tag])]
            excess = [step for _, step, _ in Counter(shown[tag]) - Counter(recorded[tag])]
            wrong.append(f"TensorBoard's {tag}: missing steps ({_some(lacking)}), extra steps ({_some(excess)})")
    return wrong


def without_clocks(line: Record) -> dict[str, Any]:
    """A line of metrics.jsonl without its times, which differ between any two runs."""
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
        wrong.append("the steps in metrics.jsonl are out of order")
    if wrong:
        return wrong
    pairs = zip(map(without_clocks, lines), map(without_clocks, undisturbed))
    if differ := [one["step"] for one, other in pairs if one != other]:
        wrong.append(f"metrics.jsonl differs from the undisturbed run's at steps {_some(differ)}")
    elif len(lines) != len(undisturbed):
        wrong.append(f"metrics.jsonl has {len(lines)} lines, the undisturbed run's {len(undisturbed)}")
    return wrong


def check_checkpoints(verified: Sequence[Record], damaged: AbstractSet[int], weights: str) -> list[str]:
    """`verify --json` says that all checkpoints but those in `damaged` are intact, and that the last has `weights`."""
    wrong = []
    for checkpoint in verified:
        step = checkpoint["step"]
        if not checkpoint["ok"] and step not in damaged:
            wrong.append(f"the checkpoint of step {step} is damaged, but not by the harness: {checkpoint['error']}")
        if checkpoint["ok"] and step in damaged:
            wrong.append(f"the checkpoint of step {step} was damaged by the harness, but verify calls it intact")
    if not verified:
        return ["there is no checkpoint"]
    if verified[-1]["weights_sha256"] != weights:
        wrong.append(f"the final weights differ from the undisturbed run's: {verified[-1]['weights_sha256']}")
    return wrong


def check_attempts(records: Sequence[Record], seen: Seen, unwritten: int) -> list[str]:
    """attempts.jsonl records what happened. For a lost attempt its last `unwritten` steps may be unknown."""
    wrong = []
    numbers = [record["attempt"] for record in records]
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + len(numbers))):
        wrong.append(f"attempts.jsonl numbers its attempts {numbers}")
    known = [Attempt.of(record) for record in records]
    if twice := [str(attempt) for attempt, count in Counter(known).items() if count > 1]:
        wrong.append(f"attempts.jsonl has more than one record of {', '.join(twice)}")
    given_up: set[Attempt] = set()
    for attempt in known:
        if attempt.never_began in given_up:
            wrong.append(f"attempt {attempt} began in a start of the job that the batch shell had given up")
        if attempt.step == NO_STEP:
            given_up.add(attempt)
    if missing := sorted(str(attempt) for attempt, count in seen.begun.items() if count > 0 and attempt not in known):
        wrong.append(f"attempts.jsonl has no record of {', '.join(missing)}, which trained")
    reasons = [record["reason"] for record in records]
    if "finished" not in reasons[-1:] or "finished" in reasons[:-1]:
        wrong.append(f"attempts.jsonl ends with {reasons[-1:]}, and has finished {reasons.count('finished')} times")
    for attempt, record in zip(known, records):
        did, trained = record["end_step"] - record["start_step"], seen.begun.get(attempt, 0)
        least = 0 if attempt in seen.unwritten and record["reason"] == "lost" else trained - 1 - unwritten
        if not least <= did <= trained:
            wrong.append(f"attempt {attempt} is recorded with {did} steps, but began {trained}")
    for (attempt, record), after in zip(zip(known, records), records[1:]):
        kept = record["end_step"] - record["lost_steps"]
        if after["start_step"] != kept and attempt not in seen.set_back:
            wrong.append(
                f"attempt {attempt} kept step {kept} by its record, but the next started at {after['start_step']}"
            )
    if unknown := sorted(set(seen.resumed) - {record["start_step"] for record in records}):
        wrong.append(f"the log has resumes after steps {_some(unknown)}, attempts.jsonl does not")
    return wrong


def lost_steps(start: int, begun: int, resumed: int) -> int:
    """Steps after `start` that an attempt certainly completed and that must be repeated. A step is certainly complete
    once the next one has begun."""
    return max(0, start + begun - 1 - resumed)


def spares(loss: Loss, nodes: int, ranks: int) -> bool:
    """Whether the fault may cost no step in a run on this many nodes, with so many ranks."""
    survivors = {Loss.NOTHING: 1, Loss.UNLESS_A_NODE_LIVES: nodes - 1, Loss.UNLESS_A_RANK_LIVES: ranks - 1}
    return survivors.get(loss, 0) > 0


def check_loss(loss: Loss, nodes: int, ranks: int, resumed: int, lost: int, kept: int) -> list[str]:
    """A fault cost no more than allowed. `kept` is the newest intact step before the fault, or for NEWEST after it."""
    if loss is Loss.NEWEST:
        return [f"resumed after step {resumed}, but {kept} was the newest intact checkpoint"] if resumed != kept else []
    if spares(loss, nodes, ranks):
        return [f"{counted(lost, 'step')} lost, 0 allowed"] if lost else []
    return [f"resumed after step {resumed}, but step {kept} was saved"] if resumed < kept else []


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
