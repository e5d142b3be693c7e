"""A script as people write them: all of it at module level, its own words, a pickled class, a spawned worker."""

import argparse
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import laststep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--swallow", action="store_true")
args = parser.parse_args()
run = laststep.run()


@dataclass
class Shape:
    inputs: int = 4


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index**2))


if __name__ == "__main__":
    print(f"argv {sys.argv} as {__name__}, rank {run.rank} of {run.size}\n", end="", flush=True)
    assert run is laststep.run(), "the same object at each call"
    shape = pickle.loads(pickle.dumps(Shape()))  # by its module, which is __main__
    model = nn.Sequential(nn.Linear(shape.inputs, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    if run.size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    run.restore(model=model, optimizer=optimizer, scaler=None)
    print(f"{len(run.steps(count=args.steps))} steps left of {args.steps}\n", end="", flush=True)
    n = int(os.environ.get("WORKERS", "1"))
    held = DataLoader(Squares(), batch_size=4, num_workers=n, multiprocessing_context="spawn" if n else None)
    try:
        for step in run.steps(count=args.steps):
            x = torch.randn(8, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss.detach())
            optimizer.step()
            if step + 1 == int(os.environ.get("STOP_IN", 0)) and run.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            dies = step + 1 == int(os.environ.get("DIE_IN", 0)) and run.rank == run.size - 1
            if dies and os.environ.get("LASTSTEP_STEP_RESTARTS", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(args.pause)
    except SystemExit:
        if run.rank == 0:
            print("leaves the loop", flush=True)
        if not args.swallow:
            raise
        print("swallowed", flush=True)
    for batch in run.validation(held):
        print("a step after the stop" if args.swallow else "validates", batch.sum().item(), flush=True)
    if run.rank == 0:
        print("ends once", flush=True)
