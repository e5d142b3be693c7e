"""torch's compiler stays out of a run that compiles nothing, and is there for whoever asks for it; what it makes is
kept: tests/loops/test_exact.py has a run that finds it again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.attempt import compiler

# What a run does with torch before and between its steps, in the order in which it does it.
TRAIN = """
import atexit
import sys
from trainer import compiler
compiler.leave_out()
import torch
import torch.distributed as dist
atexit.register(dist.destroy_process_group)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torchvision
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
parallel = DistributedDataParallel(model)
def train(module):
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train(parallel)
"""
LEFT_OUT = "'torch._dynamo.eval_frame' not in sys.modules"


def run(code: str) -> str:
    """Run Python code in an interpreter of its own; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_left_out() -> None:
    """Otherwise each start costs a second more, and on a cold network file system many."""
    assert run(f"{TRAIN}\nprint({LEFT_OUT})") == "True"


@pytest.mark.parametrize(
    "asked",
    [
        "train(torch.compile(model, backend='eager'))",
        "import torch._dynamo.config as config; assert config is torch._dynamo.config; config.suppress_errors",
        "from torch._dynamo import OptimizedModule",
        "torch.compiler.reset()",
        "assert torch._dynamo.utils.is_compile_supported('cpu') in (True, False)",
        "from torchvision.ops import roi_align; roi_align(torch.ones(1, 1, 4, 4), torch.tensor([[0., 0, 0, 2, 2]]), 2)"
        "; torch.compile(roi_align)",
        "assert torch._dynamo.disable(recursive=False)(train) is train; torch._dynamo.config",
    ],
)
def test_who_asks_for_it_has_it(asked: str) -> None:
    """A task may compile for itself whatever the configuration says; its training goes on as before."""
    loaded = LEFT_OUT.replace("not in", "in")
    assert run(f"{TRAIN}\nassert {LEFT_OUT}\n{asked}\nassert {loaded}\ntrain(parallel)\nprint('trained')") == "trained"


def test_one_that_is_there_stays() -> None:
    """In a notebook that has compiled before, nothing is put in its place."""
    assert run(f"import torch, torch._dynamo as real\n{TRAIN}\nprint(torch._dynamo is real)") == "True"


CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch/_inductor/runtime/cache_dir_utils.py


def test_what_is_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's folder, where the next attempt finds it, on whichever nodes; but where the user says, if he does."""
    monkeypatch.setenv(CACHE, "/scratch/kernels")
    compiler.keep_in(tmp_path / "compiled")
    assert os.environ[CACHE] == "/scratch/kernels"
    monkeypatch.delenv(CACHE)
    compiler.keep_in(tmp_path / "compiled")
    assert Path(os.environ[CACHE]).parent == tmp_path / "compiled"


def test_what_is_compiled_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some Lustre mounts: torch, which locks what it writes, would fail in the folder, and with it the run."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr("trainer.attempt.compiler.fcntl.flock", flock)
    compiler.keep_in(tmp_path / "compiled")
    assert CACHE not in os.environ
