"""The time of a training step compared with a bare loop that does the same training.

`python -m benchmarks.overhead [--trials N]`. Two models on CPUs, on 1 and on 2 ranks of one thread each: a 64-64-10
perceptron on batches of 32 per rank, whose step is almost free, and a wider one whose step takes 10 ms or more. The
bare loop is a minimal hand-written one, written to be fast. Laststep, around a Task and around a custom loop, has
everything on: metrics of every step, progress, stop agreement, watchdog, an asynchronous save every second or two,
TensorBoard. Lightning and Accelerate are included if they are installed (`pip install lightning accelerate`).

The contenders take turns. A figure is the mean time of a step, leaving out the first fifth of the trial; a ratio is to
the bare loop of the same turn. If Laststep's median ratio is over its limit, the exit status is 1, and a profile of
one more trial shows where the time went.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from benchmarks._measure import PROJECT, spread, write_results
from trainer import Run
from trainer.task import Task

# In the environment of every rank.
RESULT = "LASTSTEP_OVERHEAD_RESULT"  # the file to which rank 0 writes its figure
PROFILE = "LASTSTEP_OVERHEAD_PROFILE"  # the file to which rank 0 writes its profile, if one is wanted
WORKLOAD = "LASTSTEP_OVERHEAD_WORKLOAD"
OURS = (str(PROJECT / "trainer"), str(PROJECT / "benchmarks"))
DEADLINE_S = 300.0
LEARNING_RATE, MOMENTUM = 0.01, 0.9


class Workload(NamedTuple):
    """A model, given by the widths of its layers, and how long it is trained."""

    widths: tuple[int, ...]
    batch_size: int  # per rank
    steps: tuple[int, int]  # on one rank, and on two
    limit: float  # highest acceptable ratio of Laststep's step time to the bare loop's


WORKLOADS = {
    "perceptron": Workload((64, 64, 10), 32, (12_000, 3000), 1.15),
    "10 ms": Workload((64, 1024, 768, 10), 256, (250, 200), 1.01),
}
RANKS = (1, 2)


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if Laststep misses a limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.overhead", description="The time of a step compared with a bare loop."
    )
    parser.add_argument("--trials", type=int, default=3, help="trials of each contender (default: 3)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.contender:
        CONTENDERS[given.contender]()
        return 0
    if given.trials < 2:
        parser.error("--trials must be at least 2")

    present = [name for name in CONTENDERS if name.split()[0] in ("bare", "laststep") or _installed(name.split()[0])]
    figures: list[dict[str, Any]] = []
    missed = 0
    print(f"{'median':>10} {'ratio to bare: median':>22} {'10 %':>6} {'90 %':>6}  ({given.trials} turns)")
    for workload in WORKLOADS:
        for ranks in RANKS:
            turns = [{name: trial(name, workload, ranks) for name in present} for _ in range(given.trials)]
            for name in present:
                seconds = [turn[name] for turn in turns]
                ratio = spread([turn[name] / turn["bare"] for turn in turns])
                figures.append({"model": workload, "ranks": ranks, "contender": name, "ratio": ratio})
                figures[-1]["us"] = spread([1e6 * s for s in seconds], 1)
                what = f"{name}, {workload}, {ranks} rank{'s' * (ranks > 1)}"
                late = name == "laststep" and ratio["median"] > WORKLOADS[workload].limit
                missed += late
                if late:
                    figures[-1]["profile_us"] = profile(workload, ranks)
                print(
                    f"{1e6 * statistics.median(seconds):>7.0f} us {ratio['median']:>22.3f} {ratio['p10']:>6.3f} "
                    f"{ratio['p90']:>6.3f}  {what}{f': over {WORKLOADS[workload].limit}' if late else ''}",
                    flush=True,
                )
                for where, us in figures[-1].get("profile_us", {}).items():
                    print(f"{us:>17.1f} us in {where}", flush=True)
    write_results("overhead", {"trials": given.trials, "limits_missed": missed, "steps": figures})
    return int(missed > 0)


def profile(workload: str, ranks: int) -> dict[str, float]:
    """The microseconds of a step of Laststep by function; calls into other packages count for the caller."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples"
        seconds = trial("laststep", workload, ranks, {PROFILE: str(samples)})
        counts: dict[str, int] = json.loads(samples.read_text())
    share = 1e6 * seconds / sum(counts.values())
    largest = sorted(counts, key=lambda where: -counts[where])[:15]
    return {where: round(share * counts[where], 1) for where in largest}


def trial(name: str, workload: str, ranks: int, more: Mapping[str, str] | None = None) -> float:
    """Train once, with `more` in the environment; returns seconds per step of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds"
        words = ["benchmarks.overhead", "--contender", name]
        if name.startswith("laststep"):
            words = ["trainer", "--name=overhead", f"launch.root={folder}", f"checkpoint.every_minutes={1 / 60}"]
            words += ["task=benchmarks.overhead.custom_loop"] if "custom" in name else _task_words(workload, ranks)
        launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", RESULT: str(result), WORKLOAD: workload, **(more or {})}
        command = [sys.executable, "-m", *launcher, *words]
        log = Path(folder) / "log"  # a file, as in a Slurm job
        with log.open("wb") as output:
            subprocess.run(command, cwd=PROJECT, env=env, stdout=output, stderr=output, timeout=DEADLINE_S)
        if not result.exists():
            raise RuntimeError(f"{name} did not train:\n{log.read_text()}")
        return float(result.read_text())


def _task_words(workload: str, ranks: int) -> list[str]:
    load = WORKLOADS[workload]
    return [
        "task=benchmarks.overhead.Perceptron",
        "data.name=fake",
        f"optim.lr={LEARNING_RATE}",
        "optim.schedule=constant",
        f"train.batch_size={load.batch_size * ranks}",
        f"train.max_steps={load.steps[ranks - 1]}",
    ]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _load() -> Workload:
    return WORKLOADS[os.environ[WORKLOAD]]


def _steps() -> int:
    return _load().steps[int(os.environ.get("WORLD_SIZE", 1)) - 1]


def _data() -> tuple[Tensor, Tensor]:
    """Features and labels, enough that no epoch ends during a trial."""
    load = _load()
    generator = torch.Generator().manual_seed(0)
    samples = _steps() * load.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    features = torch.randn(samples, load.widths[0], generator=generator)
    return features, torch.randint(0, load.widths[-1], (samples,), generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(0)
    widths = _load().widths
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)


def loss_of(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """The loss of one batch, where every contender's step begins: the time is recorded here. A hook on the optimiser
    would keep Laststep from calling the kernels itself."""
    _at_step()
    return functional.cross_entropy(model(features), labels)


_at_step: Callable[[], None] = lambda: None  # noqa: E731


def _measure() -> None:
    """From now on, record the time at each step of rank 0; at the last, write the seconds per step."""
    if int(os.environ.get("RANK", 0)):
        return
    times: list[float] = []
    steps = _steps()
    first = steps // 5

    def note() -> None:
        times.append(time.perf_counter())
        if PROFILE in os.environ and len(times) == first:
            _sample(Path(os.environ[PROFILE]))
        if len(times) == steps:
            signal.setitimer(signal.ITIMER_REAL, 0)
            Path(os.environ[RESULT]).write_text(str((times[-1] - times[first]) / (steps - 1 - first)))

    global _at_step
    _at_step = note


def _sample(target: Path) -> None:
    """From now on, sample a thousand times a second which function of Laststep the main thread is in; write the counts
    at exit."""
    counts: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None:
            file = Path(frame.f_code.co_filename).relative_to(PROJECT)
            counts[f"{file}: {frame.f_code.co_name}"] += 1

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    atexit.register(lambda: target.write_text(json.dumps(counts)))


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of this rank, in a random order that all ranks share."""
    load, (features, labels) = _load(), _data()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    for batch in order[rank::size].split(load.batch_size):
        yield features[batch], labels[batch]


def bare() -> None:
    """A minimal training loop."""
    model = _model()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _optimizer(model)
    _measure()
    for _, (x, y) in zip(range(_steps()), _batches()):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if "RANK" in os.environ:
        dist.destroy_process_group()


def accelerate() -> None:
    """Accelerate's training loop, as in its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    _measure()
    for _, (x, y) in zip(range(_steps()), _batches()):
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def lightning(barebones: bool = False) -> None:
    """Lightning's Trainer: with default settings and the loss logged, or barebones."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = loss_of(self.model, *batch)
            if not barebones:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return _optimizer(self.model)

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return _batches()

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=_steps(),
        default_root_dir=str(Path(os.environ[RESULT]).parent),
        barebones=barebones,
    )
    _measure()
    trainer.fit(Module(), DataLoader(Batches(), batch_size=None))


class Perceptron(Task):
    """The same training under Laststep, which `trial` starts as a user would."""

    draws = ()

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The same data; validation runs once, after the last step."""
        features, labels = _data()
        return TensorDataset(features, labels), TensorDataset(features[:64], labels[:64])

    def model(self) -> nn.Module:
        """The same model."""
        _measure()
        return _model()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The same loss."""
        return {"loss": loss_of(model, *batch)}


def custom_loop(run: Run) -> None:
    """The same training as a custom loop under Laststep."""
    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    optimizer = _optimizer(model)
    run.restore(model=model, optimizer=optimizer)
    _measure()
    for x, y in run.steps(run.loader(TensorDataset(*_data()), _load().batch_size * run.size)):
        loss = loss_of(model, x, y)
        loss.backward()
        run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def laststep() -> None:
    """Does nothing: `trial` starts it with `python -m trainer`."""


CONTENDERS: dict[str, Callable[[], None]] = {
    "bare": bare,
    "laststep": laststep,
    "laststep custom loop": laststep,
    "lightning": lightning,
    "lightning barebones": lambda: lightning(barebones=True),
    "accelerate": accelerate,
}


if __name__ == "__main__":
    sys.exit(main())
