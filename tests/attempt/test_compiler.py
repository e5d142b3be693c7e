"""torch's compiler is not imported by a run that compiles nothing, and is available to any code that asks for it.

Compiled code is kept for the next attempt: tests/loops/test_exact.py has a run that reuses it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laststep.attempt import compiler
from tests.support.waiting import DEADLINE_S

# What a run does with torch before and between its steps. Prints what the stand-in does not have. torchvision is
# imported before the ranks meet, as a task may do: torch asks for more then.
IMPORTS = """
import atexit
import sys
from laststep.attempt import compiler
imports = compiler._import_compiler
def noted(asked_for):
    print("the stand-in was asked for", asked_for)
    imports(asked_for)
compiler._import_compiler = noted
compiler.defer_import()
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torchvision
"""
STEPS = """
atexit.register(dist.destroy_process_group)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
parallel = DistributedDataParallel(model)
def train(module):
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train(parallel)
"""
TRAIN = f"{IMPORTS}{STEPS}"
# Runs each of the words as code, in a fork, as importing torch takes longer than most of them.
IN_FORKS = """
import os
for code in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        try:
            exec(code)
            os._exit(0)
        except BaseException:
            print("in:", code, file=sys.stderr)
            raise
    assert os.waitpid(pid, 0)[1] == 0
print("all")
"""
NOT_IMPORTED = "'torch._dynamo.eval_frame' not in sys.modules"


def run(code: str, *words: str) -> str:
    """Run Python code in a new interpreter; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_not_imported() -> None:
    """Otherwise each start takes a second longer, and many seconds on a cold network file system. If torch asks the
    stand-in for something new, this fails and names it. Nor is sympy, by the backward pass of several ranks."""
    learn = "autograd.backward(parallel(torch.ones(3, 4)).sum(), nn.Parameter(torch.zeros(())), torch.ones(()))"
    code = f"{TRAIN}\nfrom laststep.compat import autograd\n{learn}\nprint({NOT_IMPORTED}, 'sympy' not in sys.modules)"
    # Not by the interpreter's own exit, which torch's threads may turn into an abort: that is no question of imports.
    assert run(f"{code}\nimport os\nsys.stdout.flush()\nos._exit(0)") == "True True"


@pytest.mark.parametrize(("value", "in_place"), [(None, True), ("0", True), ("", True), ("1", False)])
def test_it_can_be_switched_off(value: str | None, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LASTSTEP_KEEP_COMPILER=1, for users who suspect the stand-in: torch's compiler is imported as usual."""
    for name in ("torch._dynamo", "torch._dynamo.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv("LASTSTEP_KEEP_COMPILER", value)
    imported: list[Any] = []
    monkeypatch.setattr(compiler, "_keep_shapes_apart", lambda: imported.append(True))
    compiler.defer_import()
    assert (sys.meta_path != before) == in_place
    assert bool(imported) != in_place, "it makes a graph for each shape, however it is imported"


# Compares the stand-in with the compiler itself.
CONTRACT = """
import importlib
from laststep.attempt import compiler
for module, names in compiler.STAND_INS.items():
    for name in names:
        assert callable(getattr(importlib.import_module(module), name)), f"{module}.{name}"
utils = importlib.import_module("torch._dynamo.utils")
answer = compiler.STAND_INS[utils.__name__]["get_optimize_ddp_mode"]()
assert answer == utils.get_optimize_ddp_mode(), utils.get_optimize_ddp_mode()
"""


def test_the_compiler_has_what_the_stand_in_has() -> None:
    """A function that torch has renamed would stand in for nothing; and DistributedDataParallel asks how to lay out its
    buckets, where a different answer would change a run's last bits."""
    run(CONTRACT)


ASKED = (
    "train(torch.compile(model, backend='eager'))",
    "import torch._dynamo.config as config; assert config is torch._dynamo.config; config.suppress_errors",
    "graphs = []; double = torch.compile(lambda x: 2 * x, backend=lambda made, _: graphs.append(made) or made.forward)"
    "; assert [len(double(torch.ones(n))) for n in (3, 4, 5, 3, 4)] and len(graphs) == 3, 'a graph for each shape'",
    "from torch._dynamo import OptimizedModule",
    "torch.compiler.reset()",
    "assert torch._dynamo.utils.is_compile_supported('cpu') in (True, False)",
    "from torchvision.ops import roi_align; roi_align(torch.ones(1, 1, 4, 4), torch.tensor([[0., 0, 0, 2, 2]]), 2)"
    "; torch.compile(roi_align)",
    "assert torch._dynamo.disable(recursive=False)(train) is train; torch._dynamo.config",
)


def test_code_that_asks_for_it_gets_it() -> None:
    """A task may compile by itself regardless of the configuration; its training continues as before."""
    imported = NOT_IMPORTED.replace("not in", "in")
    lines = (f"{STEPS}\nassert {NOT_IMPORTED}\n{asked}\nassert {imported}\ntrain(parallel)" for asked in ASKED)
    assert run(f"{IMPORTS}\n{IN_FORKS}", *lines).splitlines()[-1] == "all"


def test_one_that_is_imported_already_stays() -> None:
    """In a notebook that has compiled before, the stand-in is not used. From now on there is a graph for each shape."""
    static = "not real.config.automatic_dynamic_shapes"
    assert run(f"import torch, torch._dynamo as real\n{TRAIN}\nprint(torch._dynamo is real, {static})") == "True True"


CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch/_inductor/runtime/cache_dir_utils.py


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's folder, where the next attempt finds it on any node, unless the user has chosen another place."""
    monkeypatch.setenv(CACHE, "/scratch/kernels")
    compiler.cache_in(tmp_path / "compiled")
    assert os.environ[CACHE] == "/scratch/kernels"
    monkeypatch.delenv(CACHE)
    compiler.cache_in(tmp_path / "compiled")
    assert Path(os.environ[CACHE]).parent == tmp_path / "compiled"


def test_compiled_code_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some Lustre mounts: torch locks what it writes, so in the run's folder it and the run would fail."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr("laststep.attempt.compiler.fcntl.flock", flock)
    compiler.cache_in(tmp_path / "compiled")
    assert CACHE not in os.environ
