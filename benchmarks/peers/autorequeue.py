"""Lightning's auto-requeue, as documented on its page on Slurm: SLURMEnvironment, DDP, a checkpoint after each epoch.

`srun python -m benchmarks.peers.autorequeue FOLDER` starts the ranks. The documented example gives no `ckpt_path`; this
one is kinder and resumes from the newest checkpoint, whether it was written at the signal or after an epoch. (Without
`ckpt_path`, a job that Lightning did not requeue itself starts from scratch; "last" ignores the checkpoint written at
the signal.)
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.peers import workload
from laststep.checkpoint.export import weights_sha256


class Digits(LightningModule):
    """The workload as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = workload.build()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser."""
        return torch.optim.SGD(self.parameters(), lr=workload.LEARNING_RATE, momentum=workload.MOMENTUM)


def main(folder: Path) -> None:
    """Train on one rank, from the newest checkpoint in the folder if there is one."""
    seed_everything(0, workers=True)
    digits = Digits()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=workload.EPOCHS,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)],
        logger=False,
        enable_progress_bar=False,
    )
    workload.record_steps(digits.model, trainer.global_rank)
    loader = DataLoader(workload.training_set(), batch_size=workload.BATCH_SIZE // trainer.world_size, shuffle=True)
    written = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer.fit(digits, loader, ckpt_path=written[-1] if written else None)
    if trainer.is_global_zero:
        (folder / "weights.sha256").write_text(weights_sha256(digits.model.state_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
