"""The worst day of processes: fork fails, the OOM killer takes any of them, clocks disagree, a node reboots.

`python -m tests.faults --processes` strikes with each of these at each moment of a run in turn, on a throwaway Slurm
and under --local, and writes a section of docs/reports.md. The attempt may end, if the next one continues. Never may a
kept step be lost, a bit differ from the undisturbed run, a wait outlast its deadline, a run end for good, or a record
be false.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from tests.faults.crashes import kill_other_rank, kill_supervisor, kill_worker
from tests.faults.plan import Fault, Inject, Loss, Moment, Return, RunPlan, Setting, Shot
from tests.faults.site import BATCH, NODES
from tests.faults.victim import Missed, Victim
from tests.slurm.processes import cut_power

SETTING = Setting(2, 1, BATCH, workers=1, disk=False, clock=True, forks=True)
SHOTS_PER_RUN = 6
DELAY = 3  # of a moment's longest delay, this part: the moments of a start are over soon
NO_FORKS_S = (0.5, 3.5)  # a moment, least and most
APART_S, JUMP_S = 170, 3.0  # the clocks of two nodes, and how long until they jump
# A node is back after tens of seconds at best. As it registers, Slurm kills what is left of its jobs elsewhere, so no
# rank could be rescued if it took less than a rescue.
REBOOT_S = 10.0


def no_forks(threads: bool) -> Inject:
    """The kernel has no process, or also no thread, for a moment."""

    def inject(victim: Victim, shot: Shot) -> None:
        least, most = NO_FORKS_S
        seconds = least + shot.aim * (most - least)
        victim.stop_forks(seconds, threads)
        time.sleep(seconds)  # what it costs must not be put down to the next fault

    return inject


def kill_shell(victim: Victim, shot: Shot) -> None:
    """The OOM killer takes the batch shell."""
    shells = {p.pid: p.parent for p in victim.processes() if any("slurm_script" in word for word in p.argv)}
    oldest = [pid for pid, parent in shells.items() if parent not in shells]
    if not oldest:
        raise Missed("there is no batch shell")
    victim.signal(signal.SIGKILL, *oldest)


def clocks_apart(victim: Victim, shot: Shot) -> None:
    """The clocks of the nodes are minutes apart from each other and from the controller's, and then jump."""
    ahead, behind = (NODES[:2], NODES[1::-1])[shot.aim < 0.5]
    victim.set_clock(APART_S, ahead)
    victim.set_clock(-APART_S, behind)
    time.sleep(JUMP_S)
    victim.set_clock(-APART_S, ahead)
    victim.set_clock(APART_S, behind)


def reboot(victim: Victim, shot: Shot) -> None:
    """A node loses its processes, and is back at once: Slurm sees that it has booted, and its jobs fail there."""
    node, cluster = victim.node(shot.aim), victim.site.cluster
    cluster.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
    if not cut_power(victim.on_node(node)):
        raise Missed("the processes have ended")
    victim.later(REBOOT_S, lambda: cluster.start_daemon(f"slurmd.{node}", "-b"))


NO_PROCESS = "fork fails with EAGAIN for 0.5 to 3.5 s"
WITH_WORKERS = (Moment.RESTORE, Moment.STEP, Moment.SAVE, Moment.END)
PHASES = (Moment.START, Moment.RESTORE, Moment.SAVE, Moment.STOP, Moment.RESCUE, Moment.AGAIN, Moment.END)
A_RANK_LIVES, SINCE_SAVE = Loss.UNLESS_A_RANK_LIVES, Loss.SINCE_SAVE
FAULTS = [
    Fault("no-forks", NO_PROCESS, no_forks(False), (*PHASES, Moment.HOLD), SINCE_SAVE, Return.PERHAPS),
    Fault(
        "no-threads",
        "no process and no thread starts for 0.5 to 3.5 s",
        no_forks(True),
        PHASES,
        SINCE_SAVE,
        Return.PERHAPS,
    ),
    Fault("oom-shell", "SIGKILL of the batch shell", kill_shell, PHASES),
    Fault("oom-supervisor", "SIGKILL of a rank's supervisor", kill_supervisor, PHASES, A_RANK_LIVES),
    Fault("oom-rank", "SIGKILL of a rank", kill_other_rank, PHASES, A_RANK_LIVES),
    Fault("oom-worker", "SIGKILL of a loader worker", kill_worker, WITH_WORKERS),
    Fault(
        "clocks-apart",
        "the clocks of two nodes are 6 minutes apart, and jump",
        clocks_apart,
        PHASES,
        returns=Return.STAYS,
    ),
    Fault(
        "reboot",
        "a node reboots: NODE_FAIL",
        reboot,
        (Moment.START, Moment.STEP, Moment.SAVE, Moment.RESCUE),
        Loss.UNLESS_A_NODE_LIVES,
    ),
]


def plan_in_turn(
    faults: Mapping[str, Fault], count: int, seed: int, lacks: AbstractSet[str] = frozenset()
) -> list[RunPlan]:
    """Runs with `count` faults in all: each kind at each of its moments in turn, then again with other delays and
    targets."""
    draw = random.Random(seed)
    setting = replace(SETTING, clock="clock" not in lacks, forks="clock" not in lacks)
    kinds = [fault for fault in faults.values() if fault.needs(setting)]
    turn = [(fault, moment) for fault in kinds for moment in fault.moments]
    shots: list[Shot] = []
    while len(shots) < count:
        draw.shuffle(turn)
        for fault, moment in turn[: count - len(shots)]:
            shots.append(Shot(fault.name, moment, draw.randint(0, moment.longest_ms // DELAY), draw.random()))
    last = [shot for shot in shots if shot.moment is Moment.END]  # of its run
    others = [shot for shot in shots if shot.moment is not Moment.END]
    runs = max(len(last), -(-count // SHOTS_PER_RUN))
    parts = [(*others[number::runs], *last[number : number + 1]) for number in range(runs)]
    return [RunPlan(f"processes-{number + 1:02}", setting, part) for number, part in enumerate(parts) if part]
