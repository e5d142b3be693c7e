"""Aiming a fault: bring a run to the planned moment, and find out what it is doing."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.faults.checks import Attempt
from tests.faults.plan import Moment
from tests.faults.victim import Missed, NeverCame, Victim

DEADLINE_S = 60.0
END_STEPS = 12  # the end of a run is its last steps, this many
QUICK_POLL_S = 0.002  # a save and a restore last some tens of milliseconds


def aim(victim: Victim, moment: Moment, delay_ms: int) -> None:
    """Wait for the moment and then for the delay; where the moment needs it, requeue the run first.

    The run is training, or, for its start and restore, may not have begun yet. Raises Missed if the moment does not
    occur.
    """
    first = not victim.log.events and moment in (Moment.START, Moment.RESTORE)
    old = set() if first else {rank.attempt for rank in victim.ranks().values()}
    traced, stopped = set(victim.traces()), victim.log.last("stop")
    if moment in (Moment.START, Moment.RESTORE, Moment.STOP, Moment.HOLD) and not first:
        victim.slurm("scontrol", "requeue", victim.job.job_id)
    try:
        if moment is Moment.START:
            victim.wait(lambda: {r.attempt for r in victim.ranks().values()} - old, DEADLINE_S, "no rank started")
        elif moment is Moment.RESTORE:
            victim.wait(lambda: set(victim.traces()) - traced, DEADLINE_S, "no attempt began", QUICK_POLL_S)
        elif moment is Moment.STOP:
            victim.wait(lambda: victim.log.last("stop") is not stopped, DEADLINE_S, "no rank logged a stop")
        elif moment is Moment.END:
            near = victim.total - END_STEPS
            victim.wait(lambda: (e := victim.log.last("step")) and e.number >= near, DEADLINE_S, "no end", QUICK_POLL_S)
        elif moment in (Moment.AGAIN, Moment.RESCUE):
            victim.signal(signal.SIGKILL, victim.rank(victim.setting.world_size - 1).pid)
        elif moment is Moment.HOLD:
            victim.wait(lambda: not victim.ranks() and victim.job.state == "PENDING", DEADLINE_S, "no requeue")
        elif moment is Moment.VALIDATION:
            victim.wait(victim.validates, DEADLINE_S, "no validation")
        elif moment is Moment.SAVE:
            with contextlib.suppress(NeverCame):  # saves may be too fast to be seen: then strike at any moment
                victim.wait(victim.writing, DEADLINE_S / 3, "no save", QUICK_POLL_S)
        else:
            step = victim.log.last("step")
            victim.wait(lambda: victim.log.last("step") is not step, DEADLINE_S, "no step")
    except NeverCame as error:
        raise Missed(str(error)) from None
    time.sleep(delay_ms / 1000)


def whereabouts(victim: Victim) -> tuple[Attempt | None, Moment]:
    """The attempt that is running, if any, and what it is doing."""
    ranks = victim.ranks()
    if not ranks:
        return None, Moment.HOLD
    attempt = max(rank.attempt for rank in ranks.values())
    begun = victim.traces().get(attempt)
    if begun is None:
        return attempt, Moment.START
    if begun <= 0:
        return attempt, Moment.RESTORE
    kinds = [event.kind for event in victim.log.events if event.kind in ("resume", "stop")]
    if kinds[-1:] == ["stop"]:
        return attempt, Moment.STOP
    if victim.writing():
        return attempt, Moment.SAVE
    return attempt, Moment.VALIDATION if victim.validates() else Moment.STEP
