"""What `prove`, or a replay, and the ranks that it watches exchange: its plan, and what each rank notes of each step.

A rank is watched when `PLAN` is in its environment, which only `prove` and a replay set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from laststep.records.metrics import CLOCK, is_step, read_lines
from laststep.rundir import RunDir

PLAN = "LASTSTEP_PROBE"  # the variable that holds an attempt's plan
LEAST_STEPS, MOST_STEPS, INTO_SECOND_EPOCH = 20, 100, 8
LEAST_IN_TIME = 8  # steps of a run that ends because its time is up


@dataclass(frozen=True)
class Strike:
    """A signal that a rank sends to itself in the body of a step or, with `batch`, in that batch of the validation
    after it. Both count from 1. A signal that asks for a stop holds all ranks there until they have agreed to stop."""

    signal: str
    rank: int
    step: int
    batch: int | None = None


@dataclass(frozen=True)
class ProbePlan:
    """What happens in one attempt: at most one strike, and a stop in step `steps`.

    Without `steps`, the run ends early in its second epoch, after `LEAST_STEPS` to `MOST_STEPS` steps, or `seconds`
    after its start, but after `LEAST_IN_TIME` steps. Each validation has the first `validation_batches` alone (None:
    all of them). A replay notes nothing before step `since`; from then on an `observer`, module:Class of an upper room,
    sees each step, and is given what was `asked`.
    """

    steps: int | None = None
    strike: Strike | None = None
    validation_batches: int | None = None
    seconds: float | None = None
    since: int = 1
    observer: str | None = None
    asked: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What a rank needs in its environment to follow this plan."""
        return {PLAN: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProbePlan | None:
        """The plan that this process follows; None for any process that `prove` does not watch."""
        if PLAN not in environment:
            return None
        plan = json.loads(environment[PLAN])
        return cls(**{**plan, "strike": Strike(**plan["strike"]) if plan["strike"] else None})

    def ends_in(self, step: int, epoch: int, step_of_epoch: int) -> bool:
        """Whether the run stops in this step, the `step_of_epoch`-th of its epoch. All count from 1."""
        if self.steps is not None:
            return step == self.steps
        return step == MOST_STEPS or (epoch > 1 and step_of_epoch >= INTO_SECOND_EPOCH and step >= LEAST_STEPS)


def without_trackers(folder: Path) -> dict[str, str]:
    """Environment with which a watched script's own trackers send nothing, and write nothing outside `folder`, unless
    its code names a mode or an address."""
    return {
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # a database takes half a minute to make, and puts files elsewhere
        "NEPTUNE_MODE": "debug",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "disabled",
        "TRACKIO_DIR": str(folder / "trackio"),
    }


# Variables that would lead it to a run or a server all the same. A rank removes them, as most must not be empty.
TO_TRACKERS = (
    *("WANDB_RUN_ID", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_REGISTRY_URI"),
    *("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"),
)


class Variable(TypedDict):
    """A variable of the user's code: a random `generator`, an `iterator`, whose state is unknown, a `number`, whose
    digest is what it prints as, or any other `value`."""

    kind: str
    digest: str


class ProbedStep(TypedDict):
    """What a rank noted of a step, once it had finished it."""

    attempt: int  # from 0
    step: int  # from 1, like `epoch`
    epoch: int
    batch: str  # digest of what the loop handed out
    inputs: list[str]  # digests of the inputs of the model's forward passes in training
    updates: int  # calls of an optimiser's step()
    state: dict[str, str]  # digests of all that a checkpoint of this step would hold, by name
    beside: list[str]  # the names in `state` of numbers and words that are not in an object of torch's
    rows: list[str]  # the names in `state` of sharded tensors: the rank has some rows of each
    variables: dict[str, Variable]  # of the user's code, by name, as the step began


class ProbedBatch(TypedDict):
    """A batch of the validation after a step, noted before it is validated."""

    attempt: int
    after: int
    validation_batch: int  # from 1


class ProbeFile:
    """What one rank notes; written at once, since the rank may be killed in the next step."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self._path = run.probes / f"{rank}.jsonl"
        self._path.parent.mkdir(exist_ok=True)

    def write(self, line: ProbedStep | ProbedBatch) -> None:
        """Add a line."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Probed:
    """What all ranks of a run have noted, and its metrics."""

    steps: list[list[ProbedStep]]  # by rank; a step that was done again is there twice
    batches: list[ProbedBatch]  # of rank 0
    metrics: list[tuple[bool, dict[str, Any]]]  # each line: whether it is a step's, and what no clock wrote

    @classmethod
    def read(cls, run: RunDir, ranks: int) -> Probed:
        """What is in the run's folder."""
        lines = [read_lines(run.probes / f"{rank}.jsonl") for rank in range(ranks)]
        metrics = [
            (is_step(line), {key: value for key, value in line.items() if key not in CLOCK})
            for line in read_lines(run.metrics)
        ]
        steps = [[line for line in of_rank if "state" in line] for of_rank in lines]
        batches = [line for line in lines[0] if "after" in line]
        return cls(steps, batches, metrics)  # type: ignore[arg-type]

    @property
    def last_step(self) -> int:
        """The last step done; 0 if there is none."""
        return max((line["step"] for line in self.steps[0]), default=0)

    @property
    def last_attempt(self) -> int:
        """The last attempt that has begun a step or a validation."""
        return max((line["attempt"] for line in (*self.steps[0], *self.batches)), default=0)

    def of(self, rank: int, attempt: int) -> list[ProbedStep]:
        """The steps that a rank did in an attempt, in order."""
        return [line for line in self.steps[rank] if line["attempt"] == attempt]

    def at(self, rank: int, step: int) -> ProbedStep | None:
        """What a rank noted of a step, when it did it last."""
        return next((line for line in reversed(self.steps[rank]) if line["step"] == step), None)
