"""The plan: which runs there are, and which faults strike each of them, when and where. A pure function of the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tests.faults.site import BATCH, NOTICE, SCAVENGE

if TYPE_CHECKING:
    from tests.faults.victim import Victim

FAULTS_PER_RUN = (6, 9)  # least and most; a short plan is split in half, as some errors need two runs to show


class Moment(Enum):
    """What a run is doing when a fault strikes: its name in the report, and the longest random delay after it in ms."""

    START = "starting ranks", 4000
    RESTORE = "warm-up and restore", 100
    STEP = "steps", 700
    VALIDATION = "validation", 150
    SAVE = "save", 40
    STOP = "stop", 400
    AGAIN = "restart in place", 1500  # a rank was killed a moment ago
    RESCUE = "rescue", 250  # likewise
    END = "the end", 600  # of the run: its last steps, and the last save
    HOLD = "waiting in the queue", 3000

    @property
    def words(self) -> str:
        """Its name in the report."""
        return self.value[0]

    @property
    def longest_ms(self) -> int:
        """The longest random delay after it, in ms."""
        return self.value[1]


class Loss(Enum):
    """How many steps a fault may cost."""

    NOTHING = "0"
    SINCE_SAVE = "those since the last save"
    UNLESS_A_RANK_LIVES = "0 if another rank survives, else those since the last save"
    UNLESS_A_NODE_LIVES = "0 if another node survives, else those since the last save"
    NEWEST = "those since the save before the last"


class Return(Enum):
    """What continues the run after the fault."""

    ITSELF = "itself"
    STAYS = "stays"  # the fault does not end the attempt
    PERHAPS = "itself, if it ended"
    USER = "launch.py resume"
    EITHER = "itself or launch.py resume"


class Shape(Enum):
    """What a run does when it loses a node."""

    FIXED = "requeued"
    SPARE = "continues on a spare node"
    RANGE = "continues on the nodes that are left, with the same bits: it has shares"


@dataclass(frozen=True)
class Setting:
    """The settings of a run: its size, its partition and what it runs with."""

    nodes: int  # to train on; of a range the most
    tasks_per_node: int
    partition: str
    workers: int
    disk: bool  # in a small file system of its own
    clock: bool  # with a clock that the harness can set
    shape: Shape = Shape.FIXED
    forks: bool = False  # with a limit of processes that the harness can set

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
        """Nodes times ranks per node, such as 2x1. Runs of the same layout learn the same."""
        return f"{'1-' * (self.shape is Shape.RANGE)}{self.nodes}x{self.tasks_per_node}"


@dataclass(frozen=True)
class Shot:
    """One planned fault: its name, its moment, the delay after that, and `aim` in [0, 1), which picks its target."""

    fault: str
    moment: Moment
    delay_ms: int
    aim: float


@dataclass(frozen=True)
class RunPlan:
    """One run and its faults, in order of time."""

    name: str
    setting: Setting
    shots: tuple[Shot, ...]


# Injects a fault. One that strikes later than it was called returns the time at which it struck.
Inject = Callable[["Victim", Shot], "float | None"]
Needs = Callable[[Setting], bool]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: what happens, at which moments it may strike, and what must be true afterwards."""

    name: str
    does: str
    inject: Inject
    moments: tuple[Moment, ...]
    loses: Loss = Loss.NOTHING
    returns: Return = Return.ITSELF
    needs: Needs = lambda setting: True
    slow: bool = False  # it takes long, so the run slows down meanwhile
    saves_again: bool = False  # the run has recovered only after its next save
    deadline_s: float = 120.0  # from the fault to the first new step


def make_plan(
    faults: Mapping[str, Fault], count: int, seed: int, lacks: AbstractSet[str] = frozenset()
) -> list[RunPlan]:
    """Runs with `count` faults in all, each kind about equally often.

    `lacks` names what runs cannot have on this machine: "disk", "clock". Raises ValueError if no fault can be injected.
    """
    draw = random.Random(seed)
    if not any(fault.needs(_draw_setting(draw, lacks)) for _ in range(1000) for fault in faults.values()):
        raise ValueError(f"this machine can inject none of {', '.join(faults)}")
    sizes = [min(size, -(-count // 2)) for size in FAULTS_PER_RUN]
    planned: Counter[str] = Counter()
    runs: list[RunPlan] = []
    while count:
        setting = _draw_setting(draw, lacks)
        kinds = [fault for fault in faults.values() if fault.needs(setting)]
        if not kinds:
            continue
        shots = []
        for _ in range(min(count, draw.randint(*sizes))):
            # Prefer kinds that have been rare so far.
            (fault,) = draw.choices(kinds, [(1 + planned[kind.name]) ** -3 for kind in kinds])
            planned[fault.name] += 1
            moment = draw.choice(fault.moments)
            shots.append(Shot(fault.name, moment, draw.randint(0, moment.longest_ms), draw.random()))
        count -= len(shots)
        runs.append(RunPlan(f"chaos-{len(runs) + 1:02}", setting, tuple(shots)))
    return runs


def layouts(plan: Sequence[RunPlan]) -> list[Setting]:
    """One undisturbed setting per layout of ranks: partition, workers, disk and a spare node must not change what a run
    learns."""
    one_of = {run.setting.layout: run.setting for run in plan}
    return [
        replace(setting, partition=BATCH, workers=0, disk=False, clock=False) for _, setting in sorted(one_of.items())
    ]


def _draw_setting(draw: random.Random, lacks: AbstractSet[str]) -> Setting:
    (size,) = draw.choices([(2, 1), (1, 2), (2, 2)], [4, 4, 1])
    (partition,) = draw.choices([BATCH, NOTICE, SCAVENGE], [3, 1, 1])
    workers, disk, clock = (draw.random() < share for share in (0.3, 0.3, 0.3))
    (shape,) = draw.choices(list(Shape), [4, 3, 2]) if size == (2, 1) else [Shape.FIXED]
    return Setting(*size, partition, int(workers), disk and "disk" not in lacks, clock and "clock" not in lacks, shape)
