"""Ranks that a fault finds one step apart: some wait for what all have gathered at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from laststep.loops.engine import Engine
from laststep.loops.learner import Learner
from laststep.loops.sharded import Sharded
from laststep.ranks.launchers import detect_world
from tests.support.project import wait_until


def fall_apart() -> None:
    """Called by each rank before it trains. LASTSTEP_TEST_APART is "3 rank 1 hangs FOLDER": in the third step of the
    attempt rank 1 contributes to what is gathered, and does not get it. When the others have done the step, the last of
    them fails: it is killed if there are more than two, else it raises an error.

    "hangs": the collective never returns. "fails": it raises an error, as when the connection is lost. "returns": it
    returns after all, but not before a rescue has begun the update.
    """
    words = os.environ.get("LASTSTEP_TEST_APART")
    if words:
        step, _, behind, how, folder = words.split()
        world = detect_world()
        others = [rank for rank in range(world.size) if rank != int(behind)]
        if world.rank == int(behind):
            _be_late(int(step), how, Path(folder))
        else:
            _fail_later(int(step), world.rank, others, Path(folder))


def _be_late(step: int, how: str, folder: Path) -> None:
    gather, update = Sharded._gather, Learner.update
    calls = iter(range(1, 1000))

    def gather_late(gradients: Sharded, mine: Tensor) -> Tensor:
        everyone = gather(gradients, mine)
        if next(calls) != step:
            return everyone
        if how == "hangs":
            threading.Event().wait(600)
        elif how == "fails":
            wait_until((folder / "fails").exists, "no rank has failed")
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
        wait_until((folder / "update").exists, "the rescue has done no update")
        return everyone

    def updated(learner: Learner) -> dict[str, Tensor]:
        if threading.current_thread().name == "rescuer":
            (folder / "update").touch()
        return update(learner)

    Sharded._gather, Learner.update = gather_late, updated  # type: ignore[method-assign,assignment]


def _fail_later(step: int, rank: int, others: list[int], folder: Path) -> None:
    end_update = Engine.end_update
    calls = iter(range(1, 1000))

    def ended(engine: Engine, *words: Any, **more: Any) -> None:
        end_update(engine, *words, **more)
        if next(calls) == step:
            (folder / str(rank)).touch()
            if rank == others[-1]:
                wait_until(lambda: all((folder / str(one)).exists() for one in others), "not all have done the step")
                (folder / "fails").touch()
                if len(others) > 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("a bad sample")

    Engine.end_update = ended  # type: ignore[method-assign,assignment]
