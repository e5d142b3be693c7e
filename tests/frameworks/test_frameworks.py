"""What users of other frameworks take for granted is as preemption-proof as our own loop: stopped and killed within an
accumulation and in a validation, it ends with the weights and metrics of an undisturbed run. tests/proof/test_ports.py
trains whole scripts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.support import framework_loops
from tests.support.needs import require_package
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_run

STOPPED, KILLED = 128 + signal.SIGTERM, -signal.SIGKILL


def config(root: Path, name: str, task: str) -> Config:
    """A run of a function in tests/support/framework_loops.py on two ranks, which saves at stops and rescues alone."""
    place = [f"launch.root={root}", f"launch.name={name}", "launch.tasks_per_node=2"]
    options = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    options += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]
    return Config.load(None, [f"task=tests.support.framework_loops.{task}", *options, *place])


@pytest.mark.parametrize(
    ("task", "package", "places"),
    [
        ("accelerate_accumulates", "accelerate", ("step 3", "step 4", "step 2")),
        ("fabric_accumulates", "lightning", ("validation 2", "step 4", "step 2")),
        ("lightning_whole", "lightning", ("validation 4", "step 2", "step 3")),
        ("lightning_manual", "lightning", ("step 3", "step 4", "validation 4")),
        ("lightning_swa", "lightning", ("step 9", "step 4", "validation 4")),
        ("transformers_whole", "transformers", ("step 3", "step 4", "validation 2")),
    ],
)
def test_whole(root: Path, task: str, package: str, places: tuple[str, str, str]) -> None:
    """Gradients that are accumulated, and beside them a datamodule, averaged models, two optimisers, the best model at
    the end, counters of a subclass. Struck within an accumulation, whose gradients are in no checkpoint, and in a
    validation."""
    require_package(package)
    disturbed = config(root, task, task)
    for place, number, rank, codes in zip(
        places, ("SIGTERM", "SIGKILL", "SIGTERM"), (1, 0, 1), ([STOPPED, STOPPED], [KILLED, 1], [STOPPED, STOPPED])
    ):
        attempt = Attempt(disturbed, {"LASTSTEP_TEST_SIGNAL": f"{number} {place} rank {rank}"})
        assert attempt.wait() == codes, attempt.output()
    run = train(disturbed)
    assert fingerprint(run) == undisturbed_run(config(root, "unused", task))
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("task", "package"),
    [
        ("accelerate_sharded", "accelerate"),
        ("lightning_sharded", "lightning"),
        ("transformers_sharded", "transformers"),
    ],
)
def test_sharded(root: Path, task: str, package: str) -> None:
    """FSDP2 as each framework sets it up, with accumulation: each rank saves its own part at a stop, and loads it."""
    require_package(package)
    disturbed = config(root, task, task)
    for place in ("step 3", "step 4"):
        attempt = Attempt(disturbed, {"LASTSTEP_TEST_SIGNAL": f"SIGTERM {place} rank 1"})
        assert attempt.wait() == [STOPPED, STOPPED], attempt.output()
    run = train(disturbed)
    assert fingerprint(run) == undisturbed_run(config(root, "unused", task))
    assert [record["start_step"] for record in read_lines(run.attempts)] == [0, 2, 5]


def test_refused_settings(root: Path) -> None:
    """Each would end in other weights, or in a checkpoint of the framework's own at SIGTERM: one line says what to
    write instead, before the training."""
    for package in ("lightning", "transformers"):
        require_package(package)
    attempt = Attempt(config(root, "refused", "refused"))
    attempt.wait()
    said = [line for line in attempt.logs[0].read_text().splitlines() if line.startswith("refused: ")]
    settings = [*framework_loops.LIGHTNING_REFUSES, *framework_loops.TRANSFORMERS_REFUSES]
    assert len(said) == len(settings), attempt.output()
    for name, line in zip(settings, said):
        assert f"({name}=" in line, line


def test_lightning_saves_nothing(root: Path) -> None:
    """Its files would differ after a resume. Scripts have such callbacks: each kind is left out, and named once."""
    require_package("lightning")
    attempt = Attempt(config(root, "saves", "lightning_saves"))
    assert attempt.wait() == [0, 0], attempt.output()
    said = [line for line in attempt.logs[0].read_text().splitlines() if " is left out, as Laststep saves" in line]
    assert [line.split("WARNING: ")[1].split()[0] for line in said] == ["ModelCheckpoint", "Own"], attempt.output()
    assert not (root / "theirs").exists()
