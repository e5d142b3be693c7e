"""What train.sharding=full saves and costs: the memory of a rank, and the time of a step.

`python -m benchmarks.sharding [--turns N] [--steps N] [--ranks N ...]`. Decoders in fp32 with AdamW on CPUs, with one
thread per rank, compared with a bare loop over the same model that calls `fully_shard` on the same blocks and has no
other features. Laststep has its defaults: metrics of every step, progress, stop agreement, watchdog. No save falls into
the steps that are measured; benchmarks/sharded_save.py measures those.

Memory: the peak resident memory of the rank that needs most, over STEPS_OF_MEMORY steps of a model of 76 million
parameters, beyond what the process held when it began to build the model. One rank is not sharded. N ranks may use an
Nth of what parameters, gradients and moments take, and EXTRA_MB for activations and the blocks that are gathered.

Time: the median time of a step of a smaller model, leaving out the first fifth of the steps. The two loops take turns,
and a ratio is that of two trainings in the same turn. The limit is met or missed if the 10th and the 90th percentile of
the ratios are closer together than the limit is to 1; otherwise it is missed only if even the 10th is over it, and the
verdict is "within noise" if not.

If a limit is missed, the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from benchmarks._measure import PROJECT, spread, write_results
from benchmarks.restore import status_of
from trainer.attempt.compiler import SWITCH
from trainer.task import Task
from trainer.tasks.decoder import Decoder
from trainer.tasks.sizes import Size, size_of

# In the environment of every rank.
RESULT = "LASTSTEP_SHARDING_RESULT"  # the folder to which each rank writes its figures
WORKLOAD = "LASTSTEP_SHARDING_WORKLOAD"
STEPS = "LASTSTEP_SHARDING_STEPS"
DEADLINE_S = 300.0
VOCABULARY = 256
LEARNING_RATE = 0.001
LIMIT = 1.02  # highest acceptable ratio of Laststep's step time to the bare loop's
LEAST_STEP_S = 0.05  # in a shorter step the limit says nothing
STEPS_OF_MEMORY = 4
EXTRA_MB = 150.0
OURS, BARE = "laststep", "bare FSDP2"


class Workload(NamedTuple):
    """A decoder, and what it is trained on."""

    size: Size
    window: int  # tokens
    per_rank: int  # windows

    @property
    def state_mb(self) -> float:
        """Parameters, gradients and two moments in fp32."""
        return 16 * self.size.parameters / 1e6


WORKLOADS = {
    "memory": Workload(size_of("small-25m", {"layers": 24}, VOCABULARY), 32, 1),
    "time": Workload(size_of("tiny-4m", {}, VOCABULARY), 128, 2),
}


class Trial(NamedTuple):
    """One training."""

    step_s: float  # median
    peak_mb: float  # of the rank that needs most, beyond what it held before the model


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharding", description="What train.sharding saves and costs.")
    parser.add_argument("--turns", type=int, default=4, help="trainings of each kind (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each training (default: 40)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that shard (default: 2 4)")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.bare:
        bare()
        return 0
    if given.turns < 2 or given.steps < 10 or min(given.ranks) < 2:
        parser.error("--turns and --ranks must be at least 2, --steps at least 10")
    memory, too_large = measure_memory(given.ranks)
    pairs = [measure_time(ranks, given.turns, given.steps) for ranks in given.ranks]
    missed = too_large + sum(pair["verdict"] == "missed" for pair in pairs)
    settings = {"turns": given.turns, "steps": given.steps, "limit": LIMIT, "limits_missed": missed}
    write_results("sharding", {**settings, "memory": memory, "time": pairs})
    return int(missed > 0)


def measure_memory(sizes: list[int]) -> tuple[dict[str, Any], int]:
    """The peaks of one rank and of each of these numbers of ranks, and how many are over their limit."""
    load, peaks, missed = WORKLOADS["memory"], [], 0
    print(f"{load.size.parameters / 1e6:.0f} million parameters; a state of {load.state_mb:.0f} MB; peak of a rank:")
    for ranks in (1, *sizes):
        ways = (OURS,) if ranks == 1 else (OURS, BARE)
        peak = {way: round(trial(way, "memory", ranks, STEPS_OF_MEMORY).peak_mb) for way in ways}
        most = load.state_mb / ranks + EXTRA_MB
        over = peak[OURS] > most
        missed += over
        peaks.append({"ranks": ranks, "peak_mb": peak, "state_mb": round(load.state_mb / ranks), "limit_mb": most})
        said = ", ".join(f"{way} {mb} MB" for way, mb in peak.items())
        print(f"{ranks:>2} ranks: {said} (limit {most:.0f}){' MISSED' * over}", flush=True)
    return {"parameters": load.size.parameters, "peaks": peaks}, missed


def measure_time(ranks: int, turns: int, steps: int) -> dict[str, Any]:
    """How long a step takes, in turns."""
    trials = [{way: trial(way, "time", ranks, steps).step_s for way in (BARE, OURS)} for _ in range(turns)]
    ratio = spread([each[OURS] / each[BARE] for each in trials])
    took = {way: statistics.median(each[way] for each in trials) for way in (BARE, OURS)}
    verdict = judged(ratio)
    print(
        f"{ranks:>2} ranks: {BARE} {1000 * took[BARE]:.0f} ms, {OURS} {1000 * took[OURS]:.0f} ms per step, ratio "
        f"{ratio['median']:.3f} ({ratio['p10']:.3f} to {ratio['p90']:.3f}, limit {LIMIT}): {verdict}"
        + "; too short a step for this limit"
        * (took[BARE] < LEAST_STEP_S),
        flush=True,
    )
    return {"ranks": ranks, "ratio": ratio, "step_s": took, "verdict": verdict}


def judged(ratio: dict[str, float]) -> str:
    """Whether the limit is met; "within noise" if these ratios cannot say."""
    if ratio["p90"] - ratio["p10"] > LIMIT - 1:
        return "missed" if ratio["p10"] > LIMIT else "within noise"
    return "missed" if ratio["median"] > LIMIT else "met"


def trial(way: str, workload: str, ranks: int, steps: int) -> Trial:
    """Train once."""
    load = WORKLOADS[workload]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "trainer", "--name=sharding", f"launch.root={folder}", "task=benchmarks.sharding.Windows", "device=cpu",
            "data.name=fake", f"train.sharding={'full' if ranks > 1 else 'none'}", "optim.name=adamw",
            f"optim.lr={LEARNING_RATE}", "optim.schedule=constant", f"train.batch_size={load.per_rank * ranks}",
            f"train.max_steps={steps}",
        ]  # fmt: skip
        if way == BARE:
            words = ["benchmarks.sharding", "--bare"]
        launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", RESULT: folder, WORKLOAD: workload, STEPS: str(steps), SWITCH: "1"}
        log = Path(folder) / "log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", *launcher, *words]
            subprocess.run(command, cwd=PROJECT, env=env, stdout=output, stderr=output, timeout=DEADLINE_S)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
        if len(found) != ranks:
            raise RuntimeError(f"{way} did not train:\n{log.read_text()}")
    return Trial(found[0]["step_s"], max(each["peak_mb"] for each in found))


class Windows(Task):
    """Laststep's part: the same model, data and loss."""

    draws = ()

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Random tokens; validation runs once, after the last step."""
        windows = _windows()
        return TensorDataset(windows), TensorDataset(windows[: self.config.train.batch_size])

    def model(self) -> nn.Module:
        """A decoder."""
        _measure()
        return Decoder(_load().size)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss of the next tokens."""
        return {"loss": loss_of(model, *batch)}


def bare() -> None:
    """A minimal loop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    _measure()
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


def _measure() -> None:
    """From now on note the time at each step, and at the last write the figures of this rank."""
    import torch._dynamo  # noqa: F401  (the first step of FSDP2 imports it, and it is no part of the state)

    times: list[float] = []
    steps = int(os.environ[STEPS])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man 5 proc)
    held = status_of("VmRSS")

    def note() -> None:
        times.append(time.perf_counter())
        if len(times) == steps:
            figures = {
                "step_s": statistics.median(after - before for before, after in pairwise(times[steps // 5 :])),
                "peak_mb": (status_of("VmHWM") - held) / 1e6,
            }
            rank = os.environ.get("RANK", "0")
            (Path(os.environ[RESULT]) / f"rank{rank}.json").write_text(json.dumps(figures))

    global _at_step
    _at_step = note


def _load() -> Workload:
    return WORKLOADS[os.environ[WORKLOAD]]


@functools.cache
def _windows() -> Tensor:
    """All windows of a training."""
    load, generator = _load(), torch.Generator().manual_seed(0)
    windows = int(os.environ[STEPS]) * load.per_rank * int(os.environ.get("WORLD_SIZE", "1"))
    return torch.randint(VOCABULARY, (windows, load.window + 1), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
