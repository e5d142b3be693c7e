"""The scripts of examples/ports as people write them, each beside its port: few lines changed, and exact."""

from __future__ import annotations

import difflib
import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from laststep.records.metrics import read_lines
from laststep.records.probes import ProbePlan, Strike
from laststep.rundir import RunDir
from tests.cli.test_script import CPU, LAUNCH, types
from tests.support.commands import begin, end
from tests.support.needs import require_package
from tests.support.project import PROJECT
from tests.support.ranks import fingerprint

PORTS = PROJECT / "examples" / "ports"


class Port(NamedTuple):
    """A port: how many lines it may change, and words with which it trains for seconds."""

    lines: int
    words: str
    package: str = "torch"


ALL = {
    "imagenet": Port(12, "--dummy 96 --image-size 32 --arch resnet18 -b 8 -j 0 --epochs 2 --seed 1"),
    "references": Port(
        15,
        "--fake-data 64 --train-crop-size 32 --device cpu -b 4 -j 0 --epochs 2 --num-classes 8 --model-ema "
        "--model-ema-steps 3 --mixup-alpha 0.2 --ra-reps 2 --label-smoothing 0.1",
    ),
    "nanogpt": Port(8, "--max_iters=30 --eval_interval=8 --n_layer=1 --n_embd=32 --eval_iters=2 --block_size=16"),
    "diffusion": Port(
        10, "--fake_images 64 --num_epochs 3 --train_batch_size 4 --channels 8 --checkpointing_steps 9", "accelerate"
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_few_lines(name: str) -> None:
    """What it costs to move a script is the first thing that its owner asks. A replaced line counts once."""
    before, after = (
        [line for line in (PORTS / name / file).read_text().splitlines() if line.strip()]
        for file in ("original.py", "ported.py")
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(end - begin, last - first) for kind, begin, end, first, last in changes if kind != "equal")
    assert 0 < changed <= ALL[name].lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_proved(name: str, folder: Path) -> None:
    """prove calls it exact, and nothing that it writes reaches the folder."""
    require_package(ALL[name].package)
    shutil.copy(PORTS / name / "ported.py", folder / "train.py")
    words = ("prove", "--json", "--steps", "16", *CPU, "train.py", *ALL[name].words.split())
    said, errors = end(begin(folder, [*LAUNCH, *words]))
    found = json.loads(said)
    assert (found["verdict"], found["written_outside"]) == ("exact", []), errors
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_resumed(name: str, folder: Path) -> None:
    """Stopped, then one rank killed, then resumed: the weights of an undisturbed run."""
    require_package(ALL[name].package)
    shutil.copy(PORTS / name / "ported.py", folder / "train.py")
    start = (*LAUNCH, "--local", "--tasks-per-node", "2", "launch.max_restarts=0", *CPU, "--name")
    words = ("train.py", *ALL[name].words.split())
    types(folder, *start, "undisturbed", *words)
    types(folder, *start, "disturbed", *words, env=struck("SIGTERM", 5), status=128 + signal.SIGTERM)
    resume = (*LAUNCH, "resume", "disturbed", "--local")
    types(folder, *resume, env=struck("SIGKILL", 9), status=1)
    types(folder, *resume)
    run = RunDir(folder / "runs" / "disturbed")
    ended = [(record["end_step"], record["lost_steps"]) for record in read_lines(run.attempts)]
    assert ended[:2] == [(5, 0), (8, 0)] and len(ended) == 3
    assert fingerprint(run) == fingerprint(RunDir(folder / "runs" / "undisturbed"))


def struck(name: str, step: int) -> dict[str, str]:
    """The environment in which rank 1 gets this signal within this step."""
    return ProbePlan(1 << 30, Strike(name, 1, step)).environment()
