"""The retry policy: whether a run continues by itself after an attempt has ended. It is decided here and nowhere else.

    reason of the end                   counts against         continues
    finished, cancelled                 nothing                no
    preempted                           nothing                yes
    timeout                             launch.max_timeouts    while the budget lasts
        it did steps, and kept none     launch.max_failures    while that budget lasts, too
    failed, hung, lost:
        an error that would repeat      nothing                no
        the same error again            nothing                no
        an error before the first step  launch.max_failures    while the budget lasts, if the run has trained before
        the attempt kept a new step     nothing                yes: the run makes progress
        it kept no new step             launch.max_failures    while the budget lasts

After a failed, hung or lost attempt the run continues by a restart: the ranks start again in the same allocation,
without a place in the queue. Four budgets limit what repeats:

    key                    what it counts                                   within              once it is used up
    launch.max_restarts    restarts in a row that kept no new step          one allocation      the job is requeued
    launch.max_failures    allocations that ended without a new step kept   one job             the run ends
    launch.max_timeouts    attempts that ended at the time limit            one job             the run ends
    launch.exclude_after   attempts that blame the node                     one node, one day   the run leaves the node

So the first is spent before the second: however often the ranks fail in one allocation without a new step, that counts
as one failure. A step that is kept starts max_restarts anew; max_failures and max_timeouts are per job, or chain of
jobs (launch.chain), so `launch.py resume`, which submits a new one, starts with full ones. exclude_after ends nothing:
it chooses nodes
(laststep/job/nodes.py). Whether the allocation can be kept at all, laststep/attempt/restart.py asks Slurm. Under
--local there is no queue: what is not restarted ends. There an error of the user's code is not retried either, as the
user is there to read it.

An attempt that reaches its time limit with steps, and keeps none of them, has a last save that does not fit into
launch.signal_delay_s. The next attempt would lose its steps too, so it counts as a failure.

The same error again: an exception at the same line of the user's code and the same step as in an earlier attempt of the
job is a bug, and costs no third attempt. What a node, the network, the disk or CUDA may do once more is not: see
`error_place`.

An error before the first step (a wrong configuration, no GPU, data that cannot be read) would repeat if the run has
never trained as it is configured now. Once it has, a node is to blame: it lacks a GPU or a mount. `launch.py resume`
may change the configuration: then it has to prove itself again. Where the system had no process, thread or memory at
that moment, or the disk or the network failed, that is known to pass.

Whether the run continues is written down as `requeue` in the record of the attempt, where the ranks, the batch shell
and `launch.py status` read it.
"""

from __future__ import annotations

import builtins
import enum
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from laststep.config.schema import Launch
from laststep.ranks.fault import Retry
from laststep.records.attempt_record import AttemptRecord, EndedAttempt, reason_in, users_line_in
from laststep.records.submissions import SubmissionRecord

FAILURES = ("failed", "hung", "lost")
SAME_FAILURE = "a retry would fail the same way"


class Next(enum.Enum):
    """What follows the end of an attempt."""

    RESTART = "restart"  # the ranks start again in the same allocation
    REQUEUE = "requeue"  # the job goes back to the queue
    END = "end"  # the run does not continue by itself


class Decision(NamedTuple):
    """What follows, and if that is the end, `why`, in plain words."""

    what: Next
    why: str = ""


def decide(
    ended: Sequence[EndedAttempt],
    launch: Launch,
    retry: Retry = "yes",
    submissions: Sequence[SubmissionRecord] = (),
    local: bool = False,
) -> Decision:
    """What follows the last of the `ended` attempts, whose error allows this `retry`."""
    last = ended[-1]
    if local and not (last["reason"] in ("hung", "lost") or last["blamed"]):
        return Decision(Next.END, "under --local an error of the run itself is not retried")
    of_job = [record for record in ended if record["job_id"] == last["job_id"] or in_one_chain(record, last)]
    if last["reason"] == "preempted":
        return Decision(Next.REQUEUE)
    if last["reason"] == "timeout":
        timeouts = sum(record["reason"] == "timeout" for record in of_job)
        if _kept_nothing(last) and _idle_allocations(of_job) > launch.max_failures:
            why = f"the last save does not fit into launch.signal_delay_s={launch.signal_delay_s}, and no step is kept"
            return Decision(Next.END, f"{why} (launch.max_failures={launch.max_failures}): raise it")
        return _within_budget(timeouts, "max_timeouts", launch.max_timeouts)
    if last["reason"] in FAILURES:
        at_start = retry == "if_trained" and not _PASSES_AT_START.search(last.get("error") or "")
        if retry == "no" or (at_start and not has_trained(ended, submissions)):
            return Decision(Next.END, SAME_FAILURE)
        if place := _error_again(of_job):
            return Decision(Next.END, f"the same error a second time, after step {last['end_step']}: {place}")
        if not _made_progress(last):
            idle = _idle_allocations(of_job)
            if (decision := _within_budget(idle, "max_failures", launch.max_failures)).what is Next.END:
                return decision
        allocation = [record for record in of_job if _allocation(record) == _allocation(last)]
        if _restarts_in_a_row(allocation) < launch.max_restarts:
            return Decision(Next.RESTART)
        if local:
            return Decision(Next.END, f"retry budget used up (launch.max_restarts={launch.max_restarts})")
        return Decision(Next.REQUEUE)
    return Decision(Next.END, f"the run is {last['reason']}")


def recorded(ended: Sequence[EndedAttempt], launch: Launch) -> Decision:
    """What was decided when the last of the `ended` attempts ended, by its record. For a lost attempt there was no rank
    left to decide."""
    decision = decide(ended, launch)
    if ended[-1]["reason"] == "lost" and not ended[-1]["requeue"]:
        return decision
    if not ended[-1]["requeue"]:
        # Only `retry` is not recorded: where the rest of the policy allows a retry, that one forbade it.
        return Decision(Next.END, decision.why or SAME_FAILURE)
    return Decision(Next.REQUEUE) if decision.what is Next.END else decision


def least_hopeful(answers: Iterable[Retry]) -> Retry:
    """The answer for an attempt that several errors ended."""
    return min(answers, key=("no", "if_trained", "yes").index)


def has_trained(ended: Sequence[EndedAttempt], submissions: Sequence[SubmissionRecord]) -> bool:
    """Whether an attempt has done a step as the run is configured now: in the job of the last one, or in a job that was
    submitted with the same configuration."""
    configs = {line["job_id"]: line.get("config") for line in submissions}
    job = ended[-1]["job_id"]
    same = {other for other, config in configs.items() if config is not None and config == configs.get(job)}
    return any(record["end_step"] > record["start_step"] and record["job_id"] in {job, *same} for record in ended)


# What a system that is short of something says for a moment.
_PASSES_AT_START = re.compile(
    r"can't start new thread|Resource temporarily unavailable|Cannot allocate memory|Input/output error"
    r"|Stale file handle|Connection (reset|refused|timed out)|No route to host"
)
# Errors that a node, the network, the disk or CUDA may cause, by the class of the exception and by its text.
_PASSING_TYPES = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)}
_PASSING_TYPES |= {"MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError", "DistBackendError"}
_PASSING_TEXT = re.compile(r"\b(CUDA|cuda|cuDNN|CUBLAS|NCCL|nccl|[Gg]loo)\b|can't start new thread|DataLoader worker")


def error_place(error: str | None) -> str:
    """Where the user's code has failed, as `KeyError at own.py, line 12`; empty for what is no traceback, or for an
    error that may pass: of a node, the network, the disk or CUDA."""
    text = (error or "").rstrip()
    last = reason_in(text)
    name = last.partition(":")[0].rpartition(".")[2]
    place = users_line_in(text).rpartition(", in ")[0]
    if not place or not name or name in _PASSING_TYPES or _PASSING_TEXT.search(last):
        return ""
    return f"{name} at {place}"


def _error_again(of_job: Sequence[EndedAttempt]) -> str:
    """The place of the last attempt's error if an earlier one of the job has failed there too, after the same step."""
    last = of_job[-1]
    place = error_place(last.get("error"))
    before = (record for record in of_job[:-1] if record["reason"] == "failed")
    again = any(
        record["end_step"] == last["end_step"] and error_place(record.get("error")) == place for record in before
    )
    return place if place and again else ""


def _idle_allocations(of_job: Iterable[EndedAttempt]) -> int:
    """In how many allocations of a job an attempt has failed without keeping a new step."""
    failed = (record for record in of_job if record["reason"] in FAILURES or _kept_nothing(record))
    return len({_allocation(record) for record in failed if not _made_progress(record)})


def _allocation(record: AttemptRecord) -> tuple[str, int]:
    """Which allocation the attempt had."""
    return record["job_id"], record["restart"]


def in_one_chain(record: AttemptRecord, other: AttemptRecord) -> bool:
    """Whether the jobs of two attempts follow each other in one chain, see launch.chain."""
    return record["chain"] is not None and record["chain"] == other["chain"]


def _kept_nothing(record: EndedAttempt) -> bool:
    """Whether the attempt ended at its time limit, did steps, and kept none of them."""
    return record["reason"] == "timeout" and record["end_step"] > record["start_step"] and not _made_progress(record)


def _within_budget(used: int, name: str, budget: int) -> Decision:
    if used <= budget:
        return Decision(Next.REQUEUE)
    return Decision(Next.END, f"retry budget used up (launch.{name}={budget})")


def _restarts_in_a_row(allocation: Sequence[EndedAttempt]) -> int:
    """How often the ranks were started again in this allocation since an attempt in it made progress."""
    restarted = reversed(allocation[1:])
    return sum(1 for _ in itertools.takewhile(lambda record: not _made_progress(record), restarted))


def _made_progress(record: EndedAttempt) -> bool:
    """Whether the attempt kept a later step than it began at."""
    return record["end_step"] - record["lost_steps"] > record["start_step"]


EXPIRES_S = 86_400.0  # a node may have been repaired since


def times_blamed(records: Iterable[AttemptRecord], now: float) -> Counter[str]:
    """How many attempts of the last day have blamed each node, by its name."""
    recent = (record for record in records if record["end"] and record["end"] > now - EXPIRES_S)
    return Counter(host for record in recent for host in dict.fromkeys(record["blamed"]))


def excluded_nodes(records: Iterable[AttemptRecord], exclude_after: int | None, now: float) -> list[str]:
    """The nodes that were blamed that often, the most often blamed first."""
    if exclude_after is None:
        return []
    return [host for host, times in times_blamed(records, now).most_common() if times >= exclude_after]
