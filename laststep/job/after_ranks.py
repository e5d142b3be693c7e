"""What the batch shell of a job runs after srun has failed: it decides whether the run continues, and how.

    restart   the shell starts the ranks again, in the same allocation
    requeue   Slurm starts the job again, from the queue
    end       the job ends

A rank that can still act records in attempts.jsonl how the attempt ended, and at a stop rank 0 requeues the job. But
all ranks may have been killed, and srun with them, or Slurm did not answer. The batch shell outlives them all.

`python -m laststep.job.after_ranks FOLDER STATUS [LINE]` gets the folder of the run (or of a sweep, of which this
job trains one run) and the exit status of srun, or that of a line of launch.setup and its number. It exits with 0 if
the shell is to start the ranks again, else with STATUS. It asks for a restart only where LASTSTEP_RESTARTS says how
often the shell has done that in this allocation, and not once LASTSTEP_SIGNALLED says that the shell has received a
signal. It asks Slurm only if the answer matters, and does not import torch. A user's own batch script can call it, too:
see examples/srun.sbatch.

Where the disk fails, the job is requeued all the same, as the next start may be on other nodes, unless a record says
that the run has ended, another attempt is at work, or Slurm has ended the job. Perhaps nobody can record that start. So
the job's comment says how many there were in a row: launch.max_failures at most are followed by a requeue. Where Python
itself cannot start, the batch shell does the same (laststep/submission/sbatch.py): it still finds the file that
LASTSTEP_UNDECIDED names, which this program deletes once it has decided.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from submitit.core.utils import DelayedSubmission, JobPaths

from laststep import rooms
from laststep.attempt.predecessor import Predecessor, finish_of
from laststep.attempt.restart import Follows, Verdict, comes_back, insist_on_requeue, judge, what_follows
from laststep.checkpoint.store import COUNT_S, CheckpointStore, newest_step
from laststep.config.checks import nodes_for
from laststep.config.errors import DiskError
from laststep.config.schema import Launch
from laststep.job import nodes
from laststep.ranks import disk
from laststep.ranks.disk import Patience, look_anew
from laststep.ranks.launchers import UNDECIDED, detect_world, restarts_in_place
from laststep.ranks.process import SIGNALLED, STOP_SIGNALS
from laststep.ranks.slurm import (
    BY_CHAIN,
    CHAIN_VARIABLE,
    EXPEDITE,
    REPLACED,
    Job,
    SlurmError,
    ask_patiently,
    forbid_requeue,
    kill_limits,
    node_states,
    note_unrecorded,
    patiently,
    show_job,
)
from laststep.ranks.slurm import command as slurm_command
from laststep.ranks.world import World
from laststep.records import kept_files
from laststep.records.attempt_record import EndedAttempt, read_ended_attempts, record_start
from laststep.records.attempts import (
    begin_attempt,
    belongs_to,
    correct_lost_attempt,
    count_in_steps,
    end_attempt,
    ended_attempts,
    record_abandoned_attempts,
    recorded_step,
)
from laststep.records.retry import FAILURES, Decision, Next, decide, recorded
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.say import command, counted, say
from laststep.trainer import Trainer

# How long to wait for a slurmctld that restarts, or for its backup to take over. The nodes are idle meanwhile.
SLURMCTLD_WAIT_S = 180.0
# The same once it has answered. The batch shell kills this program after 300 s.
REQUEUE_WAIT_S = 130.0
# Exit status of `python -m laststep` where it refuses its configuration. It has said why, and a retry would fail the
# same way. In a job that Laststep submitted it is srun's, which did not find the program.
REFUSED = 2


class AfterRanks:
    """A job whose ranks have ended, as its batch shell sees it. `launch` is None if not even the run's configuration
    can be read on this node; `shares` is the run's train.shares."""

    def __init__(self, run: RunDir, world: World, launch: Launch | None, shares: int | None = None) -> None:
        self._run, self._world, self._shares = run, world, shares
        self._launch, self._is_configured = launch or Launch(), launch is not None
        self._in_chain = CHAIN_VARIABLE in os.environ

    def act(self, status: int, setup_line: int | None = None, restarts: int = 0, can_restart: bool = False) -> bool:
        """Returns whether the shell is to start the ranks again. Else requeues the job if its run should continue and
        nothing else starts the job again. Records a lost attempt. If the disk fails, the job is requeued, see
        `requeue_unrecorded`.

        `status` is that of srun, or of the line of launch.setup with this number, from 1. The shell has started the
        ranks again `restarts` times in this allocation, and says whether it `can_restart` them once more.
        """
        try:
            follows = self._follow_up(status, setup_line, restarts, can_restart)
            if follows in (Follows.REQUEUE, Follows.SLURM_REQUEUES) and not self._in_chain:
                nodes.keep_from_bad_nodes(self._run, self._world.job_id, self._launch)
        except OSError as error:
            self.requeue_unrecorded(error)
            return False
        if follows is Follows.END:  # else the next attempt reads the checkpoints, and corrects the record
            self.end_for_good()
            decided()  # to read them may take longer than this program may
            with suppress(OSError):  # the next attempt corrects it
                correct_lost_attempt(self._run, lambda: _newest_intact_step(self._run))
        return follows is Follows.NEW_STEP

    def _follow_up(self, status: int, setup_line: int | None, restarts: int, can_restart: bool) -> Follows | None:
        """Decide what follows, and record a lost attempt; None if that is another process's to do."""
        run, world = self._run, self._world
        # A rank that survived srun does not begin meanwhile.
        with disk.no_start(run.lock, Predecessor(run, world, disk.LOCK_LOOK_S)) as holder:
            if self._is_anothers(holder):
                say(f"not requeued: another attempt is at work on this run ({holder})")
                self.end_for_good()
                return None
            look_anew(run.path)  # the ranks may have recorded the end, and saved, on other hosts a second ago
            CheckpointStore(run.checkpoints).look_anew()
            # By manifests and sizes: to hash a large checkpoint may take longer than this shell lives.
            self._kept_step = cache(lambda: newest_step(run, say))
            self._log = self._newest_log()
            self._failed_start = self._why_not_started(status, setup_line)
            # With any status, a line of launch.setup has failed.
            self._asked_to_stop = nodes.asked_to_stop(self._log, status if setup_line is None else 0)
            killed = nodes.where_killed(self._log)
            self._ended = ended_attempts(run, self._kept_step, blamed=killed)
            of_allocation = [record for record in self._ended if belongs_to(record, world)]
            # Each start of the ranks has one record: if there are no more records than earlier starts, the last has
            # none.
            earlier = restarts + count_in_steps(run.step_restart, world)
            end = of_allocation[-1] if len(of_allocation) > earlier else None
            # Then only srun was killed, or the node of rank 0 is cut off.
            rank_0_lives = holder is not None and self._is_of_this_start(holder, of_allocation[:earlier])
            if holder and not rank_0_lives:
                earlier_start = f"an earlier start of this job ({holder}), which has ended"
                say(f"{run.lock}: locked by {earlier_start}: that does not count")
            follows = self._continue(end, rank_0_lives, can_restart and not rank_0_lives)
            if rank_0_lives:  # it records the end itself
                return None
            continued_job = None if follows is Follows.END else world.job_id
            try:
                Patience(COUNT_S, say).insist(
                    lambda: record_abandoned_attempts(run, self._kept_step, continued_job, killed)
                )
            except OSError as error:  # what follows is decided; the next attempt records it, if there is one
                say(f"WARNING: how the attempt ended is not recorded: {error}")
        return follows

    def _is_anothers(self, holder: str | None) -> bool:
        """Whether the lock is held by another job."""
        return holder is not None and not disk.signed_by_job(holder, self._world)

    def _is_of_this_start(self, holder: str, earlier: Sequence[EndedAttempt]) -> bool:
        """Whether the holder of the lock is an attempt of this start of the ranks: not one of an earlier start of the
        job, nor one of the `earlier` ones in this allocation. A network file system may keep the lock of a dead node.
        """
        of_earlier = any(holder.startswith(f"{record_start(record)}, on ") for record in earlier)
        return disk.signed_by_start(holder, self._world) and not of_earlier

    # --- where the disk fails

    def requeue_unrecorded(self, error: OSError) -> None:
        """The disk has failed with this error before it was decided what follows: requeue the job, unless that is known
        to be wrong."""
        say(f"WARNING: the disk fails after the ranks have ended: {error}")
        if self._in_chain:
            return say(f"{BY_CHAIN}, unless a record forbids it")
        if why := self._why_not_requeued_unrecorded():
            say(f"not requeued: {why}")
            if self._is_configured:
                self.end_for_good()
        elif not self._is_configured:
            nodes.keep_from_this_node(self._world, replace(self._launch, nodes=self._world.nodes))

    def _why_not_requeued_unrecorded(self) -> str:
        """Requeue the job, or let Slurm do what it has decided; returns why that is wrong, if so."""
        run, world, launch = self._run, self._world, self._launch
        with suppress(OSError):
            ended = read_ended_attempts(run.attempts)
            of_start = [record for record in ended if belongs_to(record, world)]
            if of_start and recorded(ended, launch).what is Next.END:
                return f"the attempt ended ({of_start[-1]['reason']})"
        with suppress(OSError), disk.no_start(run.lock, Predecessor(run, world, 0.0)) as holder:
            if self._is_anothers(holder):
                return f"another attempt is at work on this run ({holder})"
        job = ask_patiently(world.job_id, SLURMCTLD_WAIT_S)
        if job is None:
            return self._no_answer()
        if not judge(signal.SIGTERM, job, world.restart, 0, 0).requeue:
            return ""
        try:
            noted = patiently(lambda: note_unrecorded(world.job_id, world.restart, launch.max_failures), REQUEUE_WAIT_S)
            count = world.restart + 1 if noted is None else noted
            if count > launch.max_failures:
                return (
                    f"nothing could be recorded of {counted(count, 'start')} of this job in a row "
                    f"(launch.max_failures={launch.max_failures}); {self._resume()} tries again"
                )
            say(f"requeueing job {world.job_id}: what the disk refuses on this node, others may show")
            insist_on_requeue(world, REQUEUE_WAIT_S)
        except (SlurmError, OSError) as refusal:
            return str(refusal)
        return ""

    # --- what follows

    def _continue(self, end: EndedAttempt | None, rank_0_lives: bool, can_restart: bool) -> Follows:
        """Returns what follows; requeues the job if that is it, unless Slurm does so in any case. `end` is that of the
        attempt, if it began; one that did not would hardly begin on these nodes."""
        world = self._world
        policy = Decision(Next.REQUEUE) if end is None else recorded(self._ended, self._launch)
        if end is not None and policy.what is Next.END:
            if end["reason"] in FAILURES:
                self._say_not_requeued(end, policy.why)
            elif end["reason"] == "cancelled" and _is_submitted(self._run, world):
                self._end_as_cancelled()
            return Follows.END
        job = ask_patiently(world.job_id, SLURMCTLD_WAIT_S)
        if job is None and self._in_chain:
            say(f"Slurm does not answer on this node; {BY_CHAIN}")
            return Follows.REQUEUE
        if job is None:
            say(f"not requeued: {self._no_answer()}")
            return Follows.END
        if end is None and not rank_0_lives and not comes_back(job, world.restart):
            end, has_lost_nodes = self._record_without_ranks(job)
            # Where no node was lost, the same nodes could hardly start them.
            can_restart = can_restart and has_lost_nodes and self._launch.chooses_nodes
            policy = recorded(self._ended, self._launch)
        follows, why = what_follows(
            policy,
            job,
            world.restart,
            self._launch,
            asker_starts=Follows.NEW_STEP if can_restart and end else None,
            obstacle=lambda: nodes.write_choice(
                self._run, world, self._launch, nodes_for(self._shares, self._launch), job, self._ended
            ),
        )
        reason = end["reason"] if end else "srun"
        if follows is Follows.END and why and end is not None:
            self._say_not_requeued(end, why)
        elif follows is Follows.NEW_STEP:
            say(f"restarting the ranks in job {world.job_id}: the attempt ended ({reason}), the run continues")
        elif follows is Follows.REQUEUE:
            if why:
                say(f"no restart in this allocation: {why}")
            if self._in_chain:
                say(f"the attempt ended ({reason}); {BY_CHAIN}")
                return follows
            say(f"requeueing job {world.job_id}: the attempt ended ({reason}), the run continues")
            try:
                insist_on_requeue(world, REQUEUE_WAIT_S)
            except SlurmError as error:
                say(f"not requeued: {error}; {self._resume()} continues the run")
                return Follows.END
        return follows

    def _record_without_ranks(self, job: Job) -> tuple[EndedAttempt, bool]:
        """Record an attempt that ended before it began: a node could not start it, or Python was killed while it
        started, or it was cancelled. Returns the record, and whether srun has named nodes that are lost."""
        run, world, launch = self._run, self._world, self._launch
        asked, lost = self._asked_to_stop, list[str]()
        now = time.time() + (kill_limits().clock_ahead_s if asked else 0.0)
        cause = judge(asked or signal.SIGTERM, job, world.restart, launch.signal_delay_s, now)
        error, step = cause.error, self._kept_step()
        if cause.reason == "failed":
            # Slurm has not ended it, so it counts as a failure: else a job that cannot start would be requeued forever.
            error, lost = self._failed_start, nodes.lost_nodes(self._log)
        begin_attempt(run, world, step)
        end = end_attempt(run, world, launch, cause.reason, step, step, error=error, blamed=lost)
        assert end is not None, "no rank of the run lives that could have recorded it first"
        self._ended = [*self._ended, end]
        return end, bool(lost)

    def _resume(self, options: str = "") -> str:
        """The command that continues the run, quoted."""
        return f"`{command(f'resume {shlex.quote(str(self._run.path))}{options}')}`"

    def _no_answer(self) -> str:
        return f"Slurm does not answer on this node; where it does, {self._resume(' --watch')} continues the run"

    def _say_not_requeued(self, end: EndedAttempt, why: str) -> None:
        say(f"not requeued: the attempt ended ({end['reason']}): {why}; {self._resume()} tries again")

    def end_for_good(self) -> None:
        """The job fails, and is to end. Else Slurm would requeue one with an expedited requeue, and hold it."""
        if self._launch.slurm.get("requeue") == EXPEDITE:
            job_id = self._world.job_id
            try:
                forbid_requeue(job_id)
            except SlurmError as error:
                say(f"Slurm will hold this job in the queue, where `scancel {job_id}` ends it: {error}")

    def _end_as_cancelled(self) -> None:
        """Have Slurm record the job of a cancelled run as CANCELLED. By its exit status it would be FAILED."""
        try:
            if (show_job(self._world.job_id) or {}).get("JobState") != REPLACED:
                slurm_command("scancel", self._world.job_id)
        except SlurmError as error:
            say(f"Slurm records this job as failed, although the run was cancelled: {error}")

    # --- the job's log

    def _why_not_started(self, status: int, setup_line: int | None) -> str:
        """Why no attempt began, if none did: a line of launch.setup, launch.python, or what the log ends with."""
        launch = self._launch
        setup = "\n".join(launch.setup).splitlines()
        if setup_line is not None and setup_line <= len(setup):
            return f"line {setup_line} of launch.setup exited with {status}: {setup[setup_line - 1].strip()}"
        program = shlex.split(launch.python)[0] if launch.python else sys.executable
        if shutil.which(program) is None:
            return f"launch.python: {program} not found on {self._world.hosts[0]}"
        # The last line of this start in the log; one of srun only if there is no other.
        lines = [line.strip() for line in self._log.splitlines() if line.strip()]
        words = [line for line in lines if not line.startswith("srun:")] or lines
        last = f": {words[-1][:300]}" if words else ""
        return f"srun exited with {status} before the attempt began{last}"

    def _newest_log(self) -> str:
        """The end of the job's log, below the last line of a rank or of this program."""
        log = self._run.logs / f"{self._world.job_id}_0_log.out"
        text = log.read_text(errors="replace")[-10_000:] if log.exists() else ""
        ours = max(text.rfind(mark) for mark in ("[laststep ", "submitit "))
        return text[ours:].partition("\n")[2] if ours >= 0 else text


def decided() -> None:
    """It is decided what follows: the batch shell need not do anything even if this program is killed."""
    if path := os.environ.get(UNDECIDED):
        with suppress(OSError):
            os.unlink(path)


def starts_again_here(run: RunDir, world: World, launch: Launch) -> bool:
    """Whether the ranks start again in their step, without the batch shell: their supervisors ask this once all ranks
    are gone. Under `--local` their command has no allocation to ask about."""
    local = not world.on_slurm
    ended = read_ended_attempts(run.attempts)
    if not ended or not belongs_to(ended[-1], world) or decide(ended, launch, local=local).what is not Next.RESTART:
        return False
    if local:
        say("restarting the ranks after a fault; press Ctrl-C to stop")
        return True
    job = show_job(world.job_id)
    hosts = ",".join(dict.fromkeys(world.hosts))
    if job is None or what_follows(
        Decision(Next.RESTART),
        job,
        world.restart,
        launch,
        asker_starts=Follows.RESTART_IN_STEP,
        obstacle=lambda: ", ".join(nodes.unfit_nodes(node_states(hosts)).values()),  # the batch shell says why
    ) != Verdict(Follows.RESTART_IN_STEP):
        return False
    say(f"restarting the ranks in job {world.job_id}: the attempt ended ({ended[-1]['reason']}), the run continues")
    return True


def _newest_intact_step(run: RunDir) -> int:
    """The step that the next attempt begins at. Reads whole checkpoints, which may take minutes. What the records say
    is saved, if the disk does not show them."""
    if (steps := kept_files.kept(run)) is not None:
        return steps
    try:
        newest = CheckpointStore(run.checkpoints).newest(warn=say)
    except DiskError as error:
        say(f"WARNING: {error}")
        return recorded_step(run)
    return newest.step if newest else 0


def _is_submitted(run: RunDir, world: World) -> bool:
    """Whether Laststep submitted this job; else the batch script is the user's."""
    return JobPaths(run.logs, world.job_id).submitted_pickle.exists()


def trainer_of_job(run: RunDir, world: World) -> Trainer:
    """What this job runs: submitit's file has it, with options given to this job only; else the run as configured."""
    pickle = JobPaths(run.logs, world.job_id).submitted_pickle
    run_folders.check_trusted(run, [run.config, run.submissions, run.logs, pickle])
    if _is_submitted(run, world):
        trainer = DelayedSubmission.load(pickle).function
        assert isinstance(trainer, Trainer)
        return trainer
    return Trainer(run_config.load(run, warn=say))


def main(folder: str, status: int, setup_line: int | None = None) -> int:
    """Act for the run that this job trains; returns 0 for a restart, else `status`, with which the job ends."""
    for number in STOP_SIGNALS:  # the requeue itself sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # for any launcher: look at the job as its batch shell does
    run, world, launch = RunDir(folder), None, None
    try:
        world = replace(detect_world(), step_id=None)  # of the job, even where this shell is a step of it
        if _is_deleted(run):
            return status
        is_submitted = _is_submitted(run, world)
        if status == REFUSED and not is_submitted:
            return status
        trainer = trainer_of_job(run, world)
        run, launch = trainer.run, trainer.config.launch
        if finish_of(run, trainer.config):
            AfterRanks(run, world, launch).end_for_good()
            return status
        restarts = restarts_in_place(os.environ)
        can_restart = restarts is not None and SIGNALLED not in os.environ
        if not is_submitted:
            launch = replace(launch, nodes=world.nodes, spare_nodes=0)  # the user's own script starts the ranks
        job = AfterRanks(run, world, launch, trainer.config.train.shares)
        if job.act(status, setup_line, restarts or 0, can_restart):
            return 0
    except OSError as error:
        assert world is not None, "the environment is not on a disk"
        AfterRanks(run, world, launch).requeue_unrecorded(error)
    except Exception as error:  # one line in the log must say so
        say(f"not requeued: {type(error).__name__}: {error}")
    finally:
        decided()
    with suppress(OSError):
        rooms.look_on(run)
    return status


def _is_deleted(run: RunDir) -> bool:
    """Whether the user has deleted the run. Raises OSError if the disk does not show it, or is not mounted here."""
    try:
        run.path.stat()
    except FileNotFoundError:
        run.path.parent.stat()
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
