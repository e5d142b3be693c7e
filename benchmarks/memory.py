"""The memory of a rank compared with a bare loop, and whether it grows.

`python -m benchmarks.memory`. A perceptron with AdamW, whose state is about 120 MB, is trained on 1 and on 2 ranks by
the bare loop (a minimal hand-written one) and by Laststep with periodic asynchronous saves. Under Laststep, the first
attempt is stopped halfway and a second one resumes. The figure is the peak resident memory (VmHWM) of the rank with
the largest excess over the bare loop. A tiny model shows how much of the excess is due to the interpreter and the
imports. Beyond that, a rank may hold only the reusable buffer for its stripe of the state.

Then the tiny model is trained for 10,000 steps in 100 epochs, each with a validation and a save. Anonymous memory
(RssAnon), threads, open files, keys in the ranks' store and instances of Laststep's classes are counted after 1,000
steps and 10 saves, and again at the end. The loop pauses for each count until background work has finished. If any
limit is missed, the exit status is 1.
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

from benchmarks._measure import PROJECT, Check, conclude
from laststep.checkpoint.store import CheckpointStore
from laststep.rundir import RunDir
from laststep.task import Task

WORKLOAD, FOLDER = "LASTSTEP_MEMORY_WORKLOAD", "LASTSTEP_MEMORY_FOLDER"  # in the environment of every rank
RANKS = (1, 2)
DEADLINE_S = 300.0
MB = 1e6
# The peak of the bare loop itself varied by 10 MB between runs on 2 ranks.
NOISE_MB = 15.0
# malloc occasionally takes 2 MB more, once. This limit is 330 bytes per step, or 33 kB per save.
GROWTH_NOISE_MB = 3.0
SAVES = 10  # before the first count; no counted number may grow by this much during the 90 saves that follow
COUNTED = ("threads", "files", "keys", "objects")
REST_S = 6.0  # longer than the five seconds between updates of TensorBoard's curves


class Workload(NamedTuple):
    """A model, given by the widths of its layers, and how long it is trained."""

    widths: tuple[int, ...]
    epochs: int
    steps: int  # per epoch; each epoch ends with a save
    stopped: bool  # whether the run is stopped halfway and resumed


WORKLOADS = {
    "tiny": Workload((64, 64, 10), 4, 5, stopped=True),
    # One matrix of 37 MB: above 32 MB, malloc returns freed memory to the system at once, so the peak is sharp.
    "large": Workload((64, 3072, 3072, 10), 4, 5, stopped=True),
    "10,000 steps": Workload((64, 64, 10), 100, 100, stopped=False),
}
BATCH_SIZE = 16  # per rank


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory", description="The memory of a rank compared with a bare loop."
    )
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args(words).bare:
        bare()
        return 0
    with ThreadPoolExecutor(2) as pool:  # two trainings at a time: speed does not affect the memory that they take
        measurements = [pool.map(measure, RANKS) for measure in (peak_rows, growth_rows)]
        peaks, growth = ([row for rows in measured for row in rows] for measured in measurements)
    print(f"{'bare':>7} {'Laststep':>9} {'more':>7} {'tiny model':>11} {'save buffer':>12}   MB, peak of a rank")
    for row in peaks:
        what = f"{row['attempt']} attempt, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        print(
            f"{row['bare_mb']:>7.1f} {row['laststep_mb']:>9.1f} {row['more_mb']:>7.1f} {row['tiny_more_mb']:>11.1f} "
            f"{row['buffer_mb']:>12.1f}   {what}{'' if row['kept'] else ': more than its buffer'}"
        )
    print(f"\n{'memory':>18} {'threads':>9} {'files':>9} {'keys':>9} {'objects':>9}   after 1,000 steps > after 10,000")
    for row in growth:
        early, late = row["early"], row["late"]
        counts = " ".join(f"{early[name]:>4} >{late[name]:>3}" for name in COUNTED)
        print(
            f"{early['anonymous_mb']:>6.1f} > {late['anonymous_mb']:>6.1f} MB {counts}   rank {row['rank']} of "
            f"{row['ranks']}{'' if row['kept'] else ': grows'}"
        )
    more = [row["late"]["anonymous_mb"] - row["early"]["anonymous_mb"] for row in growth]
    counted = [row["late"][name] - row["early"][name] for row in growth for name in COUNTED]
    checks = [
        Check(
            "largest peak beyond the save buffer and the imports",
            NOISE_MB,
            [max(row["over_mb"] for row in peaks)],
            "MB",
        ),
        Check("largest growth over 9,000 steps", GROWTH_NOISE_MB, [max(more)], "MB"),
        Check("threads, files, keys or objects more over 90 saves", SAVES - 1, [max(counted)]),
    ]
    return conclude("memory", {"peaks": peaks, "growth": growth}, checks)


def peak_rows(ranks: int) -> list[dict[str, Any]]:
    """The peaks of both attempts compared with the bare loop's."""
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
    """The memory that one workload takes, in MB by rank: bare loop, both attempts of Laststep, stripes of the state."""

    def __init__(self, workload: str, ranks: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.bare, *self.attempts = [
                [report["peak_mb"] for report in train(words, workload, ranks, Path(folder))]
                for words in (["benchmarks.memory", "--bare"], *2 * [laststep(workload, ranks, folder)])
            ]
            manifest = CheckpointStore(_run(Path(folder)).checkpoints).newest(warn=print)
            assert manifest is not None
            self.stripes = [manifest.files[name]["bytes"] / MB for name in manifest.shards]

    def more(self, attempt: int, rank: int) -> float:
        """The peak of a rank in excess of the bare loop's."""
        return self.attempts[attempt][rank] - self.bare[rank]


def growth_rows(ranks: int) -> list[dict[str, Any]]:
    """The counts of each rank after 1,000 steps and at the end."""
    workload = "10,000 steps"
    with tempfile.TemporaryDirectory() as folder:
        reports = train(laststep(workload, ranks, folder), workload, ranks, Path(folder))
    rows = []
    for rank, counts in enumerate(reports):
        early, late = counts["early"], counts["late"]
        kept = late["anonymous_mb"] - early["anonymous_mb"] <= GROWTH_NOISE_MB
        kept &= all(late[name] - early[name] < SAVES for name in COUNTED)
        rows.append({"ranks": ranks, "rank": rank, "early": early, "late": late, "kept": kept})
    return rows


def laststep(workload: str, ranks: int, folder: str) -> list[str]:
    """The command-line words that train the workload as a user would."""
    load = WORKLOADS[workload]
    return [
        *("laststep", "--name=memory", f"launch.root={folder}", "task=benchmarks.memory.Perceptron"),
        *("optim.name=adamw", "optim.schedule=constant", f"train.batch_size={BATCH_SIZE * ranks}"),
        *(f"train.epochs={load.epochs}", f"checkpoint.every_steps={load.steps}"),
    ]


def train(words: list[str], workload: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Train once; returns the reports of all ranks, in rank order."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *words],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1", WORKLOAD: workload, FOLDER: str(folder)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    files = [folder / f"report_{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        raise RuntimeError(f"{words[0]} did not train:\n{done.stdout}{done.stderr}")
    reports = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return reports


def bare() -> None:
    """A minimal training loop."""
    load, model = _load(), _model()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _report_at_exit()
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
    """The same training under Laststep."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The same data, and a single batch of it for validation."""
        features, labels = _data()
        return TensorDataset(features, labels), TensorDataset(features[:BATCH_SIZE], labels[:BATCH_SIZE])

    def model(self) -> nn.Module:
        """The same model."""
        _report_at_exit()
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


def _report_at_exit() -> None:
    """From now on, count this rank's optimizer updates and what it holds; write a report when the process exits."""
    load, folder = _load(), Path(os.environ[FOLDER])
    rank = int(os.environ.get("RANK", 0))
    total = load.epochs * load.steps
    stop = load.stopped and _run(folder).path.exists() and not any(_run(folder).checkpoints.glob("step_*"))
    report: dict[str, Any] = {}
    done = 0

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if stop and done == total // 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if not load.stopped and done == SAVES * load.steps:
            _await_tensorboard(_run(folder))
            report["early"] = _held_at_rest()
        if not load.stopped and done == total:
            report["late"] = _held_at_rest()

    def write_report() -> None:
        report["peak_mb"] = _status("VmHWM")
        (folder / f"report_{rank}.json").write_text(json.dumps(report))

    register_optimizer_step_post_hook(after_step)
    atexit.register(write_report)


def _await_tensorboard(run: RunDir) -> None:
    """Wait for its import, once, by rank 0, five seconds after the first step: that memory does not count as growth."""
    deadline = time.monotonic() + 60
    while not list(run.tensorboard.glob("*")):
        if time.monotonic() > deadline:
            raise TimeoutError("no TensorBoard curves after 60 s")
        time.sleep(0.1)


def _held_at_rest() -> dict[str, Any]:
    """The minimum of each count over REST_S seconds, long enough for background work to finish."""
    deadline, samples = time.monotonic() + REST_S, []
    while time.monotonic() < deadline:
        samples.append(_held())
        time.sleep(0.2)
    return {name: min(sample[name] for sample in samples) for name in samples[0]}


def _held() -> dict[str, Any]:
    """What this process holds at the moment."""
    gc.collect()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    return {
        "anonymous_mb": round(_status("RssAnon"), 2),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "keys": store.num_keys() if store else 0,
        "objects": sum(_is_ours(item) for item in gc.get_objects()),
    }


def _is_ours(item: object) -> bool:
    with contextlib.suppress(Exception):
        return type(item).__module__.startswith("laststep.")
    return False


def _status(name: str) -> float:
    """A field of /proc/self/status, in MB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, f"no {name} in /proc/self/status"
    return int(found[1]) * 1024 / MB


if __name__ == "__main__":
    sys.exit(main())
