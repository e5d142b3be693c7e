"""Reading the device's memory beside its queue, and asking how far the device is."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laststep.compat.cuda_driver import RELAXED, CudaDriver
from laststep.ranks.device import CudaEvent, CudaQueue, ReadThrough, is_due_to_capture
from tests.ranks.stub_driver import StubDriver


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


class Runtime:
    """Stands in for torch.cuda.Event: says which of CUDA's events it is, and how often torch was asked."""

    def __init__(self, cuda_event: int | None) -> None:
        self.cuda_event, self.asked = cuda_event, 0

    def query(self) -> bool:
        self.asked += 1
        return True


@pytest.mark.parametrize(
    ("handle", "answer", "asks_torch"),
    [(0x600, False, False), (1, True, False), (None, True, True)],
    ids=["queued", "passed", "never recorded"],
)
def test_an_event_is_asked_without_torch(
    handle: int | None, answer: bool, asks_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own query holds Python's lock, see tests/test_compat.py."""
    runtime = Runtime(handle)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: runtime)
    event = CudaEvent(CudaDriver(StubDriver(tmp_path).library))
    assert event.query() == answer and bool(runtime.asked) == asks_torch


def test_an_error_has_torchs_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say whether the node is at fault, see laststep/ranks/watchdog.py."""
    stub, runtime = StubDriver(tmp_path), Runtime(1)
    stub.set("status", 214)  # uncorrectable ECC
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: runtime)
    assert CudaEvent(CudaDriver(stub.library)).query() and runtime.asked


def test_captures_are_ignored_beside_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom loop may capture a graph in torch's default mode, in which a query in another thread spoils it."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stub, queue = StubDriver(tmp_path), object.__new__(CudaQueue)
    queue._device, queue._stream = torch.device("cuda", 0), None  # type: ignore[assignment]
    queue._driver = CudaDriver(stub.library)
    queue._reads = ReadThrough(torch.zeros(8, dtype=torch.uint8), "cuda", lambda: None)
    with queue.beside():
        assert stub.library.current_mode() == RELAXED
    assert stub.library.current_mode() == 0


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
        "CUDA error: operation not permitted on an event last recorded in a capturing stream",
    ],
)
def test_errors_of_a_capture(text: str) -> None:
    """They say nothing about the device, and must not end a run."""
    assert is_due_to_capture(RuntimeError(text))
    assert not is_due_to_capture(RuntimeError("CUDA error: an illegal memory access was encountered"))
