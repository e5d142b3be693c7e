"""train.deterministic, which is true by default on GPUs. Here the CPU plays the GPU: torch refuses put_ on both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from laststep.attempt import start, user_error
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks import nccl
from laststep.rundir import RunDir
from tests.attempt.deterministic import LOOP, SCATTERS, like_on_a_gpu
from tests.support.forked import forked_python
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.ranks import Attempt
from tests.support.records import a_world
from tests.support.runs import config, only


@pytest.mark.parametrize(("task", "ranks"), [(SCATTERS, 1), (LOOP, 1), (LOOP, 3)], ids=["task", "loop", "rehearsal"])
def test_an_operator_without_a_deterministic_form(task: str, ranks: int, root: Path) -> None:
    """torch's own error suggests a call in the user's code, which would not help, below a traceback of 40 lines. The
    run ends before its first step, with one line that names the operator, its line and the key."""
    settings = config(root, f"scatters-{len(task)}-{ranks}", ranks, (task,))
    attempt = Attempt(settings, before=like_on_a_gpu)
    assert attempt.wait() == [1] * ranks, attempt.output()
    record = only(attempt)
    assert "train.deterministic=true: put_ (tasks.py:" in record["error"]
    assert "set train.deterministic=false, with which the last bits of a resumed run may differ" in record["error"]
    assert (record["end_step"], record["requeue"]) == (0, False), "a retry would fail the same way"
    assert "Error" not in attempt.logs[0].read_text().replace("ConfigError", ""), "torch's error is not shown"


def test_with_the_key_it_trains(root: Path) -> None:
    """The choice that the line offers."""
    settings = config(root, "allowed", 1, (SCATTERS, "train.max_steps=2", "train.deterministic=false"))
    attempt = Attempt(settings, before=like_on_a_gpu)
    assert attempt.wait() == [0], attempt.output()


def test_without_a_gpu_it_changes_nothing(root: Path) -> None:
    """A CPU's kernels add in one order anyway, so a CPU run refuses nothing."""
    attempt = Attempt(config(root, "cpu", 1, (SCATTERS, "train.max_steps=2")))
    assert attempt.wait() == [0], attempt.output()


def test_the_command_ends_with_status_2(tmp_path: Path) -> None:
    """A wrong configuration: one line on stderr, no traceback, and the name is free again."""
    code = (
        "import runpy, sys\n"
        "from tests.attempt.deterministic import like_on_a_gpu\n"
        "like_on_a_gpu()\n"
        "runpy.run_module('laststep', run_name='__main__', alter_sys=True)\n"
    )
    words = [SCATTERS, "device=cpu", "data.name=fake", "data.args.samples=16", f"launch.root={tmp_path}"]
    done = subprocess.run(
        [forked_python(), "-c", code, "--name", "mine", *words],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: train.deterministic=true: put_ (tasks.py:")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("device", "deterministic", "pins", "lines"),
    [("cuda", True, True, 0), ("cuda", False, False, 1), ("cpu", True, False, 0), ("cpu", False, False, 0)],
)
def test_what_the_ranks_do_before_they_connect(
    device: str,
    deterministic: bool,
    pins: bool,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On GPUs NCCL chooses nothing by itself, or one line in rank 0's log says what that means for a resume. A CPU run
    gets neither variables of NCCL nor a line about kernels that it has not."""
    for name in nccl.PINNED:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for rank in range(2):
        group = mock.Mock(device=torch.device(device), backend="gloo", skewed_clocks=[])
        settings = config(tmp_path, "any", 2, (f"train.deterministic={str(deterministic).lower()}",))
        settings.launch.preflight = False
        state = mock.Mock(config=settings, run_dir=RunDir(tmp_path), world=a_world(rank, 2))
        with mock.patch("laststep.attempt.start.join", return_value=group), mock.patch.dict(os.environ):
            start.join_ranks(state, mock.Mock())
            assert {name: os.environ.get(name) for name in nccl.PINNED} == dict.fromkeys(nccl.PINNED) | (
                nccl.PINNED if pins else {}
            )
    assert capfd.readouterr().out.count("train.deterministic=false") == lines


SAYS = "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SAYS.format("_histc_cuda with floating point input"), "_histc_cuda with floating point input"),
        ("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: " + SAYS.format("put_"), "put_"),
        (f"Dynamo failed to run FX node with fake tensors: got RuntimeError('{SAYS.format('put_')}", "put_"),
    ],
)
def test_the_operator_is_named_wherever_it_ran(text: str, name: str) -> None:
    """Also in a loader process, and in the compiler, whose errors quote torch's."""
    refusal = user_error.refused_operator(RuntimeError(text))
    assert isinstance(refusal, ConfigError) and str(refusal).startswith(f"train.deterministic=true: {name} has no ")
    assert user_error.refused_operator(RuntimeError("CUDA out of memory")) is None


# A rank is forked by its supervisor, which has imported what `_prepare` imports. Only then does it have a device.
A_RANK = """
import os, sys
from unittest import mock
from laststep.attempt import start
from laststep.compat import compile_each_shape
compile_each_shape(print)
from laststep.config.config import Config
from laststep.ranks.device import set_up_device
import torch
from tests.support.records import a_world
mock.patch("torch.cuda.device_count", lambda: 1).start()
mock.patch("torch.cuda.set_device", lambda device: None).start()
before = set(sys.modules)
if (rank := os.fork()) == 0:
    assert set_up_device(Config.load(None), a_world()).type == "cuda"
    print(torch.are_deterministic_algorithms_enabled(), sorted(set(sys.modules) - before))
    sys.exit()
assert os.waitpid(rank, 0)[1] == 0
assert not torch.cuda.is_initialized() and not torch.are_deterministic_algorithms_enabled()
"""


def test_a_rank_imports_nothing_for_it() -> None:
    """torch.use_deterministic_algorithms needs half of torch's compiler: the supervisor has imported it, and touches no
    GPU."""
    done = subprocess.run(
        [sys.executable, "-c", A_RANK],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "[]"]


def test_the_default() -> None:
    """The headline promise holds on GPUs as the configuration comes."""
    assert Config.load(None).train.deterministic
