"""A new user's first hour: from the first command to weights that other programs read.

Each command is what the documentation shows. A newcomer for whom one of them fails does not come back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.datasets import MNIST

from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S
from trainer.data.catalog import MNIST_5K
from trainer.records.metrics import read_lines


@pytest.fixture
def laststep() -> list[str]:
    """The command."""
    return [sys.executable, str(PROJECT / "launch.py")]


def test_from_init_to_weights(laststep: list[str], tmp_path: Path) -> None:
    """The project of `init` trains, and its exported weights, read by safetensors into a plain model of torch, have the
    accuracy that the run has measured."""

    def types(folder: Path, *words: str) -> None:
        done = subprocess.run(
            [*laststep, *words],
            cwd=folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    demo = tmp_path / "demo"
    types(tmp_path, "init", "demo")
    types(demo, "--local", "--name", "first", "train.epochs=2")
    types(demo, "export", "first", "model.safetensors")

    weights = load_file(demo / "model.safetensors")
    model = nn.Sequential(*_block(1, 32), *_block(32, 64), nn.Flatten(), nn.Dropout(), nn.Linear(64 * 7 * 7, 10))
    model.load_state_dict(weights)
    measured = read_lines(demo / "runs" / "first" / "metrics.jsonl")[-1]["val_accuracy"]
    assert measured > 0.9
    assert _accuracy(model.eval()) == pytest.approx(measured, abs=1e-6)


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    digits = MNIST(MNIST_5K, train=False)
    return float((model(digits.data.unsqueeze(1) / 255).argmax(1) == digits.targets).float().mean())
