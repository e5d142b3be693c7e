"""Small runs of the ready-made loop, and how tests stop them, break them and compare them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.undisturbed import undisturbed_run

# 52 samples in batches of 8: 7 steps an epoch, the last of them short. The network has dropout, batch norm and 5 MB of
# weights, so more than one of DDP's gradient buckets (the first holds 1 MiB).
SMALL = [
    "task=tests.support.tasks.Signalled", "device=cpu", "data.name=fake", "data.args.samples=52", "data.args.classes=3",
    "data.args.image_size=8", "data.args.augment=true", "train.batch_size=8", "train.epochs=2",
    "train.log_every=3", "optim.lr=0.02",
]  # fmt: skip
EVERYTHING = [
    "data.workers=1", "train.accumulate=2", "train.ema_decay=0.9", "optim.name=adamw", "optim.lr=0.001",
    "optim.warmup_steps=3", "optim.clip_norm=1.0",
]  # fmt: skip
FAULTY = ("task=tests.support.tasks.Faulty", "launch.hang_timeout_s=5", "launch.max_failures=9")
KILLED = -signal.SIGKILL


def config(root: Path, name: str, ranks: int, options: tuple[str, ...]) -> Config:
    """A small run of `ranks` ranks."""
    words = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    wide = [] if "model.name=resnet18" in options else ["model.args.width=160"]
    return Config.load(None, [*SMALL, *wide, *options, *words])


def undisturbed(ranks: int, options: tuple[str, ...]) -> dict[str, Any]:
    """The fingerprint of such a run, undisturbed."""
    return undisturbed_run(config(Path("unused"), "unused", ranks, options))


def stop_and_resume(root: Path, name: str, ranks: int, options: tuple[str, ...], place: str) -> None:
    """Stop a run at `place` (see tests.support.tasks.Signalled), resume it, and compare it with the undisturbed one."""
    expected = undisturbed(ranks, options)
    small = config(root, name, ranks, options)
    stopped = Attempt(small, {"LASTSTEP_TEST_SIGNAL": place})
    codes = stopped.wait()
    number = signal.Signals[place.split()[0]]
    assert codes == [128 + number] * ranks, f"a stop, on every rank:\n{stopped.output()}"
    run = train(small)
    assert [a["lost_steps"] for a in read_lines(run.attempts)] == [0, 0]
    assert reasons(run)[-1] == "finished"
    assert fingerprint(run) == expected


def befall(root: Path, name: str, ranks: int, fault: str, *options: str) -> tuple[Attempt, list[int]]:
    """One attempt with this fault (see tests.support.tasks.Faulty); returns the attempt and its exit statuses.

    Ranks that the fault leaves halted are killed.
    """
    attempt = Attempt(config(root, name, ranks, (*FAULTY, *options)), {"LASTSTEP_TEST_FAULT": fault})
    kind, _, _, _, hit = fault.split()
    if kind in ("halt", "spin"):
        attempt.wait_for_end(*(rank for rank in range(ranks) if str(rank) not in hit.split(",")))
        attempt.signal(signal.SIGKILL, *map(int, hit.split(",")))  # as srun or the local launcher would
    return attempt, attempt.wait()


def only(attempt: Attempt) -> dict[str, Any]:
    """The record of the run's only attempt."""
    (record,) = read_lines(attempt.run.attempts)
    return record
