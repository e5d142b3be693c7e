"""Loops that train in the test's own process, a ready-made one and a custom one, and what they have saved."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.checkpoint.pack import load, map_tensors
from laststep.checkpoint.restore import NewestCheckpoint
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.loops.engine import AttemptContext, Engine
from laststep.loops.run import make_custom_loop
from laststep.loops.task_loop import TaskLoop
from laststep.ranks.device import set_up_device
from laststep.ranks.group import Group
from laststep.ranks.stop import Stop
from laststep.ranks.watchdog import Probes, Watchdog
from laststep.records.metrics import read_lines
from laststep.records.progress import StartupTimer
from laststep.rundir import RunDir
from laststep.task import Task
from tests.support.records import a_world
from tests.support.runs import config


class Doubling(Task):
    """Batch norm, an average, and AdamW whose counters are on the CPU (not fused)."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def datasets(self) -> Any:
        x = torch.arange(60.0).view(20, 3) / 60
        return TensorDataset(x, 2 * x), TensorDataset(x[:4], 2 * x[:4])

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, foreach=True)

    def step(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}


def doubling(run: Run) -> None:
    """A loop with a schedule that steps within each step, and an object of the user's own."""
    x = torch.arange(60.0).view(20, 3) / 60
    loader = run.loader(TensorDataset(x, 2 * x), 4)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(run.device)
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=True)
    second = SGD(model.parameters(), lr=0.001, momentum=0.9)
    schedule, seen = StepLR(optimizer, 2, gamma=0.5), {"batches": 0}
    run.restore(model=model, optimizer=optimizer, second=second, schedule=schedule, seen=seen)
    for _ in run.epochs(2):
        for inputs, labels in run.steps(loader):
            seen["batches"] += 1
            loss = nn.functional.mse_loss(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            second.step()
            schedule.step()
            run.log(loss=loss)
        schedule.step()


@contextlib.contextmanager
def a_loop(
    kind: str | type[Task],
    settings: Config,
    closing: contextlib.ExitStack,
    function: Callable[[Run], Any] = doubling,
    group: Group | None = None,
) -> Iterator[Engine]:
    """A loop in this process, restored from the newest checkpoint: "task", "custom", which calls `function`, or that of
    a Task. It may be one of a `group` of several ranks."""
    run = RunDir(Path(settings.launch.root) / str(settings.launch.name))
    run.path.mkdir(parents=True, exist_ok=True)
    world = group.world if group else a_world()
    device = set_up_device(settings, world)
    group = group or Group(world, dist.HashStore(), device, "gloo" if device.type == "cpu" else "nccl")
    watch = Watchdog(Probes(world=lambda: world), 600, on_fault=lambda fault: None)
    signals: Any = type("Signals", (), {"on_first": lambda self, act: None, "first": None})()
    stop = Stop(world, group.store, signals, lambda why: None)
    context = AttemptContext(
        settings, run, CheckpointStore(run.checkpoints), group, stop, watch, StartupTimer(), closing
    )
    try:
        task = Doubling if kind == "task" else kind
        loop = make_custom_loop(function, context) if isinstance(task, str) else TaskLoop(task, context)
        engine = loop.engine
        closing.callback(engine.tensorboard.end)  # its thread waits for minutes else
        reading = NewestCheckpoint(engine.store, group, engine.store.candidates(print), print, lambda _: None)
        engine.restore(reading.finish())
        yield engine
    finally:
        gc.unfreeze()  # the loop has frozen all objects of this process
        closing.close()
        watch.close()
        stop.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def run_function(function: Callable[[Run], Any], root: Path, name: str, *options: str) -> RunDir:
    """A run of one rank whose loop is this function, from its newest checkpoint to its end."""
    with (
        contextlib.ExitStack() as closing,
        a_loop("custom", settings_of(root, name, *options), closing, function) as engine,
    ):
        engine.run()
    return RunDir(root / name)


def settings_of(root: Path, name: str, *options: str) -> Config:
    """Two epochs of 5 steps."""
    fixed = ("train.batch_size=4", "train.ema_decay=0.9", "train.log_every=2", "optim.warmup_steps=3")
    return config(root, name, 1, (*fixed, *options))


def undisturbed_run(kind: str, root: Path, *options: str) -> RunDir:
    """A run with a checkpoint after each step."""
    every = ("checkpoint.every_steps=1", "checkpoint.keep_last=99", "checkpoint.asynchronous=false")
    settings = settings_of(root, "undisturbed", *every, *options)
    with contextlib.ExitStack() as closing, a_loop(kind, settings, closing) as engine:
        engine.run()
    return RunDir(root / "undisturbed")


def comparable(state: Any) -> Any:
    """A state with its tensors as bytes; how many lines belong to it depends on nothing else, so that is left in."""
    return map_tensors(state, lambda t: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()))  # type: ignore


def checkpoint(run: RunDir, step: int) -> Any:
    """The state in a checkpoint."""
    store = CheckpointStore(run.checkpoints)
    return comparable(load(store.path(step), store.verify(step)))


def lines(run: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in ("time", "samples_per_s")} for line in read_lines(run.metrics)]
