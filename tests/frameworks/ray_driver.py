"""Trains a run on Ray, on this machine, and disturbs it: `python -m tests.frameworks.ray_driver FOLDER PYTHON WORDS`.

At one step it kills the worker of rank 1: Ray starts the workers again. At a later one it drains the node: this ends
the run, as there is no other node. It is a process of its own, with which Ray ends. PYTHON starts the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context

from laststep.frameworks import ray as on_ray
from tests.frameworks import ray_loop
from tests.support.project import DEADLINE_S, wait_until

PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION in ray/core/generated/autoscaler_pb2.py


class Trainer(on_ray.TorchTrainer):
    """The TorchTrainer, whose ranks another Python starts."""

    def __init__(self, words: list[str], folder: Path, python: str) -> None:
        failure_config = FailureConfig(max_failures=1, max_preemption_failures=0)
        run_config = RunConfig(storage_path=str(folder), failure_config=failure_config)
        super().__init__(words, scaling_config=ScalingConfig(num_workers=2), run_config=run_config)
        start = vars(self)["train_loop_config"]
        self.train_loop_config = {"start": start, "folder": folder, "python": python}
        self.train_loop_per_worker = work


def work(test: dict[str, Any]) -> int:
    """What a worker does."""
    rank = get_context().get_world_rank()
    (test["folder"] / f"worker-{rank}").write_text(str(os.getpid()))
    sys.executable = test["python"]
    os.environ.update(LASTSTEP_TEST_HOLD=str(test["folder"]), OMP_NUM_THREADS="1")
    return on_ray.work(test["start"])


def main(folder: Path, python: str, words: list[str]) -> None:
    """Start Ray, train, and end it."""
    least = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **least})
    ray.init(cluster.address)
    threading.Thread(target=disturb, args=(folder,), daemon=True).start()
    try:
        Trainer(words, folder, python).fit()
    except TrainingFailedError as error:
        print(f"ended by {type(error).__name__}", flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def disturb(folder: Path) -> None:
    """Kill a worker, and drain the node, each while the ranks are in a step."""
    kill, drain = (folder / f"at-{step}" for step in ray_loop.HELD)
    wait_until(kill.exists, "the step to kill a worker in was not reached")
    os.kill(int((folder / "worker-1").read_text()), signal.SIGKILL)
    wait_until(drain.exists, "the step to drain the node in was not reached")
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = time.time_ns() // 1_000_000 + 1000 * int(DEADLINE_S)
    print("drained", gcs.drain_node(ray.nodes()[0]["NodeID"], PREEMPTION, "test", deadline_ms), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
