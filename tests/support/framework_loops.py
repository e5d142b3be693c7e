"""The scripts of examples/ports that tests train, made small: 14 steps, 7 an epoch; struck at an exact place."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from examples.ports import data
from laststep import Run
from laststep.config.errors import ConfigError
from laststep.loops.registered import digest
from laststep.ranks.launchers import VARIABLES
from tests.support.custom_loops import Struck

SIZES = {"EPOCHS": 2, "BATCH_SIZE": 4, "BLOCK": 16, "ITERATIONS": 14, "EVAL_EVERY": 5}


def ddp(run: Run) -> Any:
    """A tutorial's script."""
    return port(run, "ddp")


def gpt(run: Run) -> Any:
    """A loop like nanoGPT's, with two backward passes a step."""
    return port(run, "gpt")


def lightning(run: Run) -> Any:
    """A LightningModule with batch norm, dropout, a schedule per step, and early stopping."""
    return port(run, "lightning")


def transformers(run: Run) -> Any:
    """A language model, with an evaluation after each epoch."""
    return port(run, "transformers")


def accelerate(run: Run) -> Any:
    """A loop on Accelerate, whose schedule steps once per rank."""
    return port(run, "accelerate")


def fabric(run: Run) -> Any:
    """A loop on Fabric."""
    return port(run, "fabric")


def synchronised(run: Run) -> None:
    """A script on Accelerate, which learns of other ranks from torchrun's variables alone. Each rank begins with its
    own weights, and prints those that it ends with."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(run.rank)
    model = accelerator.prepare(nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for images, labels in run.steps(run.loader(few_digits(train=True), 8), 3):
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    place = {name: os.environ[name] for name in VARIABLES}
    found = {**place, "accelerator": f"{accelerator.process_index} of {accelerator.num_processes}"}
    line = json.dumps({**found, "weights": digest(model.state_dict())})
    print(f"synchronised {line}\n", end="", flush=True)  # in one piece, as mpirun mixes the ranks' output


LIGHTNING_REFUSES: dict[str, Any] = {
    "strategy": "fsdp",
    "accumulate_grad_batches": 2,
    "max_time": "00:01:00:00",
    "enable_checkpointing": True,
    "max_epochs": -1,
}
TRANSFORMERS_REFUSES: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "enable_jit_checkpoint": True,
}


def refused(run: Run) -> None:
    """Prints what each adapter says of settings with which a run would not resume exactly."""
    from transformers import Trainer, TrainingArguments

    from laststep.frameworks import lightning, transformers

    for name, value in LIGHTNING_REFUSES.items():
        try:
            lightning.Trainer(run, **{name: value})
        except ConfigError as error:
            print("refused:", error, flush=True)
    for name, value in TRANSFORMERS_REFUSES.items():
        args = TrainingArguments(use_cpu=True, report_to="none", **{name: value})
        try:
            transformers.train(run, Trainer(nn.Linear(1, 1), args, train_dataset=[{"x": 0}]))
        except ConfigError as error:
            print("refused:", error, flush=True)


def port(run: Run, name: str) -> Any:
    """Train one script: a place to strike is a backward pass, or a batch of a validation."""
    script = importlib.import_module(f"examples.ports.{name}")
    few = {"digits": few_digits, "text": lambda: data.text()[: 92 * SIZES["BLOCK"]]} if name != "gpt" else {}
    vars(script).update({key: value for key, value in (SIZES | few).items() if hasattr(script, key)})
    os.chdir(run.config.launch.root)  # where frameworks write their own logs
    struck, backward = Struck(run), torch.Tensor.backward

    def strike_backward(*words: Any, **more: Any) -> None:
        struck.strike("step")
        backward(*words, **more)

    def strike_validation(loader: Any) -> Iterator[Any]:
        for batch in Run.validation(run, loader):
            struck.strike("validation")
            yield batch

    torch.Tensor.backward = strike_backward  # type: ignore[method-assign]
    run.validation = strike_validation  # type: ignore[method-assign, assignment]
    return script.main(run)


def few_digits(train: bool) -> TensorDataset:
    """52 images to train on, of which 4 are left for the last step of an epoch, and 40 to validate with."""
    return TensorDataset(*data.digits(train)[: 52 if train else 40])
