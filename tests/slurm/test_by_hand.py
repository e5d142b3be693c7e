"""A user's own scripts: a run that changes launchers, torchrun's restarts, and which jobs are requeued."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint.store import CheckpointStore
from tests.slurm.desk import Desk
from tests.slurm.launchers import ONE_CPU, SMALL, undisturbed
from tests.slurm.processes import parent, processes
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint

LAUNCH = ("python", "{project}/launch.py")
TRAIN = ("python", "-m", "laststep", "--name={run}")
SRUN = ("sbatch", *ONE_CPU, "--job-name={run}", "{examples}/srun.sbatch")
TORCHRUN = ("bash", "{examples}/torchrun.sh", "--name={run}")
HELD = (*SMALL, "task=tests.support.tasks.AwaitsStop")
TWO_EPOCHS = (*HELD, "train.epochs=2")  # held once
KILLED = (*SMALL, "task=tests.support.tasks.KilledOnce", "train.epochs=2")


def finishes(desk: Desk, run: str, attempts: int, epochs: int = 2) -> list[dict[str, Any]]:
    """Check that the run ends like an undisturbed one, after this many attempts; returns their records."""
    desk.waits_for_attempts(run, attempts)
    assert desk.attempts(run)[-1]["reason"] == "finished"
    assert fingerprint(desk.run(run)) == undisturbed(2, epochs)
    return desk.attempts(run)


def test_one_run_under_three_launchers(plain_desk: Desk) -> None:
    """A run can continue under another launcher than it was begun with."""
    words = (*HELD, "train.epochs=3")
    plain_desk.types("three", TORCHRUN, words=words)
    plain_desk.waits_for("three", "holds in its step 8", times=2)
    plain_desk.stops("three", "TERM")
    plain_desk.waits_for_terminals()
    plain_desk.types("three", (*LAUNCH, "resume", "{run}", "--nodes=2"))
    plain_desk.waits_for("three", "holds in its step 8", times=4)
    plain_desk.types("three", (*LAUNCH, "cancel", "{run}"))
    plain_desk.waits_for_terminals()
    plain_desk.types("three", ("srun", "--nodes=2", "--ntasks-per-node=1", *TRAIN), words=words)
    ends = finishes(plain_desk, "three", attempts=3, epochs=3)
    assert [(end["start_step"], end["lost_steps"]) for end in ends] == [(0, 0), (8, 0), (16, 0)]
    for launcher in ("torchrun", "submitit-slurm", "srun"):
        assert plain_desk.log("three").count(f"; {launcher}") == 2, "two ranks by each"


def test_torchrun_starts_a_killed_rank_again(plain_desk: Desk) -> None:
    """torchrun ends all ranks when one dies, and restarts them. The rank that survived has saved the step first."""
    plain_desk.types("elastic", TORCHRUN, words=KILLED)
    first, second = finishes(plain_desk, "elastic", attempts=2)
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("failed", 4, 0)
    assert (first["job_id"], first["restart"], second["restart"]) == (second["job_id"], 0, 1)
    assert plain_desk.waits_for_terminals() == [0]


def test_torchrun_starts_again_within_a_job(desk: Desk) -> None:
    """When torchrun restarts the ranks, the job must not be requeued too: that would end the new ranks."""
    script = " ".join(("torchrun --standalone --nproc-per-node=2 --max-restarts=1 -m laststep --name={run}", *KILLED))
    desk.types("within", ("sbatch", "--output={run}.out", "--wrap", script))
    first, second = finishes(desk, "within", attempts=2)
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("failed", 4, 0)
    assert (first["job_id"], second["restart"]) == (second["job_id"], 0), "Slurm has not started it again"


def test_every_rank_and_srun_are_killed(plain_desk: Desk) -> None:
    """Only the batch shell is left: the end of the script requeues the job."""
    plain_desk.types("killed", SRUN, words=(*TWO_EPOCHS, "launch.max_restarts=0"))
    plain_desk.waits_for("killed", "holds in its step 8", times=2)
    saved = CheckpointStore(plain_desk.run("killed").checkpoints).steps
    plain_desk.cluster.wait_for(lambda: 7 in saved(), DEADLINE_S, "the epoch's end is not saved")
    job = plain_desk.job("killed")
    found = {pid: command for pid, command, environ in processes() if environ.get("SLURM_JOB_ID") == job}
    sruns = [pid for pid, command in found.items() if command[0] == "srun"]
    ranks = [pid for pid, command in found.items() if "laststep" in command and command[0] != "srun"]
    assert len(sruns) == 2 and len(ranks) == 2
    # First srun's child process, which would end the ranks in an orderly way.
    for pid in [*sorted(sruns, key=lambda pid: parent(pid) not in sruns), *ranks]:
        os.kill(pid, signal.SIGKILL)
    first, second = finishes(plain_desk, "killed", attempts=2)
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("lost", 7, 0)
    assert (first["job_id"], second["job_id"], second["restart"]) == (job, job, 1)


@pytest.mark.parametrize("script", ["srun.sbatch", "torchrun.sbatch"])
def test_a_users_script_restarts_the_ranks(desk: Desk, script: str) -> None:
    """After a fault the loop in the script starts the ranks again, in the same job, and no rank requeues it."""
    name = script.partition(".")[0]
    fault = "--export=ALL,LASTSTEP_TEST_FAULT=kill step 10 rank 1"
    words = (*SMALL, "task=tests.support.tasks.Faulty", "train.epochs=2")
    desk.types(name, ("sbatch", *ONE_CPU, fault, "--job-name={run}", f"{{examples}}/{script}"), words=words)
    first, second = finishes(desk, name, attempts=2)
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("failed", 9, 0)
    assert (first["job_id"], first["restart"]) == (second["job_id"], second["restart"])
    assert first["step_id"] == 0 < second["step_id"]
    assert "restarting the ranks in job" in desk.log(name)


def test_the_grace_is_the_clusters(desk: Desk) -> None:
    """KillWait is 15 s here. After half of it a step that does not end is given up, so that the last one is saved."""
    stuck = ("sbatch", "--export=ALL,LASTSTEP_TEST_FAULT=sleep step 8 rank 1", *SRUN[1:])
    desk.types("stuck", stuck, words=(*SMALL, "task=tests.support.tasks.Faulty", "train.epochs=2"))
    desk.waits_for("stuck", "fault: sleep")
    desk.stops("stuck", "scontrol requeue")
    desk.waits_for_attempts("stuck", 1)
    first, *_ = desk.attempts("stuck")
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("preempted", 7, 0)
    assert "the step has not finished 8 s after the signal; giving it up" in desk.log("stuck")


def test_what_is_wrong_is_not_requeued(desk: Desk) -> None:
    """A key that a run cannot change is refused in every start: the job must end, with exit status 2."""
    desk.types("wrong", TRAIN, words=(*SMALL, "train.max_steps=1"))
    assert desk.waits_for_terminals() == [0]
    desk.types("wrong", (*SRUN, "seed=7"), words=(*SMALL, "train.max_steps=1"))
    desk.waits_for("wrong", "error: seed=7: wrong was started with 0, and a run keeps its values")
    name = ("squeue", "--noheader", "--states=all", "--name=wrong", "--Format=exit_code,state,restartcnt")
    desk.cluster.wait_for(lambda: "FAILED" in desk.cluster.run(*name), DEADLINE_S, "the job did not end")
    exit_code, *others = desk.cluster.run(*name).split()
    assert exit_code in (str(2 << 8), "2:0")  # Slurm 22.05, and newer versions
    assert others == ["FAILED", "0"]
    assert len(desk.attempts("wrong")) == 1


def test_salloc_has_nothing_to_requeue(desk: Desk) -> None:
    """The log says so in one line, and that nothing is lost. The next srun in the allocation continues the run."""
    twice = "srun {train} || srun {train}".format(train=" ".join((*TRAIN, *TWO_EPOCHS)))
    desk.types("alloc", ("salloc", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", twice))
    desk.waits_for("alloc", "holds in its step 8", times=2)
    desk.stops("alloc", "scancel --signal=USR2")
    first, second = finishes(desk, "alloc", attempts=2)
    assert (first["end_step"], first["lost_steps"], first["job_id"]) == (8, 0, second["job_id"])
    (line,) = [line for line in desk.log("alloc").splitlines() if "not requeued" in line]
    assert line.endswith("every step is saved, start the run again under the same name to continue")


def test_a_job_that_may_not_be_requeued(desk: Desk) -> None:
    """With --no-requeue, or a site's JobRequeue=0, it ends at the stop, and says why. The same command continues it."""
    once = ("sbatch", "--no-requeue", *SRUN[1:])
    desk.types("once", once, words=TWO_EPOCHS)
    desk.waits_for("once", "holds in its step 8", times=2)
    desk.stops("once", "scancel --signal=USR2")
    desk.waits_for("once", "every step is saved, start the run again under the same name to continue")
    desk.cluster.wait_for(
        lambda: not desk.cluster.run("squeue", "-h", "--name=once"), DEADLINE_S, "the job did not end"
    )
    desk.types("once", once, words=TWO_EPOCHS)
    first, _ = finishes(desk, "once", attempts=2)
    assert (first["end_step"], first["lost_steps"]) == (8, 0)


def test_ranks_that_have_no_scontrol(desk: Desk, tmp_path: Path) -> None:
    """scontrol is often missing in a container: the log says so in one line, and the batch shell outside requeues."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {desk.python} "$@"\n')
    python.chmod(0o755)
    train = " ".join((*TRAIN, *TWO_EPOCHS))
    script = f"srun env PATH={tmp_path} {train} || python -m laststep.job.after_ranks runs/{{run}} $?"
    options = ("--nodes=2", "--ntasks-per-node=1", "--open-mode=append", "--output={run}.out")
    desk.types("bare", ("sbatch", *options, "--wrap", script))
    desk.waits_for("bare", "holds in its step 8", times=2)
    desk.stops("bare", "scancel --signal=USR2")
    first, second = finishes(desk, "bare", attempts=2)
    assert (first["reason"], first["lost_steps"], second["job_id"]) == ("preempted", 0, first["job_id"])
    (line,) = [line for line in desk.log("bare").splitlines() if "not requeued" in line]
    assert "not requeued: no scontrol on this machine; every step is saved" in line


def test_submit_within_torchrun(desk: Desk) -> None:
    """sbatch passes the environment on: ranks of the job must not take themselves for torchrun's."""
    within = ("torchrun", "--standalone", "--no-python", *LAUNCH, "--nodes=2", "--name={run}")
    desk.types("submitted", within, words=(*SMALL, "train.epochs=2"))
    finishes(desk, "submitted", attempts=1)
    assert desk.log("submitted").count("; submitit-slurm)") == 2
