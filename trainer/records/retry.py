"""The retry policy: whether a run continues by itself after an attempt has ended. It is decided here and nowhere else.

    reason of the end                   counts against         requeued
    finished, cancelled                 nothing                no
    preempted                           nothing                yes
    timeout                             launch.max_timeouts    while the budget lasts
    failed, hung, lost:
        an error that would repeat      nothing                no
        an error before the first step  launch.max_failures    while the budget lasts, if the run has trained before
        the attempt kept a new step     nothing                yes: the run makes progress
        it kept no new step             launch.max_failures    while the budget lasts

An error before the first step (a wrong configuration, no GPU, data that cannot be read) would repeat if the run has
never trained as it is configured now. Once it has, a node is to blame: it lacks a GPU or a mount. `launch.py resume`
may change the configuration: then it has to prove itself again.

Budgets are per job, so `launch.py resume`, which submits a new job, starts with full ones. The answer is written down
as `requeue` in the record of the attempt, where the ranks, the batch shell and `launch.py status` read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.config.schema import Launch
from trainer.records.attempt_record import EndedAttempt
from trainer.records.submissions import SubmissionRecord
from trainer.world.watchdog import Retry

FAILURES = ("failed", "hung", "lost")
SAME_FAILURE = "a retry would fail the same way"


class Decision(NamedTuple):
    """Whether the run continues by itself, and if not, `why` not, in plain words."""

    requeue: bool
    why: str = ""


def decide(
    ended: Sequence[EndedAttempt],
    launch: Launch,
    retry: Retry = "yes",
    submissions: Sequence[SubmissionRecord] = (),
) -> Decision:
    """Whether the run continues by itself after the last of the `ended` attempts, whose error allows this `retry`."""
    last = ended[-1]
    of_job = [record for record in ended if record["job_id"] == last["job_id"]]
    if last["reason"] == "preempted":
        return Decision(True)
    if last["reason"] == "timeout":
        timeouts = sum(record["reason"] == "timeout" for record in of_job)
        return _within_budget(timeouts, "max_timeouts", launch.max_timeouts)
    if last["reason"] in FAILURES:
        if retry == "no" or (retry == "if_trained" and not has_trained(ended, submissions)):
            return Decision(False, SAME_FAILURE)
        if _made_progress(last):
            return Decision(True)
        without_progress = sum(record["reason"] in FAILURES and not _made_progress(record) for record in of_job)
        return _within_budget(without_progress, "max_failures", launch.max_failures)
    return Decision(False, f"the run is {last['reason']}")


def why_not_requeued(ended: Sequence[EndedAttempt], launch: Launch) -> str:
    """Why the last of the `ended` attempts, whose record has `requeue` false, is not requeued."""
    # Only `retry` is not recorded: where the rest of the policy allows a retry, that one forbade it.
    return decide(ended, launch).why or SAME_FAILURE


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


def _within_budget(used: int, name: str, budget: int) -> Decision:
    return Decision(True) if used <= budget else Decision(False, f"retry budget used up (launch.{name}={budget})")


def _made_progress(record: EndedAttempt) -> bool:
    """Whether the attempt kept a later step than it began at."""
    return record["end_step"] - record["lost_steps"] > record["start_step"]
