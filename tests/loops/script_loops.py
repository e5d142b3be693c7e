"""Custom loops with what a script written for torchrun has at its first and its last line."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from laststep import Run

RANK, SIZE = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", -1))


def train(run: Run, model: nn.Module) -> None:
    """Two epochs of 3 steps."""
    loader = run.loader(TensorDataset(torch.arange(24.0).view(12, 2) / 24), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for (x,) in run.steps(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if run.averages_gradients:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            run.log(loss=loss)
            optimizer.step()


def script(run: Run) -> None:
    """Initialises, trains, destroys and exits, as scripts do."""
    init_process_group("gloo", timeout=timedelta(minutes=30))
    assert (RANK, SIZE) == (run.rank, run.size) == (dist.get_rank(), dist.get_world_size())
    print({name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}, flush=True)
    assert (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) == (run.local_rank, run.local_size)
    # A store of the script's own, where the variables say.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, run.size, is_master=run.rank == 0, timeout=timedelta(seconds=20))
    store.set(f"rank {run.rank}", run.name)
    assert all(store.get(f"rank {rank}").decode() == run.folder.name for rank in range(run.size))
    dist.barrier()  # before rank 0's store goes

    train(run, DistributedDataParallel(nn.Linear(2, 1)))
    own = dist.new_group()  # a group of the script's own
    dist.barrier(own)  # gloo's ranks have connected: else the first that closes it would fail the other
    dist.destroy_process_group(own)
    destroy_process_group()
    sys.exit(0)


def leaves_early(run: Run) -> None:
    """Leaves from the middle of an epoch, as an early stop does."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.steps(run.loader(TensorDataset(torch.ones(12, 2)), 4)):
        optimizer.step()
        if run.step == 1:
            sys.exit()


def fails(run: Run) -> None:
    """A script that reports an error of its own."""
    sys.exit("no data")


def other_ranks(run: Run) -> None:
    """A script that was written for 8 ranks."""
    dist.init_process_group("nccl", rank=run.rank, world_size=8)


def other_backend(run: Run) -> None:
    """A script that was written for GPUs."""
    dist.init_process_group("nccl")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    train(run, DistributedDataParallel(nn.Linear(2, 1)))


class Opaque(nn.Linear):
    """A model that returns an object of its own, in which nobody else finds tensors."""

    passes = 0

    def forward(self, x: torch.Tensor) -> Any:
        Opaque.passes += 1
        return SimpleNamespace(logits=super().forward(x))


def opaque(run: Run) -> dict[str, float]:
    """A script with that model; returns how often it was called."""
    model = DistributedDataParallel(Opaque(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for (x,) in run.steps(run.loader(TensorDataset(torch.ones(16, 2)), 8)):
        optimizer.zero_grad()
        model(x).logits.mean().backward()
        optimizer.step()
    return {"passes": Opaque.passes}


@dataclass
class Settings:
    """Settings of the script's own."""

    lr: float = 0.1


def with_settings(run: Run, args: Settings) -> dict[str, float]:
    """A script with settings; returns one."""
    train(run, DistributedDataParallel(nn.Linear(2, 1)))
    return {"lr": args.lr}


def unwrapped(run: Run) -> None:
    """A script that registers the module inside DistributedDataParallel, or has none."""
    train(run, nn.Linear(2, 1))


def averages(run: Run) -> None:
    """A script that averages its gradients by hand."""
    run.averages_gradients = True
    torch.manual_seed(0)
    train(run, nn.Linear(2, 1))
