"""What train.sharding=full saves and costs: the memory of a rank, and the time of a step.

`python -m benchmarks.sharding [--pairs N] [--ranks N ...]`, five minutes. Decoders in fp32 with AdamW on CPUs, with one
thread per rank, compared with a bare loop over the same model that calls `fully_shard` on the same blocks and has no
other features. Laststep has its defaults: metrics of every step, progress, stop agreement, watchdog. No save falls into
the steps that are measured; benchmarks/sharded_save.py measures those.

Memory: the peak resident memory of the rank that needs most, over STEPS_OF_MEMORY steps of a model of 76 million
parameters, beyond what the process held when it began to build the model. One rank is not sharded. N ranks may use an
Nth of what parameters, gradients and moments take, and EXTRA_MB for activations and the blocks that are gathered. What
is freed goes back to the kernel at once (MALLOC_MMAP_THRESHOLD_, man 3 mallopt): otherwise glibc keeps up to a gigabyte
of the gathered blocks for reuse, with the bare loop too.

Time: the step of a smaller model. The two loops take turns of seconds, see benchmarks/_turns.py. If a limit is missed
by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from benchmarks import _turns
from benchmarks._measure import Check, conclude, spread
from benchmarks._turns import Training
from benchmarks.restore import status_of
from laststep.task import Task
from laststep.tasks.decoder import Decoder
from laststep.tasks.sizes import Size, size_of

# In the environment of every rank.
RESULT = "LASTSTEP_SHARDING_RESULT"  # the folder to which each rank writes its peak, if memory is measured
WORKLOAD = "LASTSTEP_SHARDING_WORKLOAD"
DEADLINE_S = 300.0
VOCABULARY = 256
LEARNING_RATE = 0.001
LIMIT = 1.02  # highest acceptable ratio of Laststep's step time to the bare loop's, if a step takes LEAST_STEP_S
LEAST_STEP_S = 0.05
TURN_S = 2.0
STEPS_OF_MEMORY = 4
EXTRA_MB = 150.0
OURS, BARE = "laststep", "bare FSDP2"


class Workload(NamedTuple):
    """A decoder, and what it is trained on."""

    size: Size
    window: int  # tokens
    per_rank: int  # windows
    steps: int  # of the time, more than any machine does in all turns

    @property
    def state_mb(self) -> float:
        """Parameters, gradients and two moments in fp32."""
        return 16 * self.size.parameters / 1e6


WORKLOADS = {
    "memory": Workload(size_of("small-25m", {"layers": 24}, VOCABULARY), 32, 1, STEPS_OF_MEMORY),
    "time": Workload(size_of("tiny-4m", {}, VOCABULARY), 128, 2, 2000),
}


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharding", description="What train.sharding saves and costs.")
    parser.add_argument("--pairs", type=int, default=7, help="turns of each loop (default: 7)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that shard (default: 2 4)")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.bare:
        bare()
        return 0
    if given.pairs < 2 or min(given.ranks) < 2:
        parser.error("--pairs and --ranks must be at least 2")
    peaks, checks = measure_memory(given.ranks)
    steps = []
    for ranks in given.ranks:
        found = _turns.compare(partial(start, BARE, ranks), partial(start, OURS, ranks), TURN_S, given.pairs)
        took = {BARE: statistics.median(found.plain_s), OURS: statistics.median(found.ours_s)}
        print(
            f"{ranks} ranks: " + ", ".join(f"{way} {1000 * s:.0f} ms per step" for way, s in took.items()), flush=True
        )
        what = f"step / {BARE}'s, {ranks} ranks"
        checks.append(Check(what, LIMIT, found.ratios, counts=took[BARE] >= LEAST_STEP_S))
        steps.append({"ranks": ranks, "ratio": spread(found.ratios), "step_s": took})
    parameters = WORKLOADS["memory"].size.parameters
    figures = {"pairs": given.pairs, "turn_s": TURN_S, "parameters": parameters, "memory": peaks, "time": steps}
    return conclude("sharding", figures, checks)


def measure_memory(sizes: list[int]) -> tuple[list[dict[str, Any]], list[Check]]:
    """The peaks of one rank and of each of these numbers of ranks, and their limits."""
    load, peaks, checks = WORKLOADS["memory"], [], []
    print(f"{load.size.parameters / 1e6:.0f} million parameters; a state of {load.state_mb:.0f} MB; peak of a rank:")
    for ranks in (1, *sizes):
        ways = (OURS,) if ranks == 1 else (OURS, BARE)
        peak = {way: round(peak_mb(way, ranks)) for way in ways}
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: " + ", ".join(f"{way} {mb} MB" for way, mb in peak.items()), flush=True
        )
        most = round(load.state_mb / ranks + EXTRA_MB)
        checks.append(Check(f"peak memory of one of {ranks} ranks", most, [peak[OURS]], "MB"))
        peaks.append({"ranks": ranks, "peak_mb": peak, "state_mb": round(load.state_mb / ranks)})
    return peaks, checks


def peak_mb(way: str, ranks: int) -> float:
    """The peak memory of the rank that needs most, in a training of STEPS_OF_MEMORY steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = _train(way, "memory", ranks, folder, {RESULT: name, "MALLOC_MMAP_THRESHOLD_": "262144"})
        try:
            training.wait(DEADLINE_S)
        finally:
            training.end()
        found = [float(path.read_text()) for path in folder.glob("peak*")]
        if len(found) != ranks:
            raise RuntimeError(f"{way} did not train:\n{(folder / 'log').read_text()}")
    return max(found)


def start(way: str, ranks: int, folder: Path) -> Training:
    """Start a training whose steps are to be timed."""
    return _train(way, "time", ranks, folder, {})


def _train(way: str, workload: str, ranks: int, folder: Path, env: dict[str, str]) -> Training:
    load = WORKLOADS[workload]
    words = ["benchmarks.sharding", "--bare"]
    if way == OURS:
        words = [
            "laststep", "--name=sharding", f"launch.root={folder}", "task=benchmarks.sharding.Windows", "device=cpu",
            f"train.sharding={'full' if ranks > 1 else 'none'}", "optim.name=adamw",
            f"optim.lr={LEARNING_RATE}", "optim.schedule=constant", f"train.batch_size={load.per_rank * ranks}",
            f"train.max_steps={load.steps}",
        ]  # fmt: skip
    return Training(words, ranks, {WORKLOAD: workload, **env}, folder)


class Windows(Task):
    """Laststep's part: the same model, data and loss."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Random tokens; validation runs once, after the last step."""
        windows = _windows()
        return TensorDataset(windows), TensorDataset(windows[: self.config.train.batch_size])

    def model(self) -> nn.Module:
        """A decoder."""
        _note_from_here()
        return Decoder(_load().size)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss of the next tokens."""
        return {"loss": loss_of(model, *batch)}


def bare() -> None:
    """A minimal loop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    _note_from_here()
    with torch.device("meta"):
        model = Decoder(_load().size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for windows in _windows()[dist.get_rank() :: dist.get_world_size()].split(_load().per_rank):
        loss_of(model, windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The loss of one batch, where the step of each loop begins: the time is noted here."""
    _at_step()
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


_at_step: Callable[[], None] = lambda: None  # noqa: E731


def _note_from_here() -> None:
    """From now on note when each step begins, or, if memory is measured, the peak of this rank at the last step."""
    import torch._dynamo  # noqa: F401  (the first step of FSDP2 imports it, and it is no part of the state)

    global _at_step
    _at_step = _turns.clock() if RESULT not in os.environ else _peak_writer(Path(os.environ[RESULT]))


def _peak_writer(folder: Path) -> Callable[[], None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man 5 proc)
    held, steps = status_of("VmRSS"), itertools.count(1)

    def note() -> None:
        if next(steps) == STEPS_OF_MEMORY:
            (folder / f"peak{os.environ.get('RANK', '0')}").write_text(str((status_of("VmHWM") - held) / 1e6))

    return note


def _load() -> Workload:
    return WORKLOADS[os.environ[WORKLOAD]]


@functools.cache
def _windows() -> Tensor:
    """All windows of a training."""
    load, generator = _load(), torch.Generator().manual_seed(0)
    windows = load.steps * load.per_rank * int(os.environ.get("WORLD_SIZE", "1"))
    return torch.randint(VOCABULARY, (windows, load.window + 1), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
