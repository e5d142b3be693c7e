"""The queue of a device's work: marks in it, and reading the device's memory beside it.

A GPU does what the CPU queues, in order, but later: the CPU is up to two steps ahead, and the queue may stop at a
collective that waits for a dead rank. A CPU does its own work at once. Both look alike here, so that no other code has
to ask which it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laststep.compat.cuda_driver import CudaDriver
from laststep.ranks.device_thread import DeviceThread

T = TypeVar("T")

NUMBERS: set[Any] = {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}


class Event(Protocol):
    """A mark in the queue; torch.cuda.Event is one."""

    def record(self) -> None:
        """Put the mark at the end of the queue, and take it from where it was before."""

    def query(self) -> bool:
        """Whether the device has passed the mark. Waits for nothing."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the device's time from this mark to another; it has passed both."""


class HostEvent:
    """A mark that is passed as soon as it is recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """See Event."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """See Event."""
        return True

    def synchronize(self) -> None:
        """See Event."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """See Event."""
        return 1000 * (end_event._at - self._at)


class DeviceQueue:
    """The queue of a CPU, where everything queued is done; `CudaQueue` is that of a GPU."""

    runs_ahead = False  # whether the CPU may be ahead of the device

    def event(self) -> Event:
        """A new mark."""
        return HostEvent()

    def synchronize(self) -> None:
        """Wait until the device has done everything that is queued."""

    def beside(self) -> AbstractContextManager[None]:
        """Read the device's memory in this block, in any thread, without waiting for what is queued."""
        return contextlib.nullcontext()

    def ask(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Do this `beside` the queue, for threads other than the one that trains, and return what it returns.

        Raises DeviceSilent when the device does not answer in time; see DeviceThread.
        """
        return work()

    def close(self) -> None:
        """Nothing is asked any more."""

    def host_buffer(self, count: int) -> Tensor:
        """`count` bytes of host memory that the device copies to directly; uint8."""
        return torch.empty(count, dtype=torch.uint8)  # takes no memory until it is used

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the CPU changes this tensor itself, ahead of the device."""
        return False


class ReadThrough(TorchFunctionMode):
    """In a block of this, the number in a scalar on the device is read through `buffer`, 8 bytes of pinned host memory.
    torch would take such memory from its cache, or, where that has none, from the driver."""

    def __init__(self, buffer: Tensor, device_type: str, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._buffer, self._device_type, self._synchronize = buffer, device_type, synchronize
        self._lock = threading.Lock()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides: called in place of each of torch's functions."""
        if func not in NUMBERS or type(args[0]) is not Tensor or args[0].device.type != self._device_type:
            return func(*args, **(kwargs or {}))
        if args[0].numel() != 1 or args[0].element_size() > len(self._buffer):
            return func(*args)  # which raises an error, or reads a complex number
        scalar = args[0].detach().reshape(1)
        with self._lock:
            number = self._buffer[: scalar.element_size()].view(scalar.dtype)
            number.copy_(scalar, non_blocking=True)
            self._synchronize()
            return func(number)


class CudaEvent:
    """A mark in a stream. Unlike torch's own, it does not hold Python's lock during a query."""

    def __init__(self, driver: CudaDriver | None) -> None:
        # blocking: a thread that waits for it sleeps
        self._event, self._driver = torch.cuda.Event(enable_timing=True, blocking=True), driver

    def record(self) -> None:
        """See Event."""
        self._event.record()

    def query(self) -> bool:
        """See Event."""
        handle = self._event.cuda_event  # none before it is first recorded
        passed = self._driver.has_passed(handle) if self._driver is not None and handle else None
        return self._event.query() if passed is None else passed  # torch raises the driver's error, with its name

    def synchronize(self) -> None:
        """See Event."""
        self._event.synchronize()

    def elapsed_time(self, end_event: CudaEvent) -> float:
        """See Event."""
        return self._event.elapsed_time(end_event._event)


class CudaQueue(DeviceQueue):
    """The stream of a GPU on which the rank trains. It is read on a second stream, which never waits for the first."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, CudaDriver.load()
        self._stream = torch.cuda.Stream(device)
        # While a collective hangs, new memory may wait for it. So what a rescue needs is held from now on, since torch
        # empties its caches whenever it records a CUDA graph.
        buffer = torch.empty(8, dtype=torch.uint8, pin_memory=True)
        self._reads = ReadThrough(buffer, "cuda", self.synchronize)
        with self.beside():
            self._held = torch.zeros(1, device=device)  # and with it the 2 MB around it, where hashes are computed
            self._held.item()  # makes the event with which torch marks a copy
        self._thread = DeviceThread(self.beside)

    def event(self) -> Event:
        """See DeviceQueue."""
        return CudaEvent(self._driver)

    def synchronize(self) -> None:
        """See DeviceQueue."""
        torch.cuda.current_stream(self._device).synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See DeviceQueue."""
        torch.cuda.set_device(self._device)  # each thread has its own, at first the first GPU
        with self._ignoring_captures(), torch.cuda.stream(self._stream), self._reads:
            yield

    def _ignoring_captures(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._driver is None else self._driver.ignoring_captures()

    def ask(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """See DeviceQueue."""
        return self._thread.ask(work, timeout_s)

    def close(self) -> None:
        """See DeviceQueue."""
        self._thread.close()

    def host_buffer(self, count: int) -> Tensor:
        """See DeviceQueue."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def on_host(self, tensor: Tensor) -> bool:
        """See DeviceQueue."""
        return tensor.is_cpu


def is_due_to_capture(error: RuntimeError) -> bool:
    """Whether a call failed because a stream captures a graph. That says nothing about the device."""
    return "captur" in str(error)  # each of CUDA's errors 900 to 908 has the word


def open_queue(device: torch.device) -> DeviceQueue:
    """The queue of this device. Open it before the warm-up: nothing is allocated on the device later."""
    return CudaQueue(device) if device.type == "cuda" else DeviceQueue()
