"""A script whose words Hydra reads."""

import os
import signal

import hydra
import torch
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

import laststep


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(settings: DictConfig) -> float:
    run = laststep.run()
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.optim.lr, momentum=0.9)
    run.restore(model=model, optimizer=optimizer)
    for step in run.steps(count=settings.steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss.detach())
        optimizer.step()
        if step + 1 == int(os.environ.get("STOP_IN", 0)) and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    print(f"trained with lr {settings.optim.lr}", flush=True)
    return loss.item()


main()
