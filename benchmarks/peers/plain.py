"""The checkpointable submitit job that most labs copy: DistributedDataParallel, and a checkpoint after each epoch.

`python -m benchmarks.peers.plain FOLDER` submits it. In the usual copies only `checkpoint()` looks for the newest
checkpoint. submitit does not call it at a preemption, so the job then starts from scratch. This one is kinder: it looks
in `__call__`, i.e. at every start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import submitit
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers import workload
from laststep.checkpoint.export import weights_sha256


class Trainer:
    """The callable that submitit runs in each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        """Train, starting from the checkpoint of the last epoch if there is one."""
        here = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        dist.init_process_group("gloo")
        model = workload.build()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE, momentum=workload.MOMENTUM)
        dataset = workload.training_set()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=0)
        loader = DataLoader(dataset, batch_size=workload.BATCH_SIZE // here.world_size, sampler=sampler)

        checkpoint, first = self.folder / "checkpoint.pth", 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"] + 1
        workload.record_steps(model, here.rank)
        for epoch in range(first, workload.EPOCHS):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                cross_entropy(parallel(images), labels).backward()
                optimizer.step()
            if here.rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, checkpoint)
        if here.rank == 0:
            (self.folder / "weights.sha256").write_text(weights_sha256(model.state_dict()))
        dist.destroy_process_group()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit at SIGUSR2; returns what to run after the requeue."""
        return submitit.helpers.DelayedSubmission(type(self)(self.folder))


def main(folder: Path) -> None:
    """Submit the job."""
    executor = submitit.AutoExecutor(folder=folder / "logs", slurm_max_num_timeout=30)
    executor.update_parameters(
        nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=60, slurm_signal_delay_s=20, name="plain"
    )
    print(executor.submit(Trainer(folder)).job_id)


if __name__ == "__main__":
    # Imported by its full name: the ranks of the job unpickle Trainer, and could not import it from __main__.
    from benchmarks.peers import plain

    plain.main(Path(sys.argv[1]))
