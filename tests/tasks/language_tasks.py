"""A small language model that is stopped or killed at an exact place, and small token files."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from laststep.config.config import Config
from laststep.data.token_writer import prepare
from laststep.data.tokens import Bytes, TokenFolder
from laststep.ranks.launchers import detect_world
from laststep.tasks.language import Language
from tests.support.tasks import await_agreement

TINY = ("model.name=tiny-1m", "model.args={layers: 2, width: 32, heads: 4, kv_heads: 2, ffn: 48}", "device=cpu")


class Disturbed(Language):
    """Rank 1 sends itself the signal LASTSTEP_TEST_SIGNAL, "SIGTERM 5" or "SIGKILL 5", in that step of the attempt."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        name, place = os.environ["LASTSTEP_TEST_SIGNAL"].split()
        self.number, self.place = signal.Signals[name], int(place)
        self.steps = -1  # the first call is the warm-up's

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.steps += model.training
        if model.training and self.steps == self.place and detect_world().rank == 1:
            os.kill(os.getpid(), self.number)
            await_agreement()
        return super().step(model, batch)


def make_texts(folder: Path, **sizes: int) -> dict[str, TokenFolder]:
    """Token files of random words, so many bytes each, in folders of these names. Half is to validate with."""
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        draws = random.Random(name)
        lines = [f'{{"text": "{"".join(draws.choices("abcdefgh ", k=draws.randint(1, 40)))}"}}' for _ in range(size)]
        text, kept = folder / f"{name}.jsonl", 0
        while sum(len(line) - 12 for line in lines[:kept]) < size:
            kept += 1
        text.write_text("\n".join(lines[:kept]) + "\n")
        found[name] = prepare([text], folder / name, Bytes(), 0.3, None, lambda _: None)
    return found
