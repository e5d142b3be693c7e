"""A rank dies where no collective fails, as under NCCL: nothing is lost, and the ranks are back within their step.

The survivors wait in C, and no error reaches them. What was built on gloo's errors alone lost every step since the last
save here, or began only with the SIGTERM that srun sends after 30 s.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.test_restart import requeues, starts, undisturbed
from tests.slurm.user import User
from tests.support.project import DEADLINE_S, SILENT_PATH
from tests.support.ranks import fingerprint, pause

NEVER = "checkpoint.every_epochs=null"  # so a step that is not rescued is lost
WITHIN_S = 25.0  # three seconds on an idle machine, see benchmarks/restart.py; a hang is noticed after a minute


@pytest.fixture(scope="module")
def forked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    """As `silent`, but with ranks that are forked, into which the stand-in loads that backend as torch would."""
    user = User(cluster, tmp_path_factory.mktemp("forked-silent-runs"))
    user.env["PYTHONPATH"] = SILENT_PATH
    return user


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank(forked: User, rank: int) -> None:
    """On another node or on that of rank 0, which serves the store. Somebody who watches the log sees a pause of
    seconds; with a requeue, or another srun, it would be ten to thirty."""
    name = f"killed-{rank}"
    following = forked.begins("--nodes", "2", "--name", name, "--follow", *UNHURRIED, NEVER)
    forked.waits_for(name, IN_EPOCH_2)
    at = time.time()
    forked.kills_below_its_supervisor(name, rank)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert starts(forked, name) == [("failed", 0, 0, 0), ("finished", 0, 0, 1)]
    assert requeues(forked, name) == 0
    first, second = forked.attempts(name)
    assert first["lost_steps"] == 0 and second["start_step"] == first["end_step"] >= 50
    took_s = pause(forked.run(name), at)
    assert took_s < WITHIN_S, f"{took_s:.1f} s from SIGKILL to the first new step\n{said}"
    assert fingerprint(forked.run(name)) == undisturbed(2, *UNHURRIED, NEVER)


def test_a_frozen_rank(silent: User) -> None:
    """It holds no connection closed and reports nothing: the watchdog names it after launch.hang_timeout_s."""
    words = ("--nodes", "2", "--name", "frozen", "--follow", *UNHURRIED, NEVER, "launch.hang_timeout_s=5")
    following = silent.begins(*words)
    silent.waits_for("frozen", IN_EPOCH_2)
    silent.signals("frozen", signal.SIGSTOP, 1)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert starts(silent, "frozen") == [("hung", 0, 0, 0), ("finished", 0, 0, 1)]
    assert sum(end["lost_steps"] for end in silent.attempts("frozen")) == 0
    assert fingerprint(silent.run("frozen")) == undisturbed(2, *UNHURRIED, NEVER)
