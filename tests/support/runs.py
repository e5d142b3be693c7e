"""Small runs of the ready-made loop: how tests stop, break and compare them; undisturbed ones are trained once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.config.schema import Checkpoint, Launch
from laststep.data.order import Order, seed_generators, seed_of
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.project import shared_folder, shared_lock
from tests.support.ranks import Attempt, fingerprint, reasons, train

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
Before = Callable[[], None] | None  # what each rank calls first


def config(root: Path, name: str, ranks: int, options: tuple[str, ...]) -> Config:
    """A small run of `ranks` ranks."""
    words = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    wide = [] if "model.name=resnet18" in options else ["model.args.width=160"]
    return Config.load(None, [*SMALL, *wide, *options, *words])


def undisturbed(ranks: int, options: tuple[str, ...], before: Before = None) -> dict[str, Any]:
    """The fingerprint of such a run, undisturbed."""
    return undisturbed_run(config(Path("unused"), "unused", ranks, options), before)


def stop_and_resume(
    root: Path, name: str, ranks: int, options: tuple[str, ...], place: str, before: Before = None
) -> None:
    """Stop a run at `place` (see tests.support.tasks.Signalled), resume it, and compare it with the undisturbed one."""
    expected = undisturbed(ranks, options, before)
    small = config(root, name, ranks, options)
    stopped = Attempt(small, {"LASTSTEP_TEST_SIGNAL": place}, before=before)
    codes = stopped.wait()
    number = signal.Signals[place.split()[0]]
    assert codes == [128 + number] * ranks, f"a stop, on every rank:\n{stopped.output()}"
    run = train(small, before=before)
    assert [a["lost_steps"] for a in read_lines(run.attempts)] == [0, 0]
    assert reasons(run)[-1] == "finished"
    assert fingerprint(run) == expected


def without_a_long_wait() -> None:
    """Have survivors wait for 3 s, not for 15, for a rank that holds what nobody else has: no supervisor says here that
    it was killed."""
    from laststep.attempt import rescue, rescue_plan

    for module in (rescue, rescue_plan):
        vars(module)["ALONE_S"] = 3.0


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


def undisturbed_run(config: Config, before: Before = None) -> dict[str, Any]:
    """The fingerprint of an undisturbed run with this configuration except for `launch`: only the number of ranks
    matters. All tests that ask for the same run share it.

    The tasks of tests/support/tasks and tests/gpu/tasks change nothing about an undisturbed run, so it is trained with
    the task that they derive from, and saved as often as any: that changes nothing either.
    """
    return _trained(_undisturbed(config), before)


def undisturbed_folder(config: Config) -> RunDir:
    """The folder of that run, which is to be read only."""
    plain = _undisturbed(config)
    _trained(plain)
    return RunDir(shared_folder() / str(plain.launch.name))


def _undisturbed(config: Config) -> Config:
    """The configuration of the undisturbed run, which is named for everything that matters."""
    derived = config.task.startswith(("tests.support.tasks.", "tests.gpu.tasks."))
    task = "classification" if derived else config.task
    launch = Launch(name="", root=str(shared_folder()), tasks_per_node=config.launch.world_size)
    saves = Checkpoint(start_from=config.checkpoint.start_from) if derived else config.checkpoint
    plain = dataclasses.replace(config, task=task, launch=launch, checkpoint=saves)
    name = hashlib.sha256(plain.to_yaml().encode()).hexdigest()[:16]
    return dataclasses.replace(plain, launch=dataclasses.replace(launch, name=name))


def _trained(config: Config, before: Before = None) -> dict[str, Any]:
    name = str(config.launch.name)
    found = shared_folder() / f"{name}.json"
    with shared_lock(name):
        if not found.exists():
            found.write_text(json.dumps(fingerprint(train(config, before=before))))
        known: dict[str, Any] = json.loads(found.read_text())
    return known


def check_samples(notes: Path, order: Order, total_steps: int) -> None:
    """Each step has learned once from the plain order's batch, which its ranks share in their order."""
    lines = sorted(read_lines(notes), key=lambda line: (line["step"], line["rank"]))
    learned: list[list[tuple[int, float]]] = [[] for _ in range(total_steps)]
    for line in lines:
        learned[line["step"]] += map(tuple, line["samples"])
    for step, samples in enumerate(learned):
        expected = []
        for index in order.batch(step).tolist():
            seed_generators(seed_of("sample", order.seed, order.epoch(step), index))
            expected.append((index, random.random()))
        assert samples == expected, f"step {step}"
