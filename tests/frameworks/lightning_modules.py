"""LightningModules and a datamodule that tests train; imported by ranks alone, since Lightning takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, callbacks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from tests.support.framework_loops import few_digits, network


class Digits(LightningDataModule):
    """7 batches an epoch on two ranks, the last of them short."""

    def setup(self, stage: str) -> None:
        self.train, self.val = few_digits(train=True), few_digits(train=False)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)


class Classifier(LightningModule):
    """Trained by one optimiser, with a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "epoch"}]


class SavesToo(Classifier):
    """Has a callback that saves checkpoints."""

    def configure_callbacks(self) -> Any:
        class Own(callbacks.ModelCheckpoint):
            """One of the module's own."""

        return [Own("theirs")]


class TwoOptimizers(Classifier):
    """Two optimisers, each for a half of the network, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, second = self.network[:2].parameters(), self.network[2:].parameters()
        return [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


class Sharded(Classifier):
    """Shards its network by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(784, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 10))

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


def averages() -> list[Any]:
    """An averaged model that validates, where this Lightning has it."""
    kind = getattr(callbacks, "WeightAveraging", None)
    return [] if kind is None else [kind(avg_fn=get_ema_avg_fn(0.9))]
