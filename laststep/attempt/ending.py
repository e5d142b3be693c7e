"""What the orderly end and the end by fault have in common: the record in attempts.jsonl, the requeue, the hint."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Literal

from laststep.attempt.signal_cause import Ending, ending
from laststep.attempt.state import AttemptState
from laststep.observe.progress import likely_cause
from laststep.ranks.launchers import BATCH_HOST
from laststep.ranks.patience import Patience
from laststep.ranks.slurm import SlurmError, requeue_job
from laststep.ranks.watchdog import Retry
from laststep.ranks.world import hostname
from laststep.records.attempt_record import AttemptRecord, read_ended_attempts
from laststep.records.attempts import end_attempt
from laststep.records.retry import why_not_requeued
from laststep.say import counted, say

EndReason = Literal["finished", "failed", "hung", "preempted", "cancelled", "timeout"]
SHELL_S = 15.0  # within which a batch shell that lives has killed srun, and so all ranks
# How long a rank tries to record the end on a disk that refuses. The orderly end takes 60 s at most, and in a rescue
# another rank may try.
INSIST_S = 20.0
CONTINUE_BY_HAND = "start the run again under the same name to continue"


def record_end(
    state: AttemptState,
    reason: EndReason,
    end_step: int,
    saved_step: int,
    lost_s: float | None = None,
    error: str | None = None,
    retry: Retry = "yes",
    blamed: Sequence[str] = (),
) -> AttemptRecord | None:
    """Record how this attempt ended, see `end_attempt`; None if another rank was first.

    A run that its user has cancelled is recorded as cancelled, whatever befell it while it stopped: it must not start
    again.
    """
    if reason != "finished" and state.cause_signal == signal.SIGINT:
        reason = "cancelled"
    step_s, save_s = (state.loop.progress.step_s(), state.loop.saves.stalled_s) if state.loop else (None, None)
    return end_attempt(
        state.run_dir,
        state.world,
        state.config.launch,
        reason,
        end_step,
        saved_step,
        lost_s=lost_s,
        step_s=step_s,
        save_s=save_s,
        error=error,
        retry=retry,
        blamed=blamed,
        patience=Patience(INSIST_S, say),
    )


def ending_by_signal(state: AttemptState) -> Ending:
    """Why the signal came that stops this attempt, and whether we must requeue the job. Asks Slurm."""
    assert state.cause_signal is not None
    return ending(state.cause_signal, state.world, state.config.launch.signal_delay_s)


def requeue(state: AttemptState, record: AttemptRecord | None, handler: Callable[[], None] | None = None) -> None:
    """Requeue the job whose attempt ended as recorded. `handler` is submitit's own way to requeue, where there is one.

    Raises SystemExit from within `handler`.
    """
    lost = record["lost_steps"] if record is not None else 0
    by_hand = f"{counted(lost, 'step')} lost" if lost else "every step is saved"
    by_hand = f"{by_hand}, {CONTINUE_BY_HAND}"
    try:
        if handler is not None:
            handler()  # calls Trainer.checkpoint and scontrol requeue, then raises SystemExit
        elif state.world.on_slurm and record is not None:
            if not record["requeue"]:
                why = why_not_requeued(read_ended_attempts(state.run_dir.attempts), state.config.launch)
                return say(f"not requeued: {why}; {by_hand}")
            requeue_job(state.world.job_id)
            say(f"requeued job {state.world.job_id}")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{error}; the batch shell tries again")
    except SlurmError as error:
        say(f"not requeued: {error}; {by_hand}")


def end_srun(state: AttemptState) -> bool:
    """After a fault of a node, in a job that chooses its nodes: ask the batch shell to end srun, which would wait for
    the ranks of a dead node. Returns whether it was asked."""
    if BATCH_HOST not in os.environ:
        return False
    try:
        state.run_dir.step_over(state.world.job_id).touch()
    except OSError as error:
        say(f"srun may wait for a dead node: {error}")
        return False
    return True


def shell_is_gone(blamed: Sequence[str]) -> bool:
    """Whether this process outlives `end_srun`: then the batch shell has died with its node. Slurm would not act,
    since a job that chooses its nodes outlives each of them."""
    host = os.environ[BATCH_HOST]
    if host not in blamed or host == hostname():
        return False
    time.sleep(SHELL_S)
    say(f"the batch shell on {host} has not ended this step within {SHELL_S:.0f} s: its node seems to be dead")
    return True


def print_hint(state: AttemptState, error: str) -> None:
    """Print the most likely cause of an error and what to try, if anything is known about it."""
    buffer_bytes = state.loop.saves.buffer_bytes if state.loop else 0
    if hint := likely_cause(error, state.config, state.world, buffer_bytes):
        say(hint)
