"""The curves of a run: in metrics.jsonl, in the event files, and as TensorBoard shows them."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir

Curves = dict[str, list[tuple[float, int, float | None]]]  # by tag: Unix seconds, step, value (None: not a number)


def expected(run: RunDir, log_every: int) -> Curves:
    """The curves in metrics.jsonl."""
    curves: Curves = defaultdict(list)
    when = 0.0
    for line in read_lines(run.metrics):
        when = line.get("time", when)  # an epoch has the time of its last step
        values: dict[str, float | None] = {}
        if "loss" not in line:
            values = {f"val/{name[4:]}": line[name] for name in line if name.startswith("val_")}
            values["train/epoch_loss"] = line["train_loss"]
        elif line["step"] % log_every == 0:
            names = ("loss", "lr", "grad_norm", "samples_per_s")
            values = {f"train/{name}": line[name] for name in names if name in line}
        for tag, value in values.items():
            curves[tag].append((when, line["step"], _single(value)))
    return curves


def files(run: RunDir) -> list[Path]:
    """The event files, in the order in which TensorBoard reads them."""
    return sorted(run.tensorboard.glob("*tfevents*"))


def on_disk(run: RunDir) -> Curves:
    """All points in the event files, one file after the other."""
    curves: Curves = defaultdict(list)
    for path in files(run):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                curves[value.tag].append((event.wall_time, event.step, _single(value.simple_value)))
    return curves


def loader(run: RunDir) -> EventAccumulator:
    """TensorBoard's loader for the folder; each `Reload` continues where the last one ended."""
    return EventAccumulator(str(run.tensorboard), size_guidance={SCALARS: 0})  # 0: all points


def loaded(tensorboard: EventAccumulator) -> Curves:
    """Reload, and return what TensorBoard shows."""
    tensorboard.Reload()
    return {
        tag: [(point.wall_time, point.step, _single(point.value)) for point in tensorboard.Scalars(tag)]
        for tag in tensorboard.Tags()[SCALARS]
    }


def _single(value: float | None) -> float | None:
    """Event files have single precision."""
    if value is None or value != value:
        return None
    return float(struct.unpack("f", struct.pack("f", value))[0])
