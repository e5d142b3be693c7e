"""A loop on Lightning Fabric: python -m examples.ports.fabric_before"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from examples.ports.data import digits

EPOCHS, BATCH_SIZE = 5, 32


def main() -> None:
    fabric = Fabric(strategy="ddp", devices=2)
    fabric.launch()
    model = nn.Sequential(nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(digits(train=True), batch_size=BATCH_SIZE, shuffle=True))
    val_loader = fabric.setup_dataloaders(DataLoader(digits(train=False), batch_size=BATCH_SIZE))

    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        with torch.no_grad():
            for images, labels in val_loader:
                losses.append(nn.functional.cross_entropy(model(images), labels))
        val_loss = fabric.all_reduce(torch.stack(losses).mean())
        fabric.print(f"epoch {epoch}: validation loss {val_loss:.3f}")
        fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main()
