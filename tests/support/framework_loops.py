"""Training scripts on other frameworks that tests train, made small; struck at an exact place."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.custom_loops import Struck
from trainer import Run


def environment(run: Run) -> None:
    """What frameworks read of the ranks."""
    places = {"RANK": run.rank, "WORLD_SIZE": run.size, "LOCAL_RANK": run.local_rank, "LOCAL_WORLD_SIZE": run.size}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


SAMPLES, BATCH, EPOCHS = 52, 8, 2  # 7 steps an epoch, the last of them short


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network() -> nn.Module:
    """With dropout, and batch norm, whose statistics are those of rank 0."""
    return nn.Sequential(nn.Linear(12, 600), nn.BatchNorm1d(600), nn.Dropout(), nn.Linear(600, 1))


def lightning(run: Run) -> None:
    """A LightningModule with a schedule per step, early stopping, and a validation after each epoch."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import EarlyStopping

    from trainer.frameworks.lightning import Trainer

    struck = Struck(run)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            struck.strike("step")
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            struck.strike("validation")
            loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=14)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = Trainer(run, max_epochs=EPOCHS, logger=False, callbacks=[EarlyStopping("val_loss", patience=9)])
    trainer.fit(Module(), run.loader(data(), BATCH), DataLoader(data(), BATCH))


def transformers(run: Run) -> None:
    """A tiny language model with an evaluation after each epoch, and the Trainer's defaults otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from trainer.frameworks.transformers import train

    environment(run)
    struck = Struck(run)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    text = torch.randint(50, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))

    class Struck_Trainer(Trainer):
        def compute_loss(self, model: nn.Module, *words: Any, **more: Any) -> Any:
            struck.strike("step" if model.training else "validation")
            return super().compute_loss(model, *words, **more)

    args = TrainingArguments(
        output_dir=os.path.join(run.config.launch.root, "out"),
        per_device_train_batch_size=BATCH // run.size,
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    samples = [{"input_ids": line, "labels": line} for line in text]
    train(run, Struck_Trainer(model=model, args=args, train_dataset=samples, eval_dataset=samples))


def accelerate(run: Run) -> None:
    """A loop on Accelerate, whose schedule steps once per rank."""
    from accelerate import Accelerator

    environment(run)
    struck, accelerator = Struck(run), Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.5)
    model, optimizer, scheduler, tests = accelerator.prepare(model, optimizer, scheduler, DataLoader(data(), BATCH))
    run.restore(model=model, optimizer=optimizer.optimizer, scheduler=scheduler.scheduler)
    loader = run.loader(data(), BATCH)
    for _ in run.epochs(EPOCHS):
        model.train()
        for x, y in run.steps(loader):
            loss = nn.functional.mse_loss(model(x), y)
            struck.strike("step")
            accelerator.backward(loss)
            run.log(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = []
            for x, y in run.validation(tests):
                struck.strike("validation")
                losses.append(accelerator.gather_for_metrics((model(x) - y).square()))
        run.log(val_loss=torch.cat(losses).mean(), samples=len(torch.cat(losses)))


def fabric(run: Run) -> None:
    """A loop on Fabric."""
    from trainer.frameworks.fabric import Fabric

    struck, fabric = Struck(run), Fabric(run)
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    tests = fabric.setup_dataloaders(DataLoader(data(), BATCH))
    run.restore(model=model, optimizer=optimizer.optimizer)
    loader = run.loader(data(), BATCH)
    for _ in run.epochs(EPOCHS):
        model.train()
        for x, y in run.steps(loader):
            loss = nn.functional.mse_loss(model(x), y)
            struck.strike("step")
            fabric.backward(loss)
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = []
            for x, y in run.validation(tests):
                struck.strike("validation")
                losses.append(nn.functional.mse_loss(model(x), y))
        run.log(val_loss=fabric.all_reduce(torch.stack(losses).mean()))
