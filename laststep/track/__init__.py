"""Trackers: W&B, MLflow and trackio show one run for one training, each step once, however often it was interrupted. A
process beside rank 0 sends what is in metrics.jsonl; nothing of it runs in a rank. Not here: metrics.jsonl itself
and TensorBoard (`records`), the process beside the training (`laststep/ranks/beside.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laststep.config.setting import setting

HOW = "mode: online, or offline (`track RUN` sends); by: laststep, or script"


@dataclass
class Track:
    """Trackers that show the run, e.g. `track.wandb.project=mine`; without one, nothing is sent."""

    wandb: dict[str, Any] = setting({}, f"Weights & Biases. project; entity; tags; {HOW}")
    mlflow: dict[str, Any] = setting({}, f"MLflow. uri: http://HOST:PORT, or sqlite:////PATH; experiment; tags; {HOW}")
    trackio: dict[str, Any] = setting({}, "trackio, on this machine's disk (TRACKIO_DIR). project; mode; by")
