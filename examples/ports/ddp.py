"""ddp_before.py, ported: laststep --nodes 2 task=examples.ports.ddp.main"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from examples.ports.data import digits
from laststep import Run

EPOCHS, BATCH_SIZE = 5, 32


def main(run: Run) -> None:
    rank, size = run.rank, run.size
    device = run.device
    train_set = digits(train=True)
    loader = run.loader(train_set, batch_size=BATCH_SIZE * size)

    model = DDP(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    run.restore(model=model, optimizer=optimizer)

    for epoch in run.epochs(EPOCHS):
        for images, labels in run.steps(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} on {size} ranks: loss {loss.item():.3f}")
