"""The adapters on a real Slurm: a requeued job on Lightning's Trainer, and one on transformers' that loses a rank."""

from __future__ import annotations

import pytest

from laststep.config.config import Config
from tests.slurm.cluster import Cluster
from tests.slurm.user import User
from tests.support.forked import forked_python
from tests.support.needs import require_package
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

LOOPS = "tests.support.framework_loops"


@pytest.fixture(scope="module")
def user(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user whose ranks are forked with the frameworks loaded."""
    for package in ("lightning", "transformers"):
        require_package(package)
    python = forked_python("lightning.pytorch", "transformers.models.gpt2", "transformers.trainer")
    return User(cluster, tmp_path_factory.mktemp("frameworks"), python)


def test_requeued_and_restarted(user: User) -> None:
    """Both in the first step of their second epoch, and both end with the weights and metrics of an undisturbed run: no
    step is lost. Lightning, which sees that it runs on Slurm, must not requeue the job itself."""
    # SIGCONT does nothing. A step has two backward passes, the last of an epoch has one.
    strikes = {"lightning_whole": "SIGCONT step 8 rank 0,1", "transformers_whole": "SIGKILL step 8 rank 1"}
    for name, strike in strikes.items():
        words = (f"task={LOOPS}.{name}", "device=cpu", f"launch.env.LASTSTEP_TEST_SIGNAL={strike}")
        user.types("--nodes", "2", "--name", name, *words)
    user.waits_for("lightning_whole", "SIGCONT in the middle of a step", times=2)
    user.cluster.run("scontrol", "requeue", user.job_of("lightning_whole"))
    found = {}
    for name in strikes:
        user.waits_for_end(name, "finished")
        calm = Config.load(None, [f"task={LOOPS}.{name}", "device=cpu", "launch.tasks_per_node=2"])
        assert fingerprint(user.run(name)) == undisturbed_run(calm), name
        found[name] = [
            (end["reason"], end["restart"], end["step_restarts"], end["end_step"], end["lost_steps"])
            for end in user.attempts(name)
        ]
    assert found == {
        "lightning_whole": [("preempted", 0, 0, 5, 0), ("finished", 1, 0, 8, 0)],
        "transformers_whole": [("failed", 0, 0, 4, 0), ("finished", 0, 1, 8, 0)],
    }
