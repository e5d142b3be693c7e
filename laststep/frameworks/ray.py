"""A run on a Ray cluster: `from laststep.frameworks.ray import TorchTrainer`, and `TorchTrainer(words, ...).fit()`.

Each worker of Ray Train starts one rank as a process of its own, `python -m laststep WORDS`. In the worker itself the
rank would run in a thread, which cannot catch signals, and Ray would kill it without notice. A rank in a process of its
own outlives its worker until it has saved its last step, see laststep/frameworks/ray_keeper.py. Ray then starts all
workers again, as its FailureConfig says, and their ranks continue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.frameworks import ray_keeper, unusable
from laststep.ranks.world import hostname
from laststep.say import say

try:
    from ray.exceptions import RayActorError
    from ray.train import Result, get_context
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise unusable(__name__, error) from error

POLL_S = 0.5
REFUSED = 2  # a rank's exit status when it has refused its configuration
PACKAGE = Path(__file__).parent.parent
KEEPER = (sys.executable, "-IS", str(ray_keeper.__file__))


class TorchTrainer(DataParallelTrainer):
    """Trains a run, or continues it, on the workers of Ray Train. The folder of the run must be on a disk that all
    nodes share, and so must the current folder, which is that of the ranks.

    `words` are those of `python -m laststep`, such as ["--config", "configs/mnist.yaml", "--name", "first"]. The
    options are those of Ray's TorchTrainer for the workers: scaling_config and run_config.
    """

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        folder = os.getcwd()
        start = {
            "words": list(words),
            "job": f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            "folder": folder,
            "python_path": os.pathsep.join(filter(None, [str(PACKAGE.parent), folder, os.environ.get("PYTHONPATH")])),
        }
        super().__init__(work, train_loop_config=start, **options)

    def fit(self) -> Result:
        """Train until the run is finished. Raises ConfigError when rank 0 refuses the configuration, and
        ray.train.TrainingFailedError when Ray does not start the workers again."""
        result: Result = super().fit()
        if result.return_value == REFUSED:
            raise ConfigError("rank 0 refused the configuration; the line `error: ...` in its output says why")
        return result


def work(start: dict[str, Any]) -> int:
    """What a worker does: start its rank, and wait for all ranks to end. Returns when there is nothing left to do;
    raises for Ray to start the workers again."""
    context = get_context()
    rank = context.get_world_rank()
    # Two attempts must not have the same number.
    restarts = broadcast_from_rank_zero(compat.count_in_ray(f"laststep-{start['job']}") if rank == 0 else None)
    place = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "NODE_RANK": context.get_node_rank(),
        "RESTARTS": restarts,
        "JOB": start["job"],
    }
    # A Ray cluster may run in a Slurm job. Its ranks are not tasks of that job, and do not requeue it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    environment |= {f"LASTSTEP_RAY_{name}": str(value) for name, value in place.items()}
    environment["PYTHONPATH"] = start["python_path"]
    status, preempted = _keep(start, environment)
    # All workers wait here until all ranks have ended: after a fault the survivors save the last step, and Ray would
    # kill their workers.
    of_rank_0 = broadcast_from_rank_zero(status)
    if status == of_rank_0 == 0 or (of_rank_0 == REFUSED and not restarts):
        return of_rank_0
    text = f"rank {rank} on {hostname()} {_how_it_ended(status)}"
    if preempted:  # Ray does not count this against max_failures
        raise RayActorError(error_msg=f"{text}: Ray drains a node", preempted=True)
    raise RuntimeError(text)


def _keep(start: dict[str, Any], environment: dict[str, str]) -> tuple[int, bool]:
    """Run this worker's rank to its end, and stop it if Ray drains a node; returns its exit status, and whether it was
    stopped."""
    rank = [sys.executable, "-u", str(PACKAGE), *start["words"]]
    try:
        keeper = subprocess.Popen(
            [*KEEPER, *rank],
            cwd=start["folder"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    except FileNotFoundError:
        text = f"{start['folder']}: no such folder on {hostname()}; start from one that all nodes share"
        raise ConfigError(text) from None
    assert keeper.stdin is not None and keeper.stdout is not None
    preempted = False
    with keeper:
        while not wait([keeper.stdout.fileno()], POLL_S):
            if not preempted and compat.ray_drains_a_node():
                preempted = True
                say("Ray drains a node: stopping after this step")
                keeper.stdin.close()
        return int(keeper.stdout.read() or -signal.SIGKILL), preempted


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return "has stopped" if status == 0 or status > 128 else f"failed with exit status {status}"
