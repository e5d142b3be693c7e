"""The scripts of both frameworks under Laststep, by its adapters."""

from __future__ import annotations

from benchmarks.peers import workload
from laststep import Run


def lightning(run: Run) -> None:
    """autorequeue.py, adapted."""
    from benchmarks.peers.autorequeue import Digits
    from laststep.frameworks.lightning import Trainer

    digits = Digits()
    trainer = Trainer(run, max_epochs=workload.EPOCHS, accelerator="cpu", logger=False)
    workload.record_steps(digits.model, run.rank)
    trainer.fit(digits, run.loader(workload.training_set(), workload.BATCH_SIZE))


def transformers(run: Run) -> None:
    """huggingface.py, adapted."""
    from benchmarks.peers.huggingface import make_trainer
    from laststep.frameworks.transformers import train

    trainer = make_trainer(run.folder, run.size)
    workload.record_steps(trainer.model, run.rank)
    train(run, trainer)
