"""What users of other frameworks take for granted is as preemption-proof as our own loop: stopped and killed within an
accumulation and in a validation, it ends with the weights and metrics of an undisturbed run. tests/proof/test_ports.py
trains whole scripts."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from laststep.cli.main import main
from laststep.cli.verify import inspect
from laststep.config.config import Config
from laststep.loops.custom_loop import CustomLoop
from laststep.records.metrics import read_lines
from tests.support import framework_loops
from tests.support.needs import require_package
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import undisturbed_run, without_a_long_wait

STOPPED, KILLED = 128 + signal.SIGTERM, -signal.SIGKILL


def config(root: Path, name: str, task: str, *more: str) -> Config:
    """A run of a function in tests/support/framework_loops.py on two ranks, which saves at stops and rescues alone."""
    place = [f"launch.root={root}", f"launch.name={name}", "launch.tasks_per_node=2"]
    options = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    options += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]
    return Config.load(None, [f"task=tests.support.framework_loops.{task}", *options, *place, *more])


@pytest.mark.parametrize(
    ("task", "package", "places"),
    [
        ("accelerate_accumulates", "accelerate", ("step 3", "step 4", "step 2")),
        ("dpo", "trl", ("step 3", "step 4", "validation 1")),
        ("dpo_reference", "trl", ("step 3", "step 4", "step 2")),
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


SHARDED = [
    ("accelerate_sharded", "accelerate"),
    ("lightning_sharded", "lightning"),
    ("transformers_sharded", "transformers"),
]


@pytest.mark.parametrize(("task", "package"), SHARDED)
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


@pytest.mark.parametrize("copied", [False, True], ids=["alone", "copied"])
@pytest.mark.parametrize(("task", "package"), SHARDED)
def test_a_shard_is_lost(root: Path, task: str, package: str, copied: bool) -> None:
    """A rank dies in the fourth step, and nobody else has its shard: the run is back at its newest checkpoint. With a
    copy in the memory of another node no step is lost."""
    require_package(package)
    copies = ("checkpoint.replicas=1", "launch.nodes=2", "launch.tasks_per_node=1") if copied else ()
    disturbed = config(root, f"{task}-{copied}", task, "checkpoint.every_steps=2", *copies)
    nodes = 2 if copied else 1
    attempt = Attempt(disturbed, {"LASTSTEP_TEST_SIGNAL": "SIGKILL step 7 rank 1"}, nodes, without_a_long_wait)
    assert attempt.wait() == [1, KILLED], attempt.output()
    attempt = Attempt(disturbed, nodes=nodes)
    assert attempt.wait() == [0, 0], attempt.output()
    assert fingerprint(attempt.run) == undisturbed_run(config(root, "unused", task))
    killed, resumed = read_lines(attempt.run.attempts)
    assert (killed["end_step"], killed["lost_steps"], resumed["start_step"]) == ((3, 0, 3) if copied else (3, 1, 2))


def test_adapters_alone(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of a PEFT model is as small as what is trained, and exported it is a file of PEFT's own. The base
    model is not in it, so a script that loads another one is refused, and told in what they differ."""
    require_package("trl")
    from peft import LoraConfig, PeftModel

    stopped = config(root, "adapters", "sft")
    assert Attempt(stopped, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 0"}).wait() == [STOPPED, STOPPED]
    attempt = Attempt(stopped, {"LASTSTEP_TEST_BASE": "2"})
    assert attempt.wait() == [1, 1], attempt.output()
    assert "the base model is not the one that this run began with: base_model.model.transformer.wte.weight, " in (
        attempt.output()
    )
    run = train(stopped)
    (size,) = [found["bytes"] for found in inspect(run) if found["step"] == 8]
    base = framework_loops.tiny_language_model(framework_loops.WIDTH)[0]
    assert size < sum(weight.nbytes for weight in base.parameters()) / 5
    out = tmp_path / "adapter_model.safetensors"
    assert main(["export", str(run.path), str(out)]) == 0
    assert "adapters alone" in capfd.readouterr().out
    LoraConfig(**framework_loops.LORA).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own use of transformers
        loaded = PeftModel.from_pretrained(base, tmp_path).state_dict()
    exported = load_file(out)
    assert len(exported) == 4, "two of LoRA's, and the last norm's weight and bias"
    for name, tensor in exported.items():
        there = name.replace("_A.", "_A.default.").replace("_B.", "_B.default.")
        assert torch.equal(loaded[there.replace("ln_f.", "ln_f.modules_to_save.default.")], tensor)


def as_an_older_version() -> None:
    """Leave nothing out of a checkpoint."""
    register = CustomLoop.register

    def with_the_base(self: CustomLoop, objects: dict[str, Any], *words: Any, **more: Any) -> None:
        register(self, {name: each for name, each in objects.items() if name != "base"}, *words, **more)

    CustomLoop.register = with_the_base  # type: ignore[method-assign, assignment]


def test_adapters_of_an_older_version(root: Path) -> None:
    """Its checkpoints hold the base model too, which counts, whatever the script has loaded."""
    require_package("trl")
    disturbed = config(root, "older", "sft")
    attempt = Attempt(disturbed, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 0"}, before=as_an_older_version)
    assert attempt.wait() == [STOPPED, STOPPED], attempt.output()
    run = train(disturbed, {"LASTSTEP_TEST_BASE": "2"})
    assert fingerprint(run) == undisturbed_run(config(root, "unused", "sft"))


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
