"""A device that does what is queued when the test's script says so. Its memory is the CPU's."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from tests.support.waiting import DEADLINE_S
from trainer.world.device_queue import DeviceQueue

NOTHING: Callable[[], None] = lambda: None  # noqa: E731


class ScriptedQueue(DeviceQueue):
    """Work and marks, in the order in which they were queued; the device has done the first `done` of them."""

    runs_ahead = True

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.done = 0
        self.limit = sys.maxsize  # the device does no more than this many
        self.waiting = False  # whether a thread waits for the device
        self.on_mark: Callable[[ScriptedEvent], None] = lambda event: None
        self._beside = threading.local()  # of the threads that queue beside the training: the device does that at once
        self._moved = threading.Condition(threading.RLock())

    def work(self, effect: Callable[[], None] = NOTHING) -> None:
        """Queue work on the device's memory."""
        with self._moved:
            self.queued.append(effect)
            self._go_on()

    def go_to(self, limit: int) -> None:
        """Let the device do this many pieces of its work, as soon as they are queued, and then hang."""
        with self._moved:
            self.limit = limit
            self._go_on()

    def wait_for(self, number: int) -> None:
        """Wait until the device has done the first `number` pieces of work."""
        with self._moved:
            self.waiting = self.done < number
            assert self._moved.wait_for(lambda: self.done >= number, DEADLINE_S), "the script left the device hanging"
            self.waiting = False

    def _go_on(self) -> None:
        while self.done < min(self.limit, len(self.queued)):
            self.queued[self.done]()
            self.done += 1
        self._moved.notify_all()

    def event(self) -> ScriptedEvent:
        return ScriptedEvent(self)

    def synchronize(self) -> None:
        self.wait_for(len(self.queued))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        before, self._beside.now = self.is_beside, True
        yield
        self._beside.now = before

    @property
    def is_beside(self) -> bool:
        """Whether this thread queues beside the training."""
        return getattr(self._beside, "now", False)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.ndim == 0


class ScriptedEvent:
    """A mark in this queue."""

    def __init__(self, queue: ScriptedQueue) -> None:
        self._queue = queue
        self.place = 0  # in the queue, from 1

    def record(self) -> None:
        if self._queue.is_beside:
            self.place = 0
            return
        self._queue.on_mark(self)
        self.place = len(self._queue.queued) + 1
        self._queue.work()

    def query(self) -> bool:
        return self._queue.done >= self.place

    def synchronize(self) -> None:
        self._queue.wait_for(self.place)

    def elapsed_time(self, end_event: Any) -> float:
        return 1000.0 * (end_event.place - self.place)


class RewoundQueue(ScriptedQueue):
    """For a real loop: the CPU computes at once what a device would compute later. So the contents of the device's
    memory are noted at each mark, and `rewind` puts back those of the last one that the device has passed."""

    def __init__(self) -> None:
        super().__init__()
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
