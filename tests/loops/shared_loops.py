"""Hand-written loops over run.shares(batch), which tests train with train.shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from laststep import Run
from tests.support.custom_loops import Struck


def data() -> TensorDataset:
    """29 samples: in batches of 8, the last of four batches has 5."""
    x = torch.randn(29, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network(run: Run) -> DistributedDataParallel:
    """Dropout and batch norm; with more than one of DDP's buckets, of which the first holds 1 MiB."""
    torch.manual_seed(0)
    body = [nn.Linear(12, 600), nn.BatchNorm1d(600), nn.Dropout(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1)]
    return DistributedDataParallel(nn.Sequential(*body).to(run.device))


def thorough(run: Run) -> dict[str, Any]:
    """What a loop may do with its shares: micro-batches, a second loader, AdamW and clipping, a gradient scaler that
    skips an update, random numbers around the shares and in them, a buffer that it sets before them, a validation."""
    struck = Struck(run)
    loader, model = run.loader(data(), 8, shares=4), network(run)
    model.module.register_buffer("scale", torch.ones(()))
    more = run.batches(run.loader(data(), 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125)  # too large at first
    run.restore(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.epochs(2):
        model.train()
        for batch in run.steps(loader):
            optimizer.zero_grad(set_to_none=bool(run.step % 2))
            noise = 0.1 * torch.rand(())
            model.module.scale.fill_(1.0 + noise)
            for x, y in run.shares(batch):
                (other, _) = next(more)
                with model.no_sync():
                    scaler.scale(0.1 * model(other.repeat(2, 1)).square().mean()).backward()
                loss = nn.functional.mse_loss(model.module.scale * model(x + noise * torch.randn_like(x)), y)
                struck.strike("step")
                scaler.scale(loss).backward()
                run.log(loss=loss, drawn=torch.rand(()))
            scaler.unscale_(optimizer)
            run.log(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.5), after=torch.rand(()))
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        hits = 0
        with torch.no_grad():
            for x, y in run.validation([data()[:]]):
                struck.strike("validation")
                hits += int(((model(x) > 0) == (y > 0)).sum())
        run.log(val_hits=hits, noise=torch.rand(()))
    return {"hits": hits}


def draws(run: Run) -> None:
    """A loop that draws its own batches, for two models with an optimizer each, one of which rests every other step."""
    torch.manual_seed(0)
    models = [DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    run.restore(first=models[0], second=models[1], one=optimizers[0], two=optimizers[1])
    for _ in run.epochs(1):
        for step in run.steps(count=4):
            trained = 2 if step % 2 else 1
            for number in run.shares(step):
                x = torch.randn(2, 3)
                for model in models[:trained]:
                    loss = (model(x) - x.sum(1, keepdim=True) - number).square().mean()
                    loss.backward()
                run.log(loss=loss)
            for optimizer in optimizers[:trained]:
                optimizer.step()
                optimizer.zero_grad()
