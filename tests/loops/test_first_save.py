"""The first save of an attempt makes training wait no longer than a later one."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laststep.checkpoint.memory import reusable_buffer
from tests.support.loops import a_loop, settings_of


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_its_buffer_is_there(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has it made after its first step, when the optimiser has all of its state. One that is too small would
    be made anew in the save, while training waits: on a GPU for seconds."""
    made: list[tuple[str, int]] = []

    def note(count: int, device: torch.device) -> Tensor:
        made.append((threading.current_thread().name, count))
        return reusable_buffer(count, device)

    monkeypatch.setattr("laststep.checkpoint.writer.reusable_buffer", note)
    for name, steps in (("new", 4), ("resumed", 9)):
        settings = settings_of(tmp_path, "run", f"train.max_steps={steps}", "checkpoint.every_steps=3")
        with contextlib.ExitStack() as closing, a_loop(kind, settings, closing) as loop:
            loop.run()
            assert [thread for thread, _ in made] == ["saver"], f"{name}: {made}"
            assert loop.saves.writer.buffer_bytes == made[0][1] > 0
        made.clear()
        if kind == "custom":
            break  # its function runs to its own end
