"""What the storm compares with: the training of tests.faults.task under torchrun, as torch's own examples write it.

`torchrun --max-restarts N -m tests.faults.elastic FOLDER EPOCHS`: DistributedDataParallel, a checkpoint after each
epoch, and a start from the newest one. torchrun starts all ranks again when one dies.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from laststep.config.config import Config
from tests.faults.run import CONFIG
from tests.faults.task import Blobs, Traced


def main(folder: Path, epochs: int) -> None:
    """Train in this rank."""
    rank = int(os.environ["RANK"])
    (folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
    config = Config.load(CONFIG)
    dist.init_process_group("gloo")
    model = Traced.model(None)  # type: ignore[arg-type]  # it needs nothing of its task
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optim.lr, momentum=0.9)
    dataset = Blobs(config.data.args["samples"], augment=True)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=config.train.batch_size // dist.get_world_size(), sampler=sampler)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            if rank == 0:
                with (folder / "steps.txt").open("a") as file:
                    file.write(f"{epoch * len(loader) + number + 1} {time.time()}\n")
            time.sleep(float((folder / "pace").read_text()) / 1000)
            optimizer.zero_grad()
            cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            (folder / "epochs.txt").write_text(str(epoch + 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
