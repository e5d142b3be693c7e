"""A small task into which a difference can be planted, as the variable PLANT says: at one step, on one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laststep import Task, compat
from laststep.data.order import nth_seed, seed_of
from laststep.replay.operators import computed

PLANT = "LASTSTEP_TEST_PLANT"  # JSON: {"kind", "step", "rank", "number", "bit", "note"}
SAMPLES, FEATURES, CLASSES = 48, 12, 5


class Flip(compat.dispatch_mode()):  # type: ignore[misc]
    """Flips a bit of what one operator computes in one step on one rank: `number` counts those with float32 results.

    Without a number it counts them alone. A step and its rank are known by the seed that is theirs."""

    def __init__(self, plant: dict[str, Any], seed: int) -> None:
        super().__init__()
        self._plant, self._count = plant, 0
        self._seed = nth_seed(seed_of("steps", seed, plant["rank"]), plant["step"] - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.default_generator.initial_seed() == self._seed and not str(func).startswith("aten.clone"):
            tensors = [one for one in computed(func, args, kwargs or {}, result) if one.dtype is torch.float32]
            if tensors:
                if self._count == self._plant["number"]:
                    self._flip(str(func), tensors[0])
                self._count += 1
                if self._plant["number"] is None:
                    Path(self._plant["note"]).write_text(json.dumps({"count": self._count}))
        return result

    def _flip(self, name: str, tensor: Tensor) -> None:
        bits = tensor.detach().view(torch.int32).numpy()  # whose memory is changed without an operator of torch
        place = self._plant["element"] % bits.size
        at = tuple(int(each) for each in __import__("numpy").unravel_index(place, bits.shape)) if bits.ndim else ()
        before = float(tensor.detach().numpy()[at])
        bits[at] ^= 1 << self._plant["bit"]
        note = {"operator": name, "before": before, "after": float(tensor.detach().numpy()[at])}
        Path(self._plant["note"]).write_text(json.dumps(note))


class Points(torch.utils.data.Dataset[Any]):
    """Random points, whose class is their largest coordinate's number."""

    def __init__(self, changed: int | None) -> None:
        self._points = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5))
        if changed is not None:
            self._points[changed, 0] += 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        point = self._points[index]
        return point, int(point[:CLASSES].argmax())


class Planted(Task):
    """A classifier of two layers with a norm and dropout; it logs the norm of its gradient."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.plant: dict[str, Any] = json.loads(os.environ.get(PLANT, "{}"))

    def datasets(self) -> Any:
        """The points; another one in a run with a changed sample."""
        changed = self.plant["element"] % SAMPLES if self.plant.get("kind") == "sample" else None
        return Points(changed), Points(None)

    def model(self) -> nn.Module:
        """Two layers."""
        if self.plant.get("kind") in ("operator", "count"):
            Flip(self.plant, self.config.seed).__enter__()
        return nn.Sequential(
            nn.Linear(FEATURES, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, CLASSES)
        )

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The cross entropy; scaled in a run with a changed line, from one step on."""
        points, classes = batch
        scores = model(points)
        if self.plant.get("kind") == "line" and model.training and self._is_from(self.plant["step"]):
            scores = scores * 1.0009765625
        return {"loss": nn.functional.cross_entropy(scores, classes)}

    def _is_from(self, first: int) -> bool:
        """Whether this is step `first` or a later one, on any rank."""
        seeds = {
            nth_seed(seed_of("steps", self.config.seed, rank), step)
            for rank in range(4)
            for step in range(first - 1, 64)
        }
        return torch.default_generator.initial_seed() in seeds
