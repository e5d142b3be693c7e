"""The scripts of examples/ports as people write them, each beside its port: few lines changed, and exact."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.ranks.process import children_of
from laststep.records.metrics import read_lines
from laststep.records.probes import ProbePlan, Strike
from laststep.rundir import RunDir
from laststep.script import FILE, as_override
from tests.cli.test_script import LAUNCH
from tests.support.commands import begin, end, types
from tests.support.needs import require_package
from tests.support.project import PROJECT, wait_until
from tests.support.ranks import Attempt, fingerprint, reasons

CPU = ("device=cpu", "launch.hang_timeout_s=60")
PORTS = PROJECT / "examples" / "ports"


class Port(NamedTuple):
    """A port: how many lines it may change, and words with which it trains for seconds."""

    lines: int
    words: str
    package: str = "torch"


ALL = {
    "imagenet": Port(12, "--dummy 96 --image-size 32 --arch shufflenet_v2_x0_5 -b 8 -j 0 --epochs 2 --seed 1"),
    "references": Port(
        15,
        "--fake-data 64 --train-crop-size 32 --device cpu -b 4 -j 0 --epochs 2 --model shufflenet_v2_x0_5 "
        "--num-classes 8 --model-ema --model-ema-steps 3 --mixup-alpha 0.2 --ra-reps 2 --label-smoothing 0.1",
    ),
    "nanogpt": Port(8, "--max_iters=30 --eval_interval=8 --n_layer=1 --n_embd=32 --eval_iters=2 --block_size=16"),
    "diffusion": Port(
        10, "--fake_images 64 --num_epochs 3 --train_batch_size 4 --channels 8 --checkpointing_steps 9", "accelerate"
    ),
    "ppo": Port(10, "--total-timesteps 4096 --local-num-envs 2 --num-steps 32", "gymnasium"),
    "webdataset": Port(
        6,
        "data --make-shards 8 --images-per-shard 12 --epochs 3 --steps-per-epoch 7 --batch-size 4 --workers 1",
        "webdataset",
    ),
    # Each epoch has 13 or 14 batches on two ranks, two to a step.
    "accelerate": Port(
        8,
        "--samples 52 --batch_size 2 --gradient_accumulation_steps 2 --num_epochs 2 --width 8 --cpu "
        "--checkpointing_steps epoch --output_dir state",
        "accelerate",
    ),
    "lightning": Port(
        3, "--fake_images 104 --batch_size 4 --accumulate_grad_batches 2 --max_epochs 2 --width 8", "lightning"
    ),
    "trl": Port(
        3,
        "--samples 56 --hidden_size 16 --use_peft --lora_r 2 --output_dir sft --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 2 --num_train_epochs 2 --eval_strategy epoch --logging_steps 3 --use_cpu "
        "--bf16 False --report_to none",
        "trl",
    ),
}


def changed_lines(name: str) -> int:
    """How many lines of a script its port changes. A replaced line counts once."""
    before, after = (
        [line for line in (PORTS / name / file).read_text().splitlines() if line.strip()]
        for file in ("original.py", "ported.py")
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(end - begin, last - first) for kind, begin, end, first, last in changes if kind != "equal")


@pytest.mark.parametrize("name", ALL)
def test_few_lines(name: str) -> None:
    """What it costs to move a script is the first thing that its owner asks."""
    assert 0 < changed_lines(name) <= ALL[name].lines


@pytest.fixture
def folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the port in it."""
    require_package(ALL[name].package)
    (folder := tmp_path / "users").mkdir()
    shutil.copy(PORTS / name / "ported.py", folder / "train.py")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ALL)
def test_proved(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """prove calls it exact, and nothing that it writes reaches the folder."""
    status = main(["prove", "--steps", "16", *CPU, "train.py", *ALL[name].words.split()])
    text = capfd.readouterr().out
    assert status == 0 and "\nEXACT\n" in text, text
    assert "outside" not in text
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["train.py"]


def trained(folder: Path, run: str, words: Sequence[str], *strikes: Strike) -> RunDir:
    """The run of the script on two ranks, with a strike in each attempt but the last."""
    settings = [*CPU, f"launch.root={folder / 'runs'}", "launch.tasks_per_node=2", as_override(["train.py", *words])]
    for strike in (*strikes, None):
        plan = ProbePlan(1 << 30, strike).environment() if strike else {}
        env = {**plan, FILE: str(folder / "train.py")}
        config = Config.load(None, [*settings, f"launch.name={run}"])
        attempt = Attempt(config, env, before=functools.partial(os.chdir, folder))
        attempt.wait()
    print(attempt.output())
    return attempt.run


@pytest.mark.parametrize("name", ALL)
def test_resumed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, then one rank killed, then resumed: the weights of an undisturbed run."""
    monkeypatch.chdir(PROJECT)  # where the server that forks the ranks finds what it loads
    words = ALL[name].words.split()
    undisturbed = trained(folder, "undisturbed", words)
    disturbed = trained(folder, "disturbed", words, Strike("SIGTERM", 1, 5), Strike("SIGKILL", 1, 9))
    ended = [(record["end_step"], record["lost_steps"]) for record in read_lines(disturbed.attempts)]
    assert ended[:2] == [(5, 0), (8, 0)] and len(ended) == 3
    assert fingerprint(disturbed) == fingerprint(undisturbed)


@pytest.mark.parametrize("name", ["nanogpt"])
def test_the_best_is_kept(folder: Path) -> None:
    """Rank 0 alone evaluates, and saves what is the best so far: a resumed run replaces it by nothing worse, rank 0
    killed too. With a rate of 0 the best is not simply the last."""
    words = "--max_iters=40 --eval_interval=4 --learning_rate=0.0 --min_lr=0.0 --n_layer=1 --n_embd=32 --eval_iters=2"
    found = []
    for run, strikes in {"undisturbed": [], "disturbed": [Strike("SIGTERM", 1, 26), Strike("SIGKILL", 0, 31)]}.items():
        trained(folder, run, words.split(), *strikes)
        found.append(torch.load(folder / "out" / "ckpt.pt")["iter_num"])
        shutil.rmtree(folder / "out") if not strikes else None
    assert found[0] == found[1] < 26


def test_unaware(tmp_path: Path) -> None:
    """A script with checkpoints of its own needs no line of ours: when one rank is killed, both start again, it loads
    its newest checkpoint, and ends."""
    shutil.copy(PORTS / "unaware" / "train.py", tmp_path)
    words = ("--local", "--tasks-per-node", "2", "--name", "own", "train.py", "--epochs", "200", "--samples", "1024")
    command = begin(tmp_path, [*LAUNCH, *words], {"CUDA_VISIBLE_DEVICES": ""})
    run = RunDir(tmp_path / "runs" / "own")
    wait_until((run.files / "latest.pt").exists, "no checkpoint")
    ranks = [rank for supervisor in children_of(command.pid) for rank in children_of(supervisor)]
    scripts = [pid for rank in ranks for pid in children_of(rank)]
    (second,) = [pid for pid in scripts if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(second, signal.SIGKILL)
    said = "".join(end(command, 0))
    first, again = map(int, re.findall(r"begins with epoch (\d+)", said))
    assert first == 0 < again and "epoch 199: loss" in said
    assert reasons(run) == ["failed", "finished"]
    assert "resumes by itself: steps lost are its own" in types(tmp_path, *LAUNCH, "status", "own")
