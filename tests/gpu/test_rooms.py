"""The time machine and telemetry on a GPU: a step done again has the same bits, and a difference is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.telemetry import readings
from tests.gpu.devices import EXACT, GPU_OR_STAND_IN, needs_gpu, ranks_on, skip_without
from tests.planted.task import PLANT
from tests.support.project import PROJECT
from tests.support.ranks import train
from tests.support.runs import EVERYTHING, config

DIGESTED = ("train.digest_every=1", "checkpoint.anchors=4")


@pytest.mark.parametrize("device", GPU_OR_STAND_IN)
@pytest.mark.parametrize("options", ["", "train.precision=bf16 model.name=resnet18 data.args.image_size=32"])
def test_a_replay_has_the_same_bits(root: Path, options: str, device: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What two ranks did over NCCL, one GPU does again: weights, optimiser, averages and batch norm by their digests.
    Else a replay that says otherwise would say nothing about the run."""
    if device == "cuda":
        skip_without(options.split())
    place, before = ranks_on(device, 2)
    name = "replayed-resnet" if options else "replayed"
    words = (*EVERYTHING, *options.split(), *DIGESTED, *place, "train.shares=2", EXACT)
    run = train(config(root, name, 2, words), before=before)
    assert main(["replay", str(run.path), "--step", "6", "--to", "7", "--json"]) == 0, capfd.readouterr().out
    said = json.loads(capfd.readouterr().out)
    assert (said["from"], said["ranks"], said["steps"], said["digests_compared"]) == (4, 1, [6, 7], 2)


@pytest.mark.parametrize("device", GPU_OR_STAND_IN)
def test_a_changed_line_is_named(root: Path, device: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Two runs of the same code do not differ on a GPU; from a changed line on, `diff` names the step and the operator
    whose bits differ first."""

    def trained(name: str, plant: dict[str, Any]) -> RunDir:
        words = ["task=tests.planted.task.Planted", f"device={device}", "train.batch_size=8", "train.epochs=1"]
        words += [f"launch.root={root}", f"launch.name={name}", "train.digest_every=2", EXACT]
        env = {PLANT: json.dumps(plant)} if plant else {}
        small = Config.load(None, words)
        return train(dataclasses.replace(small, launch=dataclasses.replace(small.launch, env=env)), env)

    clean, again, odd = (trained(*one) for one in (("a", {}), ("b", {}), ("c", {"kind": "line", "step": 4})))
    assert main(["diff", str(clean.path), str(again.path)]) == 0
    assert "nothing differs in the 6 steps" in capfd.readouterr().out
    assert main(["diff", str(clean.path), str(odd.path), "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["step"] == 4 and found["not_reproduced"] == [], found
    assert found["operator"]["b"]["operator"].startswith("aten.mul"), found["operator"]


@needs_gpu
def test_telemetry_of_a_busy_gpu(tmp_path: Path) -> None:
    """A GPU that multiplies matrices for 20 s is seen to: a status that shows an idle one would send its owner looking
    for a fault that is not there, and one without energy would leave the bill empty."""
    words = ["task=tests.gpu.tasks.Busy", "device=cuda", "data.name=fake", "data.args.samples=4000", "--name=busy"]
    words += ["data.args.image_size=8", "train.batch_size=8", "train.epochs=1", f"launch.root={tmp_path}"]
    command = [sys.executable, str(PROJECT / "launch.py"), "--local", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "busy")
    lines = [line for file in sorted(run.telemetry.iterdir()) for line in read_lines(file)]
    assert lines, f"no line of telemetry:\n{done.stdout}{done.stderr}"
    busy = max(lines, key=lambda line: line["gpu_use"][0])
    assert busy["gpu_use"][0] > 50 and busy["gpu_power_w"][0] > 100, lines
    assert 0 < busy["gpu_memory_gb"][0] < busy["gpu_memory_total_gb"][0], lines
    assert 20 < busy["gpu_temperature_c"][0] < 100, lines
    use = readings.use_of(run)
    assert use.gpu_s > 8 and use.energy_j > 100 * use.busy_s / 2 > 0, use
    assert readings.idle(run, lines[-1]["time"]) is None
