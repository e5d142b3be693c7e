"""An image classifier on Lightning: torchrun --nproc-per-node 2 original.py --devices 2"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision import datasets, transforms

import laststep.frameworks.lightning

run = laststep.run()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default=None, help="where CIFAR10 is; without it, fake images")
    parser.add_argument("--fake_images", type=int, default=2048)
    parser.add_argument("--output_dir", default="lightning_logs")
    parser.add_argument("--batch_size", type=int, default=64, help="of each device")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.05)
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--gradient_clip_val", type=float, default=1.0)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class CIFAR10DataModule(L.LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def setup(self, stage):
        normalize = [transforms.ToTensor(), transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
        augment = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), *normalize])
        plain = transforms.Compose(normalize)
        if self.args.data_dir is not None:
            self.train_set = datasets.CIFAR10(self.args.data_dir, train=True, transform=augment)
            self.val_set = datasets.CIFAR10(self.args.data_dir, train=False, transform=plain)
        else:
            self.train_set = datasets.FakeData(self.args.fake_images, (3, 32, 32), 10, augment)
            self.val_set = datasets.FakeData(self.args.fake_images // 4, (3, 32, 32), 10, plain)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.args.batch_size, shuffle=True, num_workers=self.args.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.args.batch_size, num_workers=self.args.num_workers)


class Classifier(L.LightningModule):
    def __init__(self, width, lr, weight_decay):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, 10),
        )
        self.val_acc = MulticlassAccuracy(num_classes=10)

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    args = parse_args()
    L.seed_everything(args.seed, workers=True)
    callbacks = [
        ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=2, filename="{epoch}-{val_acc:.3f}"),
        ModelCheckpoint(filename="last", every_n_epochs=1),
        EarlyStopping(monitor="val_loss", patience=args.patience),
        LearningRateMonitor(logging_interval="step"),
    ]
    trainer = laststep.frameworks.lightning.Trainer(
        max_epochs=args.max_epochs,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        accumulate_grad_batches=args.accumulate_grad_batches,
        gradient_clip_val=args.gradient_clip_val,
        log_every_n_steps=10,
        logger=CSVLogger(args.output_dir),
        callbacks=callbacks,
    )
    trainer.fit(Classifier(args.width, args.lr, args.weight_decay), datamodule=CIFAR10DataModule(args))


if __name__ == "__main__":
    main()
