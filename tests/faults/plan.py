"""The plan: which runs there are, and which faults hit each of them, when and where. A pure function of the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tests.faults.site import BATCH, NOTICE, SCAVENGE

if TYPE_CHECKING:
    from tests.faults.victim import Victim

FAULTS_PER_RUN = (6, 9)  # at least, at most; half of all, where those are few: some things show with two runs only


class Moment(Enum):
    """What a fault waits for before its delay: the words for it, and the longest delay in ms."""

    START = "start of the ranks", 4000
    RESTORE = "warm-up and restore", 100
    STEP = "steps", 700
    VALIDATION = "validation", 150
    SAVE = "save", 40
    STOP = "stop", 400
    HOLD = "wait in the queue", 3000

    @property
    def words(self) -> str:
        """What the report calls it."""
        return self.value[0]

    @property
    def longest_ms(self) -> int:
        """Upper end of the random delay after it."""
        return self.value[1]


class Loss(Enum):
    """How many steps a fault may cost."""

    NOTHING = "0"
    SINCE_SAVE = "those since the last save"
    UNLESS_A_NODE_LIVES = "0; on one node, those since the last save"
    NEWEST = "those since the save before"


class Return(Enum):
    """Who brings the run back."""

    ITSELF = "itself"
    STAYS = "stays"  # the attempt is not ended at all
    PERHAPS = "itself, if it ended"
    USER = "launch.py resume"
    EITHER = "itself or launch.py resume"


@dataclass(frozen=True)
class Setting:
    """What a run is: how many ranks, where, with what."""

    nodes: int
    tasks_per_node: int
    partition: str
    workers: int
    disk: bool  # on a small disk of its own
    clock: bool  # with a clock that can be set

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
        """Nodes times ranks per node."""
        return f"{self.nodes}x{self.tasks_per_node}"


@dataclass(frozen=True)
class Shot:
    """One planned fault: which, from which moment, how long after, and `aim`, in [0, 1), for all that it chooses."""

    fault: str
    moment: Moment
    delay_ms: int
    aim: float


@dataclass(frozen=True)
class RunPlan:
    """One run and its faults, in order."""

    name: str
    setting: Setting
    shots: tuple[Shot, ...]


# What a fault does to a run. When what it set off strikes later than it was called, it returns that moment.
Inject = Callable[["Victim", Shot], "float | None"]
Needs = Callable[[Setting], bool]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: what it does, the moments at which it may, and what then must hold."""

    name: str
    does: str
    inject: Inject
    moments: tuple[Moment, ...]
    loses: Loss = Loss.NOTHING
    returns: Return = Return.ITSELF
    needs: Needs = lambda setting: True
    alone: bool = False  # it is felt by every run, so that no other fault is under way meanwhile
    slow: bool = False  # it takes its time, so the run is to take it easy
    saves_again: bool = False  # the run has come through only when it has saved again
    deadline_s: float = 120.0  # from the fault to the first new step


def make_plan(
    faults: Mapping[str, Fault], count: int, seed: int, lacks: AbstractSet[str] = frozenset()
) -> list[RunPlan]:
    """Runs with `count` faults in all, each kind about as often as the others.

    `lacks` names what runs cannot have here: "disk", "clock".
    """
    draw = random.Random(seed)
    if not any(fault.needs(_draw_setting(draw, lacks)) for _ in range(1000) for fault in faults.values()):
        raise ValueError(f"this machine can try none of {', '.join(faults)}")
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
            # What came seldom so far is the likelier.
            (fault,) = draw.choices(kinds, [(1 + planned[kind.name]) ** -3 for kind in kinds])
            planned[fault.name] += 1
            moment = draw.choice(fault.moments)
            shots.append(Shot(fault.name, moment, draw.randint(0, moment.longest_ms), draw.random()))
        count -= len(shots)
        runs.append(RunPlan(f"chaos-{len(runs) + 1:02}", setting, tuple(shots)))
    return runs


def layouts(plan: Sequence[RunPlan]) -> list[Setting]:
    """An undisturbed setting per layout of ranks; neither partition nor workers nor disk may change what is learned."""
    sizes = sorted({(run.setting.nodes, run.setting.tasks_per_node) for run in plan})
    return [Setting(nodes, tasks, BATCH, 0, disk=False, clock=False) for nodes, tasks in sizes]


def _draw_setting(draw: random.Random, lacks: AbstractSet[str]) -> Setting:
    (size,) = draw.choices([(2, 1), (1, 2), (2, 2)], [4, 4, 1])
    (partition,) = draw.choices([BATCH, NOTICE, SCAVENGE], [3, 1, 1])
    workers, disk, clock = (draw.random() < share for share in (0.3, 0.3, 0.3))
    return Setting(*size, partition, int(workers), disk and "disk" not in lacks, clock and "clock" not in lacks)
