"""The time of a training step compared with a bare loop that does the same training.

`python -m benchmarks.overhead [--runs N] [--starts N] [--all]`, five minutes a run. Two models on CPUs, on 1 and on 2
ranks of one thread each: a 64-64-10 perceptron on batches of 32 per rank, whose step is almost free, and a wider one
whose step takes 10 ms or more. The bare loop is a minimal hand-written one, written to be fast. Laststep has everything
on: metrics of every step, progress, stop agreement, watchdog, TensorBoard, an asynchronous save every five seconds (the
default is ten minutes). With --all it is also measured around a custom loop, as are Lightning and Accelerate, where
they are installed (`pip install lightning accelerate`). In every contender two ranks use gloo.

Each of them takes turns with the bare loop, see benchmarks/_turns.py. A turn is half as long as the interval at which
TensorBoard's curves are updated and states are saved, so about every turn has an update and a save. A ratio compares
the mean time of a step in a turn with that of the bare loop's turns before and after it. The median ratio of Laststep
has a limit; if it is over it by more than the noise in any run, the exit status is 1, and a profile shows where the
time went.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

from benchmarks import _parts, _turns
from benchmarks._measure import MISSED, PROJECT, Check, conclude, spread
from benchmarks._turns import Comparison, Training
from laststep import Run
from laststep.records.tensorboard_writer import EVERY_S
from laststep.task import Task

# In the environment of every rank.
PROFILE = "LASTSTEP_OVERHEAD_PROFILE"  # the file to which rank 0 writes its profile, if one is wanted
WORKLOAD, FOLDER = "LASTSTEP_OVERHEAD_WORKLOAD", "LASTSTEP_OVERHEAD_FOLDER"
OURS = (str(PROJECT / "laststep"), str(PROJECT / "benchmarks"))
TURN_S = EVERY_S / 2
PROFILE_S = 8.0
LEARNING_RATE, MOMENTUM = 0.01, 0.9


class Workload(NamedTuple):
    """A model, given by the widths of its layers, and what its step may cost. Values by rank: on one, and on two."""

    widths: tuple[int, ...]
    batch_size: int  # per rank
    steps: tuple[int, int]  # more than any machine does in all turns
    limits: tuple[float, float]  # highest acceptable ratio of Laststep's step time to the bare loop's


WORKLOADS = {
    "perceptron": Workload((64, 64, 10), 32, (300_000, 100_000), (1.0, 1.05)),
    "10 ms": Workload((64, 1024, 768, 10), 256, (20_000, 10_000), (1.0, 1.05)),
}
RANKS = (1, 2)
STARTS, PAIRS = 2, 4
PAIRS_OF_PEERS = 3  # and one start: their ratios have no limit


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if Laststep misses a limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.overhead", description="The time of a step compared with a bare loop."
    )
    parser.add_argument("--runs", type=int, default=1, help="how often to measure everything (default: 1)")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"processes of each contender (default: {STARTS})")
    parser.add_argument("--all", action="store_true", help="also a custom loop, and the peers that are installed")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.contender:
        CONTENDERS[given.contender]()
        return 0
    if given.starts < 1 or given.runs < 1:
        parser.error("--starts and --runs must be at least 1")

    names = [name for name in CONTENDERS if name.startswith("laststep") or _installed(name.split()[0])]
    runs = [measured(names if given.all and not number else ["laststep"], given.starts) for number in range(given.runs)]
    figures = {"steps": runs[0][0], "runs": [[check.record() for check in checks] for _, checks in runs]}
    checks = [check for _, checks in runs for check in checks]
    return conclude("overhead", {"starts": given.starts, "pairs": PAIRS, "turn_s": TURN_S, **figures}, checks)


def measured(names: list[str], starts: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """One run with these contenders: what the results keep of it, and Laststep's limits."""
    figures: list[dict[str, Any]] = []
    checks = []
    print(f"{'step':>10} {'bare':>10} {'ratio: median':>14} {'10 %':>6} {'90 %':>6}  ({starts * PAIRS} pairs of turns)")
    for workload, load in WORKLOADS.items():
        for ranks in RANKS:
            for name in names:
                found = compared(name, workload, ranks, starts)
                figures += entries(name, workload, ranks, found)
                if name == "laststep":
                    what = f"step / bare loop's, {_described(workload, ranks)}"
                    checks.append(Check(what, load.limits[ranks - 1], found.ratios))
                    if checks[-1].verdict() == MISSED:
                        figures[-1]["profile_us"] = profile(workload, ranks)
                _print(figures[-1], spread(found.plain_s, 6)["median"])
    return figures, checks


def compared(name: str, workload: str, ranks: int, starts: int) -> Comparison:
    """Let this contender and the bare loop take turns."""
    bare, ours = (partial(start, one, workload, ranks, {}) for one in ("bare", name))
    if name != "laststep":
        return _turns.compare(bare, ours, TURN_S, PAIRS_OF_PEERS)
    return _turns.compare(bare, ours, TURN_S, PAIRS, starts)


def entries(name: str, workload: str, ranks: int, found: Comparison) -> list[dict[str, Any]]:
    """What the results keep of a comparison: the contender's entry, and before Laststep's the bare loop's."""
    about = {"model": workload, "ranks": ranks}
    bare = {**about, "contender": "bare", "us": spread([1e6 * s for s in found.plain_s], 1)}
    ours = {
        **about,
        "contender": name,
        "ratio": spread(found.ratios),
        "us": spread([1e6 * s for s in found.ours_s], 1),
    }
    return [bare, ours] if name == "laststep" else [ours]


def _described(workload: str, ranks: int) -> str:
    return f"{workload}, {ranks} rank{'s' * (ranks > 1)}"


def _print(entry: dict[str, Any], bare_s: float) -> None:
    ratio = entry["ratio"]
    print(
        f"{entry['us']['median']:>7.0f} us {1e6 * bare_s:>7.0f} us {ratio['median']:>14.3f} {ratio['p10']:>6.3f} "
        f"{ratio['p90']:>6.3f}  {entry['contender']}, {_described(entry['model'], entry['ranks'])}",
        flush=True,
    )
    for where, us in entry.get("profile_us", {}).items():
        print(f"{us:>17.1f} us in {where}", flush=True)


def profile(workload: str, ranks: int) -> dict[str, float]:
    """The microseconds of a step of Laststep by function; calls into other packages count for the caller."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples"
        training = start("laststep", workload, ranks, {PROFILE: str(samples)}, Path(folder))
        try:
            training.await_start()
            step_s = training.turn(PROFILE_S)
            training.send(signal.SIGCONT)
            training.stop()
        finally:
            training.end()
        counts: dict[str, int] = json.loads(samples.read_text())
    share = 1e6 * step_s / sum(counts.values())
    largest = sorted(counts, key=lambda where: -counts[where])[:15]
    return {where: round(share * counts[where], 1) for where in largest}


def start(
    name: str, workload: str, ranks: int, more: dict[str, str], folder: Path, words: Sequence[str] = ()
) -> Training:
    """Start to train, with `more` in the environment, and these key=value `words` for Laststep."""
    command = ["benchmarks.overhead", "--contender", name]
    if name.startswith("laststep"):
        command = ["laststep", "--name=overhead", f"launch.root={folder}", f"checkpoint.every_minutes={EVERY_S / 60}"]
        command += ["task=benchmarks.overhead.custom_loop"] if "custom" in name else _task_words(workload, ranks)
    return Training([*command, *words], ranks, {WORKLOAD: workload, FOLDER: str(folder), **more}, folder)


def _task_words(workload: str, ranks: int) -> list[str]:
    load = WORKLOADS[workload]
    return [
        "task=benchmarks.overhead.Perceptron",
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
    """Features and labels, enough that no epoch ends during a trial. The features of a sample are those of the one
    before, moved on by one: so many would not fit in memory otherwise."""
    load = _load()
    generator = torch.Generator().manual_seed(0)
    samples, width = _steps() * load.batch_size * int(os.environ.get("WORLD_SIZE", 1)), load.widths[0]
    features = torch.randn(samples + width, generator=generator).as_strided((samples, width), (1, 1))
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
    """From now on, note the time at each step of rank 0, and on every rank that of each part if that is wanted."""
    global _at_step
    _at_step = note = _turns.clock()
    if _parts.FOLDER in os.environ:
        _at_step = _parts.measure_parts(ours=__name__ != "__main__", note=note)

    def begin() -> None:
        global _at_step
        _sample(Path(os.environ[PROFILE]))
        _at_step = note

    if PROFILE in os.environ and not int(os.environ.get("RANK", 0)):
        _at_step = begin


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

    def write() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        target.write_text(json.dumps(counts))

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    atexit.register(write)


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
        default_root_dir=os.environ[FOLDER],
        barebones=barebones,
    )
    _measure()
    trainer.fit(Module(), DataLoader(Batches(), batch_size=None))


class Perceptron(Task):
    """The same training under Laststep, which `start` starts as a user would."""

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
    model = _model()  # on one rank without DistributedDataParallel, as the bare loop
    if run.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
    """Does nothing: `start` starts it with `python -m laststep`."""


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
