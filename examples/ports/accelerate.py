"""accelerate_before.py, ported: laststep --nodes 2 task=examples.ports.accelerate.main"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from examples.ports.data import digits
from laststep import Run

EPOCHS, BATCH_SIZE = 5, 32


def main(run: Run) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = run.loader(digits(train=True), batch_size=BATCH_SIZE * run.size)
    val_loader = DataLoader(digits(train=False), batch_size=BATCH_SIZE)
    model, optimizer, scheduler, val_loader = accelerator.prepare(model, optimizer, scheduler, val_loader)
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(EPOCHS):
        model.train()
        for images, labels in run.steps(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        with torch.no_grad():
            for images, labels in run.validation(val_loader):
                right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean():.3f}")
