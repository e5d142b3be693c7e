"""What a custom loop logs is rank 0's, whichever rank writes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from laststep.loops.measured import LoggedValues
from laststep.ranks.group import Group


class Wire:
    """Broadcasts between two ranks that are played one after the other, rank 0 first."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def logged(self, rank: int) -> LoggedValues:
        """What this rank logs."""

        def broadcast(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                if rank == 0:
                    self.sent.append(tensor.clone())
                else:
                    tensor.copy_(self.sent.pop(0))

        cpu = torch.device("cpu")
        world = SimpleNamespace(rank=rank, size=2)
        group: Any = SimpleNamespace(world=world, device=cpu, collective_device=cpu, broadcast=broadcast)
        group.broadcast_bytes = lambda data: Group.broadcast_bytes(group, data)
        return LoggedValues(group, best_by="val_loss")


def validation_within_a_step(logged: LoggedValues) -> dict[str, Any] | None:
    logged.begin_validation(7)
    logged.log_step({"val_loss": 0.5 + logged._group.world.rank})
    return logged.end_validation()


def epoch(logged: LoggedValues) -> dict[str, Any] | None:
    logged.log_epoch({"val_loss": 0.5 + logged._group.world.rank})
    return logged.epoch_values(include_open=True)


@pytest.mark.parametrize("line", [validation_within_a_step, epoch])
def test_every_rank_has_the_line_of_rank_0(line: Callable[[LoggedValues], dict[str, Any] | None]) -> None:
    """If rank 0 dies before it writes the line, another rank does: the numbers must not depend on which."""
    wire = Wire()
    first, second = line(wire.logged(0)), line(wire.logged(1))
    assert first == second and first is not None and first["val_loss"] == 0.5


def test_a_step_without_a_validation_exchanges_nothing() -> None:
    """Another broadcast per step would slow every loop down."""
    wire = Wire()
    assert wire.logged(0).end_validation() is None and not wire.sent
