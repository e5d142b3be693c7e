"""A device that does what is queued when the test's script says so. Its memory is the CPU's.

It behaves as badly as CUDA. With a `capacity`, its queue can be full: then the thread that queues waits until the
device has done something, and holds the driver's lock meanwhile, so that no other thread gets an answer. With `past`
the device writes its marks into host memory, and its memory can be read past the driver, as by another process. While a
stream `captures` a graph in torch's default mode, a query in any thread fails and spoils the capture, except in a
thread that is `beside` the queue: `CudaQueue.beside` asks CUDA to ignore captures.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from laststep.ranks.device import DeviceQueue, DeviceThread, Event, Ways
from tests.support.project import DEADLINE_S

T = TypeVar("T")
NOTHING: Callable[[], None] = lambda: None  # noqa: E731


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class ScriptedQueue(DeviceQueue):
    """Work and marks, in the order in which they were queued; the device has done the first `done` of them, and takes
    `capacity` in advance."""

    runs_ahead = True

    def __init__(self, capacity: int | None = None, past: bool = False) -> None:
        self.capacity, self.past = capacity, past
        self.full = False  # whether a thread waits to queue something
        self.driver = threading.RLock()  # held during each call
        self.capturing = self.spoiled = False  # whether a stream captures a graph, and whether that has failed
        self.queued: list[Callable[[], None]] = []
        self.done = 0
        self.limit = sys.maxsize  # the device does no more than this many
        self.waiting = False  # whether a thread waits for the device
        self.on_mark: Callable[[ScriptedEvent], None] = lambda event: None
        self._beside = threading.local()  # of the threads that queue beside the training: the device does that at once
        self._moved = threading.Condition(threading.RLock())
        self._thread = None if capacity is None else DeviceThread(self.beside)
        self._ways = Ways(self._thread, DeviceThread(contextlib.nullcontext)) if self._thread and past else None

    def work(self, effect: Callable[[], None] = NOTHING) -> None:
        """Queue work on the device's memory. Waits while the queue is full, and holds the driver's lock."""
        with self.driver, self._moved:
            if self.capacity is not None:
                capacity = self.capacity
                has_room = lambda: len(self.queued) - self.done < capacity  # noqa: E731
                self.full = not has_room()
                assert self._moved.wait_for(has_room, DEADLINE_S), "the script left the queue full"
                self.full = False
            self.queued.append(effect)
            self._go_on()

    def go_to(self, limit: int) -> None:
        """Let the device do this many pieces of its work, as soon as they are queued, and then hang."""
        with self._moved:
            self.limit = limit
            self._go_on()

    def wait_for(self, number: int) -> None:
        """Wait until the device has done the first `number` pieces of work."""
        self.call()
        with self._moved:
            self.waiting = self.done < number
            assert self._moved.wait_for(lambda: self.done >= number, DEADLINE_S), "the script left the device hanging"
            self.waiting = False

    def _go_on(self) -> None:
        while self.done < min(self.limit, len(self.queued)):
            self.queued[self.done]()
            self.done += 1
        self._moved.notify_all()

    def call(self) -> None:
        """What each call to the device does first."""
        with self.driver:
            pass

    @contextlib.contextmanager
    def captures(self) -> Iterator[None]:
        """In this block a stream captures a graph in torch's default mode."""
        self.capturing, self.spoiled = True, False
        yield
        self.capturing = False

    def event(self, asked: bool = True, waited: bool = True) -> ScriptedEvent:
        self.call()
        return ScriptedEvent(self)

    def synchronize(self) -> None:
        self.wait_for(len(self.queued))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self.call()
        before, self._beside.now = self.is_beside, True
        try:
            with _Calls(self) if self.capacity is not None else contextlib.nullcontext():
                yield
        finally:
            self._beside.now = before

    @property
    def takes_launches(self) -> bool:
        return self._thread is None or not self._thread.is_stuck

    def look(self, work: Callable[[], T]) -> T:
        return work() if self.past else self.launch(work)

    def launch(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        if self._thread is None:  # each call returns at once
            with self.beside():
                return work()
        return self._thread.ask(work, timeout_s)

    def read(self, work: Callable[[], T]) -> T:
        return self.launch(work) if self._ways is None else self._ways.read(work)

    def close(self) -> None:
        for ended in (self._ways, self._thread):
            if ended is not None:
                ended.close()

    @property
    def is_beside(self) -> bool:
        """Whether this thread queues beside the training."""
        return getattr(self._beside, "now", False)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.ndim == 0


class _Calls(TorchFunctionMode):
    """In a block of this each of torch's functions calls the device, as a copy from its memory does."""

    def __init__(self, queue: ScriptedQueue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._queue.call()
        return func(*args, **(kwargs or {}))


class ScriptedEvent(Event):
    """A mark in this queue."""

    def __init__(self, queue: ScriptedQueue) -> None:
        self._queue = queue
        self.place = 0  # in the queue, from 1

    def record(self) -> None:
        self._queue.call()
        if self._queue.is_beside:
            self.place = 0
            return
        self._queue.on_mark(self)
        self.place = len(self._queue.queued) + 1
        self._queue.work()

    def query(self) -> bool:
        if self._queue.past:
            return self._queue.done >= self.place
        self._queue.call()
        if self._queue.capturing and not self._queue.is_beside:
            self._queue.spoiled = True
            raise RuntimeError(CAPTURING)
        return self._queue.done >= self.place

    def synchronize(self) -> None:
        self._queue.wait_for(self.place)

    def elapsed_time(self, end_event: Any) -> float:
        return 1000.0 * (end_event.place - self.place)


class RewoundQueue(ScriptedQueue):
    """For a real loop: the CPU computes at once what a device would compute later. So the contents of the device's
    memory are noted at each mark, and `rewind` puts back those of the last one that the device has passed."""

    def __init__(self, capacity: int | None = None, past: bool = False) -> None:
        super().__init__(capacity, past)
        self.memory: Callable[[], Sequence[Tensor]] = list  # the tensors that the device changes in place
        self._notes: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []
        self.on_mark = self._note

    def _note(self, event: ScriptedEvent) -> None:
        contents = [(tensor.detach(), tensor.detach().clone()) for tensor in self.memory()]
        self._notes.append((len(self.queued) + 1, contents))

    def rewind(self) -> None:
        """Give the device's memory the contents that it has where the device hangs."""
        for place, contents in self._notes:
            if place <= self.done:
                passed = contents
        for tensor, content in passed:
            tensor.copy_(content)
