"""A look at one step of a replay, on rank 0: its batch, a trace of it, or a debugger before it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from laststep.rundir import RunDir
from laststep.say import say


class Observer:
    """Watches the steps of one rank, see `laststep.loops.probe`."""

    def __init__(self, run: RunDir, rank: int, asked: Mapping[str, Any]) -> None:
        self._asked = asked if rank == 0 else {}
        self._model: nn.Module | None = None
        self._profiler: Any = None

    def watch(self, registered: Any) -> None:
        """Remember the model."""
        if isinstance(registered, nn.Module) and self._model is None:
            self._model = getattr(registered, "module", registered)

    def begin_step(self, step: int, batch: Any) -> None:
        """A step begins, with this batch."""
        if step != self._asked.get("step"):
            return
        if "batch" in self._asked:
            torch.save(batch, self._asked["batch"])
        if "debug" in self._asked:
            self._stop(step, batch)
        if "trace" in self._asked:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.__enter__()

    def end_step(self) -> None:
        """It is done."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            profiler.export_chrome_trace(self._asked["trace"])

    def _stop(self, step: int, batch: Any) -> None:
        model = self._model  # noqa: F841 (to look at in the debugger)
        say(f"before step {step}: `model` and `batch` are here; `continue` does the step")
        import pdb  # here: it is slow to import
        import signal

        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        pdb.set_trace()
