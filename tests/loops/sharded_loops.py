"""A hand-written FSDP2 loop, which tests train. args.mesh=4 shards the model over 4 ranks, 2x2 over 2 with a replica of
each shard, none not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laststep import Run
from tests.support.custom_loops import Struck


def network(mesh: str, seed: int = 0) -> nn.Module:
    """Dropout and batch norm; 33 and 1 rows are not divided evenly."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.Dropout(0.2), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(33, 1))
    if mesh == "none":
        return DistributedDataParallel(model)
    shape = tuple(map(int, mesh.split("x")))
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(body, mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


def named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The parameters by the same names with and without DistributedDataParallel."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.named_parameters()


def data() -> TensorDataset:
    """8 batches of 8."""
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def thorough(run: Run) -> dict[str, Any]:
    """AdamW, whose state is made in the first step; clipping, accumulation, a schedule, a moving average in a dict,
    whose weights take the place of the others' in the first validation."""
    struck, samples = Struck(run), data()
    loader, model = run.loader(samples, 8), network(str(run.args.mesh))
    tests = DataLoader(samples, 4, sampler=DistributedSampler(samples, shuffle=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)
    schedule = StepLR(optimizer, 3, gamma=0.8)
    weights = dict(named(model))  # while they are sharded
    average = {name: p.detach().clone() for name, p in weights.items()}
    run.restore(model=model, optimizer=optimizer, schedule=schedule, average=average)
    for epoch in run.epochs(2):
        model.train()
        for x, y in run.steps(loader):
            for half in (0, 1):
                loss = nn.functional.mse_loss(model(x), y)
                if half:
                    struck.strike("step")
                (loss / 2).backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.log(loss=loss, norm=norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with torch.no_grad():
                for name, p in weights.items():
                    average[name].mul_(0.9).add_(p, alpha=0.1)

        model.eval()
        mine = {name: p.detach().clone() for name, p in weights.items()}
        sums = torch.zeros(())
        with torch.no_grad():
            for name, p in weights.items() if not epoch else ():
                p.copy_(average[name])
            for x, y in run.validation(tests):
                struck.strike("validation")
                sums += nn.functional.mse_loss(model(x), y)
            for name, p in weights.items() if not epoch else ():
                p.copy_(mine[name])
        if isinstance(model, FSDPModule):
            model.reshard()  # FSDP2 keeps what it has gathered until a backward pass
        dist.all_reduce(sums)
        run.log(val_loss=sums, noise=torch.rand(()))
    return {"rate": optimizer.param_groups[0]["lr"]}
