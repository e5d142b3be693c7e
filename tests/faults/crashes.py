"""Faults without warning: processes and nodes that die or hang, daemons that are away."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from tests.faults.plan import Fault, Loss, Moment, Needs, Return, Shape, Shot
from tests.faults.signals import ALWAYS, AT_WORK, WITH_RANKS
from tests.faults.site import SLURMD_TIMEOUT_S
from tests.faults.victim import Missed, Process, Victim
from tests.slurm.processes import cut_power

CONTROLLER = "slurmctld"
BAD_NODE_KILLS = 3
REQUEUE_HOLD_S = 6  # how long Slurm holds a requeued job, with this cluster's cred_expire


def kill_rank_0(victim: Victim, shot: Shot) -> None:
    """Kill the rank that writes the log and serves the store."""
    victim.signal(signal.SIGKILL, victim.rank(0).pid)


def kill_other_rank(victim: Victim, shot: Shot) -> None:
    """Kill another rank, as the kernel does when a node runs out of memory."""
    victim.signal(signal.SIGKILL, victim.rank(1 + int(shot.aim * (victim.setting.world_size - 1))).pid)


def kill_all(victim: Victim, shot: Shot) -> None:
    """Kill every rank: none is left to save, or to record why the attempt ended."""
    victim.signal(signal.SIGKILL, *(rank.pid for rank in victim.all_ranks()))


def kill_supervisor(victim: Victim, shot: Shot) -> None:
    """Kill the process that starts a rank, and with it the rank."""
    supervisors = victim.supervisors()
    if (number := victim.pick(shot.aim)) not in supervisors:
        raise Missed(f"rank {number} has no supervisor")
    victim.signal(signal.SIGKILL, supervisors[number].pid)


def bad_node(victim: Victim, shot: Shot) -> None:
    """A node kills its ranks, and those that start there next, and once more, unless the run leaves it."""
    node = victim.node(shot.aim)
    killed: set[int] = set()

    def started() -> list[Process]:
        ranks = [rank for rank in victim.ranks().values() if rank.pid not in killed]
        there = [rank for rank in ranks if rank.env.get("SLURMD_NODENAME") == node]
        return there or (ranks if len(ranks) == victim.setting.world_size else [])

    for _ in range(BAD_NODE_KILLS):
        found = victim.wait(started, 60, "no rank starts")
        if found[0].env.get("SLURMD_NODENAME") != node:
            return
        killed |= {rank.pid for rank in found}
        victim.signal(signal.SIGKILL, *(rank.pid for rank in found))


def kill_srun(victim: Victim, shot: Shot) -> None:
    """Kill srun, which started the ranks."""
    found = [p.pid for p in victim.processes() if p.argv[0].endswith("srun")]
    victim.signal(signal.SIGKILL, *found)


def kill_worker(victim: Victim, shot: Shot) -> None:
    """Kill a loader worker, as the kernel does first when memory runs out."""
    workers = victim.workers()
    if not workers:
        raise Missed("no loader worker is running")
    victim.signal(signal.SIGKILL, workers[int(shot.aim * len(workers))].pid)


def freeze_rank(victim: Victim, shot: Shot) -> None:
    """Stop a rank with SIGSTOP: it neither works nor dies."""
    victim.signal(signal.SIGSTOP, victim.rank(victim.pick(shot.aim)).pid)


def crash_node(victim: Victim, shot: Shot) -> None:
    """A node loses power, and comes back before or after Slurm marks it DOWN."""
    node = victim.node(shot.aim)
    victim.site.cluster.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
    if not cut_power(victim.on_node(node)):
        raise Missed("the processes have ended")
    _back_later(victim, node, 3 + 2 * SLURMD_TIMEOUT_S * shot.aim)


def crash_other_node(victim: Victim, shot: Shot) -> None:
    """A node loses power, but not that of the batch shell: nothing would be left that could continue on one node."""
    shell = next((p.env["SLURMD_NODENAME"] for p in victim.processes() if p.argv[0].endswith("srun")), "")
    if victim.node(0) == victim.node(0.99):
        raise Missed("the run has one node left")
    crash_node(victim, replace(shot, aim=0.5 if victim.node(0) == shell else 0))


def restart_slurmd(victim: Victim, shot: Shot) -> None:
    """Restart a node's slurmd, as an upgrade does; its ranks continue."""
    node = victim.node(shot.aim)
    victim.site.cluster.stop_daemon(f"slurmd.{node}", signal.SIGTERM if shot.aim < 0.5 else signal.SIGKILL)
    time.sleep(1 + 2 * shot.aim)
    victim.site.cluster.start_daemon(f"slurmd.{node}")


def lose_slurmd(victim: Victim, shot: Shot) -> float:
    """A node is cut off: Slurm marks it DOWN and requeues the job, while its ranks continue until it is back."""
    node, cluster = victim.node(shot.aim), victim.site.cluster
    cluster.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
    try:
        victim.wait(
            lambda: "State=DOWN" in cluster.run("scontrol", "show", "node", node), 60, f"Slurm did not mark {node} DOWN"
        )
        return time.monotonic()
    finally:
        # Only after the job has started on another node: Slurm 22.05 would otherwise start it here, and kill it
        # together with what is left of the earlier attempt.
        _back_later(victim, node, 2 * REQUEUE_HOLD_S)


def restart_controller(victim: Victim, shot: Shot) -> None:
    """Restart slurmctld, as an upgrade does; no run may notice."""
    victim.site.cluster.stop_daemon(CONTROLLER, signal.SIGTERM)
    _controller_back(victim, 1 + 4 * shot.aim)


def controller_away_at_stop(victim: Victim, shot: Shot) -> None:
    """The ranks stop in order to be requeued, while slurmctld is away."""
    victim.slurm("scancel", "--signal", "USR2", victim.job.job_id)
    victim.site.cluster.stop_daemon(CONTROLLER, signal.SIGTERM)
    _controller_back(victim, 1 + 4 * shot.aim)


def _controller_back(victim: Victim, seconds: float) -> None:
    time.sleep(seconds)
    cluster = victim.site.cluster
    cluster.start_daemon(CONTROLLER)
    victim.wait(cluster.answers, 60, "slurmctld did not answer again")


def _back_later(victim: Victim, node: str, seconds: float) -> None:
    victim.later(seconds, lambda: victim.site.cluster.start_daemon(f"slurmd.{node}"))


def _is(shape: Shape) -> Needs:
    return lambda setting: setting.shape is shape


SINCE_SAVE, A_NODE_LIVES, A_RANK_LIVES = Loss.SINCE_SAVE, Loss.UNLESS_A_NODE_LIVES, Loss.UNLESS_A_RANK_LIVES
STAYS = Return.STAYS
FIXED, SPARE, RANGE = Shape
AGAIN = Moment.AGAIN
STEADY = (Moment.STEP, Moment.VALIDATION, Moment.SAVE)
FAULTS = [
    Fault("kill-rank-0", "SIGKILL of rank 0", kill_rank_0, (*ALWAYS, AGAIN), A_RANK_LIVES),
    Fault("kill-rank", "SIGKILL of another rank", kill_other_rank, (*ALWAYS, AGAIN), A_RANK_LIVES),
    Fault("kill-all", "SIGKILL of every rank", kill_all, (*ALWAYS, AGAIN), SINCE_SAVE),
    Fault("kill-supervisor", "SIGKILL of a rank's supervisor", kill_supervisor, (*AT_WORK, AGAIN), A_RANK_LIVES),
    Fault("bad-node", "a node kills its ranks three times in a row", bad_node, STEADY, SINCE_SAVE, needs=_is(FIXED)),
    Fault("kill-srun", "SIGKILL of srun", kill_srun, (*WITH_RANKS, AGAIN), SINCE_SAVE),
    Fault("kill-worker", "SIGKILL of a loader worker", kill_worker, STEADY, needs=lambda run: run.workers > 0),
    Fault("freeze-rank", "SIGSTOP of a rank", freeze_rank, (*AT_WORK, AGAIN), A_RANK_LIVES),
    Fault("node-crash", "a node loses power", crash_node, (*STEADY, AGAIN), A_NODE_LIVES, needs=_is(FIXED)),
    Fault(
        "spare-node",
        "a node loses power, with a spare node",
        crash_node,
        (*STEADY, AGAIN),
        A_NODE_LIVES,
        needs=_is(SPARE),
    ),
    Fault(
        "fewer-nodes",
        "a node loses power, with `--nodes 1-2`",
        crash_other_node,
        STEADY,
        A_NODE_LIVES,
        needs=_is(RANGE),
    ),
    Fault("slurmd-restart", "slurmd away for 1 to 3 s", restart_slurmd, (*STEADY, AGAIN), returns=STAYS, slow=True),
    Fault(
        "slurmd-lost",
        "a node marked DOWN, its ranks alive",
        lose_slurmd,
        STEADY,
        SINCE_SAVE,
        needs=_is(FIXED),
        slow=True,
        deadline_s=150,
    ),
    Fault("slurmctld-restart", "slurmctld away for 1 to 5 s", restart_controller, (*AT_WORK, AGAIN), returns=STAYS),
    Fault("slurmctld-at-stop", "SIGUSR2 with slurmctld away for 1 to 5 s", controller_away_at_stop, AT_WORK),
]
