"""The scripts of examples/ports that tests train, made small: 14 steps, 7 an epoch; struck at an exact place."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import TensorDataset

from examples.ports import data
from tests.support.custom_loops import Struck
from trainer import Run

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
    run.validation = strike_validation  # type: ignore[method-assign]
    return script.main(run)


def few_digits(train: bool) -> TensorDataset:
    """52 images to train on, of which 4 are left for the last step of an epoch, and 40 to validate with."""
    return TensorDataset(*data.digits(train)[: 52 if train else 40])
