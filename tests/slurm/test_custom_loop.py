"""A custom training loop on a real Slurm: submitted from Python or by the command, preempted, requeued."""

from __future__ import annotations

import subprocess
import sys

from tests.slurm.user import User
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.ranks import fingerprint

CALM, HELD = (f"task=tests.support.custom_loops.{name}" for name in ("example", "awaits_stop"))


def test_preempted_and_requeued(user: User) -> None:
    """The same job is requeued, and ends with the weights and metrics of an undisturbed run."""
    words = [CALM, "launch.nodes=2", "launch.name=own-calm", f"launch.root={user.root}"]
    program = (
        "from laststep import Config, submit\n"
        f"job = submit(Config.load(None, {words!r}, {user.site!r}))\n"
        "print('val_accuracy', job.result()['val_accuracy'])\n"
    )
    submitting = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROJECT, env=user.env, text=True, stdout=subprocess.PIPE
    )
    said = submitting.communicate(timeout=DEADLINE_S)[0]
    calm = fingerprint(user.run("own-calm"))
    assert submitting.returncode == 0 and float(said.split()[-1]) == calm["metrics"][-1]["val_accuracy"], said

    following = user.begins("--nodes", "2", "--name", "own", "--follow", HELD)
    user.waits_for("own", "holds in its step 8", times=2)
    user.cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0 and "resuming after step" in said, said
    first, second = user.attempts("own")
    assert (first["reason"], second["reason"]) == ("preempted", "finished")
    assert first["job_id"] == second["job_id"] and first["lost_steps"] == 0
    assert first["end_step"] == second["start_step"] == 8
    assert fingerprint(user.run("own")) == calm
