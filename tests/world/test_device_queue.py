"""Reading the device's memory beside its queue."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from trainer.world.device_queue import ReadThrough


class Waits:
    """Stands in for a device: counts how often it was waited for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0.5, torch.float32), (0.1, torch.float64), (-7, torch.int64), (3, torch.int32), (True, torch.bool)],
)
def test_numbers_are_read_through_the_buffer(value: float, kind: torch.dtype) -> None:
    """In a rescue any other way would ask for memory, and wait for the hanging device. What is read is what torch would
    have read, of the same type."""
    scalar, waits = torch.tensor(value, dtype=kind), Waits()
    expected = [scalar.item(), float(scalar), int(scalar), bool(scalar)]
    with ReadThrough(torch.zeros(8, dtype=torch.uint8), "cpu", waits):
        found = [scalar.item(), float(scalar), int(scalar), bool(scalar)]
    assert found == expected and list(map(type, found)) == list(map(type, expected))
    assert waits.count == 4
    scalar.item()
    assert waits.count == 4, "not outside of the block"


def test_a_gradient_scaler_is_read_through_the_buffer() -> None:
    """Its state is that of each fp16 run."""
    scaler, waits = torch.amp.GradScaler("cpu", init_scale=4.0), Waits()
    scaler.scale(torch.ones(()))
    expected = scaler.state_dict()
    with ReadThrough(torch.zeros(8, dtype=torch.uint8), "cpu", waits):
        assert scaler.state_dict() == expected
    assert waits.count == 2


def test_threads_take_turns() -> None:
    """The buffer holds one number."""
    found: dict[int, Tensor] = {}
    reads = ReadThrough(torch.zeros(8, dtype=torch.uint8), "cpu", lambda: time.sleep(0))  # lets another thread run
    start = threading.Barrier(4)

    def read(number: int) -> None:
        scalar = torch.tensor(float(number))
        start.wait(60)
        with reads:
            found[number] = torch.tensor([float(scalar) for _ in range(300)])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3]
    assert all((values == number).all() for number, values in found.items())


def test_everything_else_is_left_alone() -> None:
    """Numbers of other devices, and functions that compute."""
    waits = Waits()
    with ReadThrough(torch.zeros(8, dtype=torch.uint8), "cuda", waits):
        assert torch.ones(3).sum().item() == 3 and torch.equal(torch.ones(2), torch.ones(2))
    assert waits.count == 0
