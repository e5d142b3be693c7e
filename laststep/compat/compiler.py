"""torch's compiler, by its private names: what it makes depends on its input alone, and is kept.

torch.optim and DistributedDataParallel import it in their first step, whether anything is compiled or not. So a
supervisor imports it, with torch, before it forks a rank.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

LIMIT = (
    "WARNING: torch.compile has met more than {} kinds of input, such as shapes, and runs further ones uncompiled. A "
    "resumed run may compile others, so its last bits may differ; pad the batches to a few shapes"
)


def cache_in(folder: Path) -> None:
    """Have torch keep what it compiles in `folder`, unless the user has chosen a place. Ranks may share it.

    Torch's own default is in /tmp, where the next attempt, on other nodes, does not find it.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:  # no locks on this file system, as on some Lustre mounts: torch would fail to lock there
            return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / _processor()))


def _processor() -> str:
    """A name for this model of processor. Torch compiles C++ for the processor that it runs on, but its cache does not
    distinguish processors."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def compile_each_shape(warn: Callable[[str], None]) -> None:
    """Compile a graph for each shape of the input, also where the user's code compiles. Imports the compiler.

    By default it makes a graph for all sizes as soon as it meets a second one, and uses it for the first one from then
    on. Then the bits of a step depend on the steps before, and so on where the run was resumed. It keeps a limited
    number of graphs: `warn` is called with a line once that is reached.
    """
    import torch._dynamo.config as config

    _set_in_all_threads(config, "automatic_dynamic_shapes", False)
    log = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(handler, _AtLimit) for handler in log.handlers):
        log.addHandler(_AtLimit(lambda: warn(LIMIT.format(config.recompile_limit))))


class _AtLimit(logging.Handler):
    """Handles the first record that says that the compiler's limit is reached."""

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._report: Callable[[], None] | None = report

    def emit(self, record: logging.LogRecord) -> None:
        if self._report is not None and "hit config." in str(record.msg):
            report, self._report = self._report, None
            try:
                report()
            except Exception:
                self.handleError(record)  # the compiler calls this


def _set_in_all_threads(config: Any, name: str, value: bool) -> None:
    """Set one of torch's settings, and its default: what is set holds for this thread alone since torch 2.15."""
    setattr(config, name, value)
    config._config[name].default = value


def compile_without_timing() -> None:
    """Let the compiler choose no kernel by how long it takes where another one adds in another order: each attempt, and
    each rank, might choose another one. Whoever has set TORCHINDUCTOR_DETERMINISTIC has chosen."""
    if os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1") == "1" and "torch._inductor.config" in sys.modules:
        _set_in_all_threads(sys.modules["torch._inductor.config"], "deterministic", True)


def draw_from_default_generators() -> None:
    """Where a compiled model recomputes activations on a GPU, let it draw its random numbers, as for dropout, from
    torch's default generators.

    By default it draws them from generators of its own, which are seeded once per process: seeding the default ones
    before a step does not reach them, so a resumed run would draw other numbers.
    """
    import torch._functorch.config as config

    _set_in_all_threads(config, "graphsafe_rng_functionalization", False)


def compile_whole_under_ddp() -> None:
    """Within DistributedDataParallel, compile a model as one graph instead of one for each bucket of gradients."""
    import torch._dynamo.config as config

    config.optimize_ddp = False


def compile_in_place(module: nn.Module, mode: str | None = None) -> None:
    """Compile a module for fixed shapes, as `Module.compile` does.

    Before torch 2.14 that compiles nothing, without a word, of a module whose forward is torch's own, such as an
    nn.Sequential or an nn.TransformerEncoderLayer, unless the module is wrapped.
    """
    import torch._dynamo.config as config

    with config.patch(wrap_top_frame=type(module).forward.__module__.startswith("torch.nn.")):
        module.compile(dynamic=False, mode=mode)


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether the compiler has recorded CUDA graphs on this device for a forward and a backward pass, and left out no
    part of a model so far. Call it in the thread that trains."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    if manager is None or counters["inductor"]["cudagraph_skips"]:
        return False
    return any(any(forward.children.values()) for forwards in manager.roots.values() for forward in forwards)
