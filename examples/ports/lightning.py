"""lightning_before.py, ported: laststep --nodes 2 task=examples.ports.lightning.main"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.ports.data import digits
from laststep import Run
from laststep.frameworks.lightning import Trainer

EPOCHS, BATCH_SIZE = 5, 32


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout())
        self.classify = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.layers(images))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(run: Run) -> None:
    loader = DataLoader(digits(train=True), batch_size=BATCH_SIZE, shuffle=True)
    val_loader = DataLoader(digits(train=False), batch_size=BATCH_SIZE)
    callbacks = [EarlyStopping("val_loss", patience=3)]
    trainer = Trainer(run, max_epochs=EPOCHS, strategy="ddp", callbacks=callbacks)
    trainer.fit(Digits(), loader, val_loader)
