"""The ring finds the newest state that is whole in a device's memory, wherever the device hangs and however far ahead
the CPU is. A wrong answer would save a torn state under the number of a good one, with intact hashes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from laststep.loops import snapshot as module
from laststep.loops.snapshot import Ring
from laststep.ranks import device as device_thread
from laststep.ranks.device import DeviceQueue
from laststep.ranks.fault import DeviceSilent
from tests.loops.scripted import ScriptedQueue
from tests.support.project import wait_until

STEPS = 5
PER_STEP = 5  # pieces of work in the device's queue: the step's collective, the mark, two halves, the mark


class Training:
    """Steps on a scripted device. Step j sets each of two tensors to j, and the host's counter, which is ahead."""

    def __init__(self) -> None:
        self.queue = ScriptedQueue()
        self.queue.limit = 0
        self.memory = {"first": 0, "second": 0}
        self.counter = 0
        self.ring: Ring[int] = Ring(self.queue, lambda: self.counter)
        with self.ring.update():
            self.queue.work()
            self.queue.work()
        self.queue.go_to(len(self.queue.queued))
        self.restored = len(self.queue.queued)

    def host(self) -> Iterator[int]:
        """What the CPU does, piece by piece; yields how much of the device's work the next piece waits for."""
        for step in range(1, STEPS + 1):
            yield 0
            self.queue.work()  # the forward and backward passes and their collectives
            yield self.restored + (step - 2) * PER_STEP if step > 2 else 0
            self.ring.begin_update()
            yield 0
            self.set("first", step)
            self.counter = step
            yield 0
            self.set("second", step)
            yield 0
            self.ring.end_update()
        yield 0

    def set(self, name: str, value: int) -> None:
        self.queue.work(lambda: self.memory.update({name: value}))

    def to(self, host: int, device: int) -> bool:
        """Let the CPU do `host` pieces and the device `device` of those queued. False when there is no such moment."""
        pieces = self.host()
        waits_for = next(pieces)
        for _ in range(host):
            if waits_for > self.restored + device:
                return False
            self.queue.go_to(max(self.queue.done, waits_for))
            waits_for = next(pieces)
        self.queue.go_to(self.restored + device)
        return self.queue.done == self.restored + device

    def whole(self, host: int, device: int) -> int | None:
        """The step whose state is whole, by the rule."""
        begun = sum(device >= step * PER_STEP + 2 for step in range(STEPS))
        ended = sum(device >= (step + 1) * PER_STEP for step in range(STEPS))
        return ended if begun == ended else None


MOMENTS = [(host, device) for host in range(STEPS * PER_STEP + 1) for device in range(host + 1)]


def test_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU anywhere, the device anywhere behind it: the state found is that of one step, in memory and on the
    host. Only in the middle of an update there is none."""
    monkeypatch.setattr(module, "DEVICE_S", 0.0)
    found = set()
    for host, device in MOMENTS:
        training = Training()
        if not training.to(host, device):
            continue
        expected = training.whole(host, device)
        assert training.ring.freeze(timeout_s=0.0) == (expected is not None), (host, device)
        if expected is not None:
            held = training.ring.held
            assert set(training.memory.values()) == {expected}, (host, device)
            assert (training.counter if held is None else held) == expected, (host, device)
            found.add((expected, (host - 1) // PER_STEP - expected))
    ahead = {by for _, by in found}
    assert {step for step, _ in found} == set(range(STEPS + 1)) and {0, 1, 2} <= ahead, "up to two steps ahead"


def test_the_device_goes_on_during_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that it waited for was only slow. What was copied is discarded, and the next whole state is found: that
    of a step that was queued, as no further one may begin."""
    monkeypatch.setattr(module, "DEVICE_S", 0.0)
    for host, device in MOMENTS:
        queued = Training()
        if not queued.to(host, device) or queued.whole(host, device) is None:
            continue
        for later in range(device + 1, host + 1):
            training = Training()
            training.to(host, device)
            assert training.ring.freeze(timeout_s=0.0)
            before = set(training.memory.values())
            training.queue.go_to(training.restored + later)
            if training.ring.is_whole():
                assert set(training.memory.values()) == before, (host, device, later)
            elif training.ring.freeze(timeout_s=0.0):
                held = training.ring.held
                values = {*training.memory.values(), training.counter if held is None else held}
                assert values == {training.whole(host, later)}, (host, device, later)


def test_an_update_that_has_begun_is_waited_for() -> None:
    """The device needs a moment for the update that it is in: that step is not lost."""
    training = Training()
    assert training.to(2 * PER_STEP, PER_STEP + 3)
    timer = threading.Timer(0.05, lambda: training.queue.go_to(training.restored + 2 * PER_STEP))
    timer.start()
    assert training.ring.freeze(timeout_s=0.0) and training.memory == {"first": 2, "second": 2}
    timer.join()


def test_nothing_is_whole_before_the_state_is_restored() -> None:
    assert not Ring[int](ScriptedQueue(), lambda: 0).freeze(timeout_s=0.0)


def test_the_cpu_waits_for_the_update_before_the_last() -> None:
    """Else nothing would bound how far it runs ahead, and no entry of the ring would be whole."""
    training = Training()
    training.queue.limit = training.restored + 1  # hangs in the collective of step 1
    thread = threading.Thread(target=lambda: list(training.host()), daemon=True)
    thread.start()
    wait_until(lambda: training.queue.waiting, "the CPU does not wait")
    assert len(training.queue.queued) == training.restored + 2 * PER_STEP + 1, "it is two updates ahead"
    held = [training.ring.freeze(timeout_s=0.0) and training.ring.held]
    training.queue.go_to(1000)  # it came back: the queued updates end, and no further one begins
    assert not training.ring.is_whole() and training.ring.freeze(timeout_s=0.0)
    assert training.memory == {"first": 2, "second": 2} and training.counter == 2, "the host holds it, too"
    assert [*held, training.ring.held] == [0, None]
    thread.join(timeout=0.1)
    assert thread.is_alive(), "the CPU is held before its next update"


@pytest.mark.parametrize("queue", [DeviceQueue(), ScriptedQueue()], ids=["cpu", "device"])
def test_own_work_and_progress(queue: DeviceQueue) -> None:
    """What the watchdog compares: it grows with each step's own work and with each update, on any device."""
    ring: Ring[int] = Ring(queue, lambda: 0)
    with ring.update():
        pass
    seen = [ring.passed()]
    for _ in range(4):
        ring.begin_work()
        ring.end_work()
        seen.append(ring.passed())
        with ring.update():
            pass
        seen.append(ring.passed())
    assert seen == list(range(2, 11)) and ring.busy_s > 0


def test_the_watchdog_sees_where_the_device_is() -> None:
    """The CPUs of all ranks are ahead and look alike. The device of the stuck rank has not ended its own work."""
    counts = []
    for hangs_in_own_work in (False, True):
        queue = ScriptedQueue()
        ring: Ring[int] = Ring(queue, lambda: 0)
        with ring.update():
            pass
        if hangs_in_own_work:
            queue.go_to(queue.done + 1)
        ring.begin_work()
        queue.work()
        ring.end_work()
        queue.go_to(queue.done)
        queue.work()  # the collective
        with ring.update():
            pass
        counts.append(ring.passed())
    assert counts == [3, 2]


class Full:
    """A ring whose device hangs in a step's collective, while the thread that trains launches into its full queue."""

    def __init__(self) -> None:
        self.queue = ScriptedQueue(capacity=3)
        self.ring: Ring[int] = Ring(self.queue, lambda: 0)
        with self.ring.update():
            pass
        self.restored = self.ring.passed()
        self.queue.limit = self.queue.done
        threading.Thread(target=self.train, daemon=True).start()
        wait_until(lambda: self.queue.full, "the queue does not fill")

    def train(self) -> None:
        self.ring.begin_work()
        for _ in range(10):  # its kernels, the first of which waits for a dead rank
            self.queue.work()
        self.ring.end_work()

    def end(self) -> None:
        self.queue.go_to(10**9)
        wait_until(lambda: self.ring.passed() > self.restored, "the device has gone on, and is not asked any more")
        self.queue.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    monkeypatch.setattr(device_thread, "ANSWER_S", 0.3)
    full = Full()
    yield full
    full.end()


def test_a_full_queue_holds_up_nobody(full: Full) -> None:
    """The thread that trains keeps the driver's lock while it waits for room. The watchdog sees no progress, a rescue
    that it cannot be had; neither waits for good."""
    assert full.ring.passed() == full.restored
    with pytest.raises(DeviceSilent):
        full.ring.freeze(timeout_s=0.0)


def test_a_capture_is_not_spoiled() -> None:
    """A custom loop captures a graph in torch's default mode. What other threads ask in the meantime would make torch
    raise an error in it, and the watchdog would take the answer for a fault of the device."""
    training = Training()
    assert training.to(2 * PER_STEP, PER_STEP)
    with training.queue.captures():
        assert training.ring.passed() == 4 and training.ring.freeze(timeout_s=0.0) and training.ring.is_whole()
    assert not training.queue.spoiled


def test_an_error_of_a_capture_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where captures cannot be ignored (ROCm), a query may fail. The device is as well as before; any other error is
    one of the device."""
    training = Training()
    assert training.to(2 * PER_STEP, PER_STEP)
    monkeypatch.setattr(training.queue, "look", lambda work: work())
    assert training.ring.passed() == 4
    with training.queue.captures():
        assert training.ring.passed() == 4
    assert training.queue.spoiled

    def fails(work: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(training.queue, "look", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        training.ring.passed()
