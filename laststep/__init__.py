"""Laststep: PyTorch training on Slurm that always resumes at its last step."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laststep.config.config import Config
    from laststep.loops.run import Run
    from laststep.runs.weights_source import load_weights
    from laststep.submission.submission import submit
    from laststep.task import Task
    from laststep.trainer import Trainer

    def run() -> Run:
        """See laststep.script.run."""


__version__ = "0.2.0"
__all__ = ["Config", "Run", "Task", "Trainer", "load_weights", "run", "submit"]

_MODULES = {
    "Config": "config.config",
    "Run": "loops.run",
    "Task": "task",
    "Trainer": "trainer",
    "load_weights": "runs.weights_source",
    "run": "script",
    "submit": "submission.submission",
}


def main() -> int:
    """The `laststep` command; returns the exit status."""
    try:
        from laststep.cli.main import main

        return main(sys.argv[1:])
    except KeyboardInterrupt:  # while Python still imports what would catch it
        return 130


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command starts quickly only if it does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'laststep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"laststep.{_MODULES[name]}"), name)
