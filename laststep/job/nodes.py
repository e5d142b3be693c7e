"""The nodes of a run: on which of its job's nodes the ranks start after a fault, and which ones it leaves.

A job with spare nodes, or on a range of nodes, starts its ranks after a fault on others of its nodes. The batch shell
gives srun the options that `write_choice` has written for it. Any requeued job, and any resumed run, is kept from the
nodes that were blamed launch.exclude_after times.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence

from laststep.config.schema import Launch
from laststep.ranks.slurm import UNFIT as UNFIT_STATE
from laststep.ranks.slurm import (
    Job,
    SlurmError,
    answers,
    expand_nodes,
    node_states,
    scontrol,
    show_job,
    show_other_job,
    show_partitions,
)
from laststep.ranks.world import World, hostname
from laststep.records.attempt_record import AttemptRecord, read_attempts
from laststep.records.retry import excluded_nodes, times_blamed
from laststep.rundir import RunDir
from laststep.say import counted, say

# How long a node may take to run `true`. A dead one is noticed by srun after 10 s, by slurmctld after minutes.
PROBE_S = 5.0
# What srun prints about a node that could not start ranks, or that Slurm has given up.
_LOST_NODE = re.compile(r"srun: error: .*(?:failed on node|[Nn]ode failure on) ([\w.-]+)")

# ... and about a node whose ranks were killed.
_KILLED = re.compile(r"srun: error: ([\w.-]+): tasks? [\d,-]+: (?:Killed|Out Of Memory)")

# ... and about a rank that a signal has ended which asks for a stop: its Python had just begun to start.
_ASKED_TO_STOP = re.compile(r"srun: error: [\w.-]+: tasks? [\d,-]+: User defined signal ([12])")


def choose_nodes(
    allocated: Sequence[str],
    unfit: Collection[str],
    blamed: Mapping[str, int],
    excluded: Collection[str],
    least: int,
    most: int,
) -> list[str]:
    """The nodes on which the next ranks start, in the order of `allocated`; empty if fewer than `least` are fit.

    Of the fit ones, those that were blamed least often. An excluded one only where too few others are left.
    """
    fit = [node for node in allocated if node not in unfit]
    good = [node for node in fit if node not in excluded]
    if len(good) < least:
        good, most = fit, least
    best = sorted(good, key=lambda node: (node in excluded, blamed.get(node, 0)))[:most]
    return [node for node in allocated if node in best] if len(best) >= least else []


def unfit_nodes(states: Mapping[str, str]) -> dict[str, str]:
    """Those of these nodes that cannot start ranks, or should not, and why: they are down, drained or silent."""
    return {node: f"{node} is {state}" for node, state in states.items() if UNFIT_STATE.search(state)}


def write_choice(
    run: RunDir, world: World, launch: Launch, counts: Sequence[int], job: Job, records: Sequence[AttemptRecord]
) -> str:
    """Choose the nodes for the next ranks of the job, after its last attempt in `records`, and write srun's options for
    the batch shell. `counts`: the numbers of nodes that can train, ascending. Returns why the ranks cannot start again
    in this allocation; empty if they can."""
    states = node_states(job.get("NodeList", ""))
    unfit = unfit_nodes(states)
    suspects = [node for node in records[-1]["blamed"] if node in states]
    if not launch.chooses_nodes:
        silent = [node for node in suspects if node not in unfit and not _answers(node)]
        return ", ".join([*unfit.values(), *(f"{node} does not answer" for node in silent)])
    now, least = time.time(), counts[0]
    most = max(least, *(count for count in counts if count <= world.nodes - launch.spare_nodes))
    blamed, excluded = times_blamed(records, now), excluded_nodes(records, launch.exclude_after, now)
    while chosen := choose_nodes(list(states), unfit, blamed, excluded, least, most):
        if len(chosen) not in counts:
            most = max(count for count in counts if count < len(chosen))
            continue
        silent = [node for node in chosen if node in suspects and not _answers(node)]
        if not silent:
            break
        unfit.update({node: f"{node} does not answer" for node in silent})
    if not chosen:
        left = counted(len(states) - len(unfit), "node")
        return ", ".join([*unfit.values(), f"{left} left" if states else "Slurm does not show the job's nodes"])
    size = f"--nodes={len(chosen)} --ntasks={len(chosen) * launch.ranks_per_node}"
    try:
        run.next_nodes(world.job_id).write_text(f"{size} --nodelist={','.join(chosen)}\n")
    except OSError as error:
        return f"the choice of nodes cannot be written: {error}"
    left_out = [unfit.get(node) or _why_left(node, blamed) for node in states if node not in chosen]
    say(f"the ranks start on {', '.join(chosen)}" + (f" ({', '.join(left_out)})" if left_out else ""))
    return ""


def lost_nodes(text: str) -> list[str]:
    """The nodes that srun has named in this part of the job's log because they could not start their ranks."""
    return list(dict.fromkeys(_LOST_NODE.findall(text)))


def where_killed(text: str) -> list[str]:
    """The node on which all ranks were killed, by what srun has printed. None if they were on several nodes, or if srun
    was killed itself: then nothing is known against a node."""
    found = set(_KILLED.findall(text))
    return list(found) if len(found) == 1 else []


def asked_to_stop(text: str, status: int) -> signal.Signals | None:
    """The signal that asked for a stop and ended a rank which could not handle it yet, by what srun has printed, or by
    its exit status: what srun prints in a user's own batch script may be in any file."""
    if found := _ASKED_TO_STOP.search(text):
        return signal.Signals[f"SIGUSR{found[1]}"]
    return next((number for number in (signal.SIGUSR1, signal.SIGUSR2) if status == 128 + number), None)


def keep_from_bad_nodes(run: RunDir, job_id: str, launch: Launch) -> None:
    """Keep a job of the run from the nodes that it leaves, and no longer from those that it left more than a day ago.

    Slurm allows that only once the job is requeued; and while a process of the job lives, it cannot start again.
    """
    records = read_attempts(run.attempts)
    ever = {host for record in records for host in record["blamed"]}
    if not ever:
        return
    try:
        job = show_other_job(job_id)
        before = set(expand_nodes(job.get("ExcNodeList", "")))
        kept = before - (ever - set(expand_nodes(launch.exclude or "")))
        bad = _that_can_be_spared(records, launch, job.get("Partition"), kept)
        if (after := kept | set(bad)) != before:
            scontrol("update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(after))}")
            if bad:
                say(f"job {job_id} leaves {_blamed_how_often(bad, records)} (launch.exclude_after)")
    except SlurmError as error:
        say(f"the job may start again on a node that was blamed for faults: {error}")


def keep_from_this_node(world: World, launch: Launch) -> None:
    """Keep the job, once it is requeued, from the node of this process, which does not show the run's folder."""
    node = hostname()
    try:
        job = show_job(world.job_id) or {}
        excluded = expand_nodes(job.get("ExcNodeList", ""))
        if launch.exclude_after is None or node in excluded or not _can_spare(launch, job.get("Partition"), excluded):
            return
        scontrol("update", f"JobId={world.job_id}", f"ExcNodeList={','.join([*excluded, node])}")
        say(f"job {world.job_id} leaves {node}, which does not show the run's folder")
    except SlurmError as error:
        say(f"the job may start again on {node}, which does not show the run's folder: {error}")


def excluded_at_submission(run: RunDir, launch: Launch) -> str | None:
    """What a new job of the run must not use, as sbatch has it: launch.exclude, and the nodes that the run leaves."""
    records = read_attempts(run.attempts)
    users = set(filter(None, [launch.exclude]))
    bad = _that_can_be_spared(records, launch, launch.partition, users)
    return ",".join([*users, *sorted(bad)]) or None


def left_nodes(records: Sequence[AttemptRecord], launch: Launch) -> str:
    """The nodes that the run leaves, for `status`; empty without any."""
    return _blamed_how_often(excluded_nodes(records, launch.exclude_after, time.time()), records)


def _that_can_be_spared(
    records: Sequence[AttemptRecord], launch: Launch, partition: str | None, others: Collection[str]
) -> list[str]:
    """The nodes that the run leaves, but no more than leave the partition enough nodes for the job to start."""
    bad = [node for node in excluded_nodes(records, launch.exclude_after, time.time()) if node not in others]
    if not bad:
        return []
    spare = _can_spare(launch, partition, others)
    return bad if spare is None else bad[:spare]


def _can_spare(launch: Launch, partition: str | None, others: Collection[str]) -> int | None:
    """How many nodes besides these `others` a job can leave and still start; None if Slurm does not say."""
    totals = [int(one["TotalNodes"]) for one in show_partitions(partition) if one.get("TotalNodes", "").isdecimal()]
    needed = int(launch.job_nodes.partition("-")[0])
    return max(0, max(totals) - needed - len(others)) if totals else None


def _answers(node: str) -> bool:
    """Whether a node of this job can start a process."""
    srun = ("srun", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--overlap", "--mem=0")
    return answers([*srun, "true"], PROBE_S)


def _why_left(node: str, blamed: Mapping[str, int]) -> str:
    return f"{node} was blamed" if node in blamed else f"{node} is spare"


def _blamed_how_often(nodes: Sequence[str], records: Sequence[AttemptRecord]) -> str:
    times = times_blamed(records, time.time())
    return ", ".join(f"{node}, blamed for {counted(times[node], 'fault')}" for node in nodes)
