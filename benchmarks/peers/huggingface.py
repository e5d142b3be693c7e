"""transformers' Trainer with a resume of its own: a checkpoint after each epoch, and another at SIGTERM.

`srun python -m benchmarks.peers.huggingface FOLDER` starts the ranks. transformers' own examples resume if they are
told to; this one is kinder, and resumes from the newest complete checkpoint at every start. The checkpoint at SIGTERM
(`enable_jit_checkpoint`) is off by default. The Trainer does not learn of other ranks from srun, so they are exported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from benchmarks.peers import workload
from laststep.checkpoint.export import weights_sha256


class Classifier(nn.Module):
    """The workload as a model of transformers, which computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = workload.build()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of one batch."""
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Samples(Dataset[Any]):
    """The workload's samples as transformers names them."""

    def __init__(self) -> None:
        self._digits: Any = workload.training_set()

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._digits[index]
        return {"images": image, "labels": label}


def make_trainer(folder: Path, ranks: int, **more: Any) -> Any:
    """The Trainer of this training, for so many ranks."""
    classifier = Classifier()
    optimizer = torch.optim.SGD(classifier.parameters(), lr=workload.LEARNING_RATE, momentum=workload.MOMENTUM)
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=workload.BATCH_SIZE // ranks,
        num_train_epochs=workload.EPOCHS,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return transformers.Trainer(classifier, args, train_dataset=Samples(), optimizers=(optimizer, schedule))


def main(folder: Path) -> None:
    """Train on one rank, from the newest complete checkpoint in the folder if there is one."""
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    os.environ.update({name: os.environ[theirs] for name, theirs in slurm.items()})
    port = 20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000
    os.environ.update(MASTER_ADDR=os.environ["SLURM_LAUNCH_NODE_IPADDR"], MASTER_PORT=str(port))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = make_trainer(folder, size, save_strategy="epoch", enable_jit_checkpoint=True)
    workload.record_steps(trainer.model, rank)
    written = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    complete = [path.parent for path in written if not (path.parent / "checkpoint-is-incomplete.txt").exists()]
    trainer.train(resume_from_checkpoint=str(complete[-1]) if complete else None)
    if rank == 0 and trainer.state.global_step == workload.EPOCHS * workload.STEPS_PER_EPOCH:
        (folder / "weights.sha256").write_text(weights_sha256(trainer.model.model.state_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
