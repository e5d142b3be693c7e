"""fabric_before.py, ported: laststep --nodes 2 task=examples.ports.fabric.main"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from examples.ports.data import digits
from laststep import Run
from laststep.frameworks.fabric import Fabric

EPOCHS, BATCH_SIZE = 5, 32


def main(run: Run) -> None:
    fabric = Fabric(run)
    fabric.launch()
    model = nn.Sequential(nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    run.restore(model=model, optimizer=optimizer)
    loader = run.loader(digits(train=True), batch_size=BATCH_SIZE * run.size)
    val_loader = fabric.setup_dataloaders(DataLoader(digits(train=False), batch_size=BATCH_SIZE))

    for epoch in run.epochs(EPOCHS):
        model.train()
        for images, labels in run.steps(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        with torch.no_grad():
            for images, labels in run.validation(val_loader):
                losses.append(nn.functional.cross_entropy(model(images), labels))
        val_loss = fabric.all_reduce(torch.stack(losses).mean())
        fabric.print(f"epoch {epoch}: validation loss {val_loss:.3f}")
