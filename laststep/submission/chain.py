"""What a job of a chain (launch.chain) sees to: that others follow while the run goes on, and none once it has ended.

`python -m laststep.submission.chain FOLDER begins` is the first that the batch shell of such a job runs, `... ends` the
last. FOLDER is the folder of the run, or of a sweep, of which this job trains one run. The exit status of `begins` is 3
where nothing is left to do: the job leaves before it imports torch.

Each job of a chain waits for the one before to end, in whichever way. So the end of a job needs nobody who acts: not a
rank, nor a shell, nor `scontrol requeue`, which some sites forbid. What the ranks and the shell decide about the end of
an attempt stays as it is (laststep/attempt/restart.py); where it is a requeue, they leave it to the next job.
"""

from __future__ import annotations

import os
import sys

from laststep.config.config import Config
from laststep.job.after_ranks import trainer_of_job
from laststep.job.nodes import keep_from_bad_nodes
from laststep.ranks.disk import look_anew
from laststep.ranks.launchers import detect_world
from laststep.ranks.slurm import CHAIN_VARIABLE, SlurmError, command
from laststep.records.attempt_record import read_attempts
from laststep.records.plan import read_plan
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs.queue import Queue
from laststep.say import command as our_command
from laststep.say import counted, say
from laststep.submission.sbatch import NOTHING_TO_DO, Link
from laststep.submission.submission import ReadyRun, lengthen
from laststep.trainer import Trainer


def begins(folder: RunDir) -> bool:
    """Whether this job has anything to do. If so, it gets as many successors as launch.chain says."""
    job_id, trainer = _this_job(folder)
    run, chain = trainer.run, os.environ[CHAIN_VARIABLE]
    if why := _why_over(run, chain):
        say(f"the run has ended ({why}), so this job of its chain leaves")
        _cancel(_waiting(run, chain, job_id))
        return False
    if _deepened(folder, run, trainer.config, chain, job_id) is None:
        say("Slurm does not answer: the chain is as long as it was")
    return True


def _deepened(folder: RunDir, run: RunDir, config: Config, chain: str, job_id: str) -> list[str] | None:
    """Submit what the chain lacks behind its last job, and keep those that wait from the nodes that the run leaves by
    now. Returns the jobs that wait, without those that it submits; None if Slurm does not answer."""
    known = len(read_submissions(run.submissions))  # first: whatever another process submits from now on is noticed
    waiting = _waiting(run, chain, job_id)
    if waiting is None:
        return None
    for other in waiting:
        keep_from_bad_nodes(run, other, config.launch)
    missing = config.launch.chain - 1 - len(waiting)
    if missing > 0:
        link = Link(chain, after=waiting[-1] if waiting else job_id)
        if lengthen(folder, config, ReadyRun(run, config, known), link, missing) < missing:
            waiting = _waiting(run, chain, job_id)
            if waiting is not None:
                say(f"{counted(len(waiting), 'job')} of the chain left{_are_enough(run, config, chain, len(waiting))}")
    return waiting


def _are_enough(run: RunDir, config: Config, chain: str, jobs: int) -> str:
    """Whether this many further jobs are enough for the whole run, by the steps that its jobs have done; empty before
    any has."""
    plan, ended = read_plan(run.plan), [record for record in read_attempts(run.attempts) if record["reason"]]
    if plan is None or not ended:
        return ""
    left = plan["total_steps"] - (ended[-1]["end_step"] - ended[-1]["lost_steps"])
    kept = [record["end_step"] - record["lost_steps"] - record["start_step"] for record in ended]
    limited = [
        steps for record, steps in zip(ended, kept) if record["reason"] == "timeout" and record["chain"] == chain
    ]
    each = max(limited, default=0)
    if not each:  # none has had its whole time yet
        launch, step_s = config.launch, ended[-1]["step_s"]
        each = int((60 * launch.time_min - launch.signal_delay_s) / step_s) if step_s else 0
    if each <= 0:
        return ""
    needed = -(-left // each)
    fix = "" if needed <= jobs else f"; `{our_command(f'resume {run.typed}')}` continues the run after them"
    return f", {needed} needed for the {left:,} steps left at {each:,} a job{fix}"


def ends(folder: RunDir) -> None:
    """This job ends: what is left of its chain is cancelled if the run has ended, too."""
    job_id, trainer = _this_job(folder)
    run, chain = trainer.run, os.environ[CHAIN_VARIABLE]
    if _why_over(run, chain):
        return _cancel(_waiting(run, chain, job_id))
    waiting = _deepened(folder, run, trainer.config, chain, job_id)  # there may be room now that there was not before
    if waiting is not None and not waiting:
        waiting = _waiting(run, chain, job_id)  # what was submitted just now
    if waiting:
        say(f"job {waiting[0]} of the chain continues the run")
    elif waiting is not None:
        resume = our_command(f"resume {run.typed}")
        say(f"no job of the chain is left (launch.chain={trainer.config.launch.chain}); `{resume}` continues the run")


def _this_job(folder: RunDir) -> tuple[str, Trainer]:
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"
    world = detect_world()
    return world.job_id, trainer_of_job(folder, world)


def _why_over(run: RunDir, chain: str) -> str:
    """The reason for which the last attempt has ended, if nothing follows it; else empty."""
    look_anew(run.path)  # the job before may have ended on another host, a second ago
    if run.attempt_now.exists() or run.attempt_ended.exists():
        return ""
    last = next(reversed(read_attempts(run.attempts)), None)
    if last is None or not last["reason"] or last["requeue"] or last["chain"] != chain:
        return ""
    return last["reason"]


def _waiting(run: RunDir, chain: str, job_id: str) -> list[str] | None:
    """The jobs of the chain that wait in the queue, in their order; None if Slurm does not answer."""
    jobs = Queue.ask([run]).jobs
    if jobs is None:
        return None
    of_chain = [line for line in read_submissions(run.submissions) if line.get("chain") == chain]
    found = [line["job_id"] for line in of_chain if (job := jobs.get(line["job_id"])) and job.tag == line.get("tag")]
    return [other for other in found if other != job_id and jobs[other].state == "PENDING"]


def _cancel(jobs: list[str] | None) -> None:
    """Cancel the rest of the chain. Where that fails, each finds as it begins that it has nothing to do."""
    if not jobs:
        return
    try:
        command("scancel", *jobs)
    except SlurmError as error:
        return say(f"{counted(len(jobs), 'job')} of the chain not cancelled: {error}")
    say(f"cancelled the rest of the chain: {', '.join(jobs)}")


if __name__ == "__main__":
    if sys.argv[2] == "begins":
        sys.exit(0 if begins(RunDir(sys.argv[1])) else NOTHING_TO_DO)
    ends(RunDir(sys.argv[1]))
