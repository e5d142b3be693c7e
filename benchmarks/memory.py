"""What a rank's memory holds beside the bare loop's, and whether that grows.

`python -m benchmarks.memory`. A perceptron with AdamW, whose state is some 120 MB, is trained with 1 and with 2 ranks
by the bare loop, the shortest hand-written one, and by Laststep with periodic asynchronous saves; there the first
attempt is stopped half-way, and a second resumes. Taken is the most that was ever resident in a rank (the kernel's
VmHWM), on the rank where Laststep's is most above the bare loop's. A tiny model shows what of the difference is the
interpreter's and the imports'. Beyond that a rank may hold only its reusable buffer, for its stripe of the state.

Then the tiny model is trained for 10,000 steps in 100 epochs, each with a validation and a save. Memory that is no
file's (RssAnon), threads, open files, keys of the ranks' store and objects of Laststep's own are counted after 1,000
steps and 10 saves, and at the end; the loop stands still for that, until what is done beside it has come to rest. The
exit status says whether every limit is kept.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, TensorDataset

from benchmarks._measure import PROJECT, write_results
from trainer.checkpoint.store import CheckpointStore
from trainer.rundir import RunDir
from trainer.task import Task

WORKLOAD, FOLDER = "LASTSTEP_MEMORY_WORKLOAD", "LASTSTEP_MEMORY_FOLDER"  # in the environment of every rank
RANKS = (1, 2)
DEADLINE_S = 300.0
MB = 1e6
# The bare loop's own peak was seen to differ by 10 MB from run to run with 2 ranks.
NOISE_MB = 15.0
# Now and then malloc takes 2 MB more, once. Less than this is 330 bytes a step, or 33 kB a save.
GROWTH_NOISE_MB = 3.0
SAVES = 10  # until growth is first looked at; of anything that is counted fewer than these may come with 90 more
COUNTED = ("threads", "files", "keys", "objects")
REST_S = 6.0  # TensorBoard's curves are brought up to date every five seconds


class Workload(NamedTuple):
    """A model, by the widths of its layers, and how long it is trained."""

    widths: tuple[int, ...]
    epochs: int
    steps: int  # of each epoch, at whose end is a save
    stopped: bool  # half-way, and resumed


WORKLOADS = {
    "tiny": Workload((64, 64, 10), 4, 5, stopped=True),
    # One matrix of 37 MB: from 32 MB on malloc gives back what is freed at once, and the peak is not blurred.
    "large": Workload((64, 3072, 3072, 10), 4, 5, stopped=True),
    "10,000 steps": Workload((64, 64, 10), 100, 100, stopped=False),
}
BATCH_SIZE = 16  # of each rank


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the results; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description="A rank's memory beside the bare loop's.")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args(words).bare:
        bare()
        return 0
    with ThreadPoolExecutor(2) as pool:  # two trainings at a time: they take as much memory, whoever is fast
        looks = [pool.map(look, RANKS) for look in (peak_rows, growth_rows)]
        peaks, growth = ([row for rows in look for row in rows] for look in looks)
    print(f"{'bare':>7} {'Laststep':>9} {'more':>7} {'tiny model':>11} {'kept buffer':>12}   MB, the most in a rank")
    for row in peaks:
        what = f"{row['attempt']} attempt, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        print(
            f"{row['bare_mb']:>7.1f} {row['laststep_mb']:>9.1f} {row['more_mb']:>7.1f} {row['tiny_more_mb']:>11.1f} "
            f"{row['buffer_mb']:>12.1f}   {what}{'' if row['kept'] else ': over its buffer'}"
        )
    print(f"\n{'memory':>18} {'threads':>9} {'files':>9} {'keys':>9} {'objects':>9}   after 1,000 steps > after 10,000")
    for row in growth:
        early, late = row["early"], row["late"]
        counts = " ".join(f"{early[name]:>4} >{late[name]:>3}" for name in COUNTED)
        print(
            f"{early['anonymous_mb']:>6.1f} > {late['anonymous_mb']:>6.1f} MB {counts}   rank {row['rank']} of "
            f"{row['ranks']}{'' if row['kept'] else ': grows'}"
        )
    missed = sum(not row["kept"] for row in [*peaks, *growth])
    limits = {"noise_mb": NOISE_MB, "growth_noise_mb": GROWTH_NOISE_MB, "limits_missed": missed}
    write_results("memory", {**limits, "peaks": peaks, "growth": growth})
    return int(missed > 0)


def peak_rows(ranks: int) -> list[dict[str, Any]]:
    """The peaks of both attempts beside the bare loop's."""
    tiny, large = (Trial(workload, ranks) for workload in ("tiny", "large"))
    rows = []
    for number, attempt in enumerate(("first", "resumed")):
        more, rank = max((large.more(number, rank), rank) for rank in range(ranks))
        tiny_more, buffer = tiny.more(number, rank), large.stripes[rank]
        over = more - tiny_more - buffer
        figures = {
            "bare_mb": large.bare[rank],
            "laststep_mb": large.attempts[number][rank],
            "more_mb": more,
            "tiny_more_mb": tiny_more,
            "buffer_mb": buffer,
            "over_mb": over,
        }
        rounded = {name: round(value, 1) for name, value in figures.items()}
        rows.append({"ranks": ranks, "attempt": attempt, **rounded, "kept": over <= NOISE_MB})
    return rows


class Trial:
    """What one workload takes, in MB by rank: the bare loop, both attempts of Laststep, the stripes of its state."""

    def __init__(self, workload: str, ranks: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.bare, *self.attempts = [
                [told["peak_mb"] for told in train(words, workload, ranks, Path(folder))]
                for words in (["benchmarks.memory", "--bare"], *2 * [laststep(workload, ranks, folder)])
            ]
            manifest = CheckpointStore(_run(Path(folder)).checkpoints).newest(warn=print)
            assert manifest is not None
            self.stripes = [manifest.files[name]["bytes"] / MB for name in manifest.shards]

    def more(self, attempt: int, rank: int) -> float:
        """How much more a rank had than the bare loop's."""
        return self.attempts[attempt][rank] - self.bare[rank]


def growth_rows(ranks: int) -> list[dict[str, Any]]:
    """What each rank has after 1,000 steps, and at the end."""
    workload = "10,000 steps"
    with tempfile.TemporaryDirectory() as folder:
        told = train(laststep(workload, ranks, folder), workload, ranks, Path(folder))
    rows = []
    for rank, counts in enumerate(told):
        early, late = counts["early"], counts["late"]
        kept = late["anonymous_mb"] - early["anonymous_mb"] <= GROWTH_NOISE_MB
        kept &= all(late[name] - early[name] < SAVES for name in COUNTED)
        rows.append({"ranks": ranks, "rank": rank, "early": early, "late": late, "kept": kept})
    return rows


def laststep(workload: str, ranks: int, folder: str) -> list[str]:
    """The words that train it as a user would."""
    load = WORKLOADS[workload]
    return [
        *("trainer", "--name=memory", f"launch.root={folder}", "task=benchmarks.memory.Perceptron", "data.name=fake"),
        *("optim.name=adamw", "optim.schedule=constant", f"train.batch_size={BATCH_SIZE * ranks}"),
        *(f"train.epochs={load.epochs}", f"checkpoint.every_steps={load.steps}"),
    ]


def train(words: list[str], workload: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Train once; returns what each rank told."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *words],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1", WORKLOAD: workload, FOLDER: str(folder)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    files = [folder / f"told_{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        raise RuntimeError(f"{words[0]} did not train:\n{done.stdout}{done.stderr}")
    told = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return told


def bare() -> None:
    """The shortest loop."""
    load, model = _load(), _model()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _tell_at_exit()
    features, labels = _data()
    mine = range(int(os.environ.get("RANK", 0)), load.steps * _size(), _size())
    for _ in range(load.epochs):
        for number in mine:
            batch = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
            functional.cross_entropy(model(features[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if "RANK" in os.environ:
        dist.destroy_process_group()


class Perceptron(Task):
    """The same under Laststep."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The same data; validation has less."""
        features, labels = _data()
        return TensorDataset(features, labels), TensorDataset(features[:BATCH_SIZE], labels[:BATCH_SIZE])

    def model(self) -> nn.Module:
        """The same model."""
        _tell_at_exit()
        return _model()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The same loss."""
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1])}


def _load() -> Workload:
    return WORKLOADS[os.environ[WORKLOAD]]


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def _run(folder: Path) -> RunDir:
    return RunDir(folder / "memory")


def _data() -> tuple[Tensor, Tensor]:
    """Features and labels of one epoch."""
    load = _load()
    samples = load.steps * BATCH_SIZE * _size()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(samples, load.widths[0], generator=generator)
    return features, torch.randint(0, load.widths[-1], (samples,), generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(_load().widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _tell_at_exit() -> None:
    """From now on count this rank's updates, look at what it has, and tell that when the process ends."""
    load, folder = _load(), Path(os.environ[FOLDER])
    rank = int(os.environ.get("RANK", 0))
    total = load.epochs * load.steps
    stop = load.stopped and _run(folder).path.exists() and not any(_run(folder).checkpoints.glob("step_*"))
    told: dict[str, Any] = {}
    done = 0

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if stop and done == total // 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if not load.stopped and done == SAVES * load.steps:
            _await_tensorboard(_run(folder))
            told["early"] = _held_at_rest()
        if not load.stopped and done == total:
            told["late"] = _held_at_rest()

    def tell() -> None:
        told["peak_mb"] = _status("VmHWM")
        (folder / f"told_{rank}.json").write_text(json.dumps(told))

    register_optimizer_step_post_hook(after_step)
    atexit.register(tell)


def _await_tensorboard(run: RunDir) -> None:
    """Rank 0 imports it five seconds after the first step, once: what that takes is no growth."""
    deadline = time.monotonic() + 60
    while not list(run.tensorboard.glob("*")):
        if time.monotonic() > deadline:
            raise TimeoutError("TensorBoard's curves did not begin within 60 s")
        time.sleep(0.1)


def _held_at_rest() -> dict[str, Any]:
    """The least of what this process has within a time in which all that is done beside the steps ends."""
    deadline, looks = time.monotonic() + REST_S, []
    while time.monotonic() < deadline:
        looks.append(_held())
        time.sleep(0.2)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _held() -> dict[str, Any]:
    """What this process has at the moment."""
    gc.collect()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    return {
        "anonymous_mb": round(_status("RssAnon"), 2),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "keys": store.num_keys() if store else 0,
        "objects": sum(_is_ours(thing) for thing in gc.get_objects()),
    }


def _is_ours(thing: object) -> bool:
    with contextlib.suppress(Exception):
        return type(thing).__module__.startswith("trainer.")
    return False


def _status(name: str) -> float:
    """A line of this process's status, in MB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, f"Linux tells of no {name}"
    return int(found[1]) * 1024 / MB


if __name__ == "__main__":
    sys.exit(main())
