"""`cancel` on a real Slurm: it stops the right job, at any moment; and a job that fails early says why."""

from __future__ import annotations

import json
from pathlib import Path

from tests.slurm.launchers import SMALL
from tests.slurm.user import User
from tests.support.commands import LONG, SLOW_STEPS
from tests.support.project import DEADLINE_S

IN_SETUP = ("launch.setup=['sleep 300']",)


def state_of(user: User, name: str) -> tuple[str, str]:
    """The state of a run in `status`, and why."""
    (found,) = json.loads(user.types("status", name, "--json"))
    return found["state"], found["why"]


def accounted(user: User, job: str) -> str:
    """The state of a job in Slurm's accounting, or as slurmctld reports it there, once it has ended."""

    def ended() -> str:
        if user.cluster.accounting:
            said = user.cluster.run("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")
        else:
            said = user.cluster.run("scontrol", "show", "job", job).partition("JobState=")[2]
        return "" if "RUNNING" in said or "PENDING" in said or "COMPLETING" in said else said.strip()

    return user.cluster.wait_for(ended, DEADLINE_S, f"job {job} never ended")


def test_another_run_has_the_id_now(user: User) -> None:
    """Slurm's ids began anew, and run B has the id that run A had. `cancel A` must not stop B, nor say that A was
    stopped; and A can be resumed."""
    user.types("--name", "id-a", *LONG, *IN_SETUP)
    running = ("squeue", "-h", "-t", "RUNNING", "-j", user.job_of("id-a"))
    user.cluster.wait_for(lambda: user.cluster.run(*running, check=False), DEADLINE_S, "id-a did not start")
    assert "cancelled before" in user.types("cancel", "id-a")
    user.types("--name", "id-b", *LONG, "launch.slurm.comment=for accounting")
    user.waits_for("id-b", "step 10/")
    job = user.job_of("id-b")
    comment = user.cluster.run("squeue", "-h", "-j", job, "-o", "%k")
    assert comment.startswith("for accounting laststep:"), "the user's own comment is kept"
    first = user.run("id-a")
    user.cluster.wait_for(first.attempts.exists, DEADLINE_S, "the batch shell has not recorded the cancelled attempt")
    for file in (first.submissions, first.attempts):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**line, "job_id": job}) + "\n" for line in lines))
    assert "cancelled, so there is nothing to cancel" in user.types("cancel", "id-a")
    assert state_of(user, "id-b") == ("running", "")
    user.types("resume", "id-a", "launch.slurm.hold=true")
    assert state_of(user, "id-a") == ("queued", "JobHeldUser")
    said = user.types("cancel", "id-*")
    assert "id-a: cancelled before it started" in said and "id-b: stopped after step" in said
    assert accounted(user, job).startswith("CANCELLED"), "by its exit status it would be FAILED, for mails too"


def test_cancel_before_the_ranks_are_up(user: User) -> None:
    """While modules load or an image is pulled there is no rank to signal; in an array scancel --signal never returns
    there. The job has no step to lose: it is simply cancelled, and `cancel` says what it waits for."""
    user.types("sweep", "seed=0..1", "--name", "early", *LONG, *IN_SETUP)
    user.types("--name", "early-alone", *LONG, *IN_SETUP)
    array, alone = ("early-seed_0", "early-seed_1"), ("early-alone",)
    user.cluster.wait_for(
        lambda: all(state_of(user, name)[0] == "starting" for name in (*array, *alone)),
        DEADLINE_S,
        "the jobs did not start",
        poll_s=0.5,
    )
    for words, names in ((("--sweep", "early"), array), (alone, alone)):
        said = user.types("cancel", *words)
        for name in names:
            assert f"{name}: waiting for job " in said and f"{name}: cancelled before" in said, said
            assert state_of(user, name)[0] == "cancelled"


def test_it_failed_before_its_ranks_began(user: User) -> None:
    """`status` says why: they are the commonest mistakes of a first submission."""
    once = "launch.max_failures=0"
    user.types("--name", "setup", once, "launch.setup=['true', 'exit 3']")
    user.types("--name", "python", once, "launch.python=/no/such/python")
    for name, why in (
        ("setup", "line 2 of launch.setup exited with 3: exit 3"),
        ("python", "launch.python: /no/such/python not found on n"),
    ):
        user.waits_until_gone(user.job_of(name))
        state, said = state_of(user, name)
        assert state == "failed" and said.startswith(why)


def test_cancel_while_training(user: User) -> None:
    """The ranks finish their step and save it; the job ends as CANCELLED."""
    user.types("--name", "training", *SLOW_STEPS, "train.max_steps=200")
    user.waits_for("training", "step 10/200")
    said = user.types("cancel", "training")
    assert "training: waiting for the ranks of job " in said and "every step is kept" in said
    assert accounted(user, user.job_of("training")).startswith("CANCELLED")


def test_cancel_right_after_a_stop(user: User, tmp_path: Path) -> None:
    """The ranks have stopped for a signal after which the job is requeued, and recorded that, and rank 0 has not
    requeued it yet: it waits for the other ranks to leave. The requeue would bring the cancelled job back."""
    task = ("task=tests.support.tasks.PartsLate", f"launch.env.LASTSTEP_TEST_FOLDER={tmp_path}")
    user.types("--tasks-per-node", "2", "--name", "right-after", *SMALL, "train.epochs=2", *task)
    user.waits_for("right-after", "holds in its step 8", times=2)
    job = user.job_of("right-after")
    user.cluster.run("scancel", "--signal", "USR2", job)
    user.cluster.wait_for((tmp_path / "parts").exists, DEADLINE_S, "rank 0 does not leave")
    (before,) = user.attempts("right-after")
    assert (before["reason"], before["requeue"]) == ("preempted", True)
    user.cluster.run("scancel", job)
    ending = ("squeue", "-h", "-t", "COMPLETING", "-j", job)
    user.cluster.wait_for(lambda: user.cluster.run(*ending, check=False), DEADLINE_S, "Slurm does not end the job")
    (tmp_path / "go").touch()
    assert accounted(user, job).startswith("CANCELLED")
    (after,) = user.attempts("right-after")
    assert (after["reason"], after["requeue"], after["lost_steps"]) == ("cancelled", False, 0)


def test_delete_ends_the_job_first(user: User) -> None:
    """A folder that vanishes under its ranks leaves a job behind of which no command knows. `delete` cancels the job,
    waits for its end, and only then removes the folder; a run that waits in the queue likewise."""
    user.types("--name", "gone", *LONG)
    user.waits_for("gone", "step 10/")
    user.types("--name", "queued", *LONG, "launch.slurm.hold=true")
    job, waiting, folder = user.job_of("gone"), user.job_of("queued"), user.run("gone").path
    said = user.types("delete", "gone", "queued", "--yes")
    assert "gone: stopped after step" in said and "gone: deleted" in said
    assert "queued: cancelled before it started" in said and "queued: deleted" in said
    assert not folder.exists()
    assert accounted(user, job) and accounted(user, waiting)
    assert not list(folder.parent.glob("gone*")), "no half of it is left"
