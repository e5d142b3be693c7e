"""A device that does not answer blocks one thread, which nobody waits for longer than a few seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from laststep.ranks import device as module
from laststep.ranks.device import DeviceThread
from laststep.ranks.fault import DeviceSilent
from tests.support.project import DEADLINE_S, wait_until

SHORT_S = 0.2


class Beside:
    """What the thread enters: notes where it is entered and left."""

    def __init__(self) -> None:
        self.entered: list[threading.Thread] = []
        self.left: list[threading.Thread] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered.append(threading.current_thread())
        yield
        self.left.append(threading.current_thread())


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets calls go that wait for it, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def waits_for(event: threading.Event) -> Callable[[], bool]:
    return lambda: event.wait(DEADLINE_S)


def test_one_thread_does_all_calls() -> None:
    """It is beside the queue from its start: choosing the device in a rescue would already be a call that may block."""
    beside = Beside()
    thread = DeviceThread(beside)
    assert [thread.ask(threading.current_thread) for _ in range(3)] == beside.entered * 3 and len(beside.entered) == 1
    assert thread.ask(lambda: thread.ask(lambda: 7)) == 7, "a call within a call would wait for itself"
    thread.close()
    wait_until(lambda: beside.left == beside.entered, "the thread does not end")


def test_errors_reach_the_caller() -> None:
    """Also those of entering: the rank cannot be rescued then, and must say so at its start."""

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    thread = DeviceThread(contextlib.nullcontext)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        thread.ask(fails)
    assert thread.ask(lambda: 7) == 7
    thread.close()

    def no_device() -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        DeviceThread(no_device)


def test_a_call_that_does_not_return(release: threading.Event) -> None:
    """The caller waits for seconds, the next one not at all; once the device answers again, both can ask."""
    thread = DeviceThread(contextlib.nullcontext)
    with pytest.raises(DeviceSilent, match="its device does not answer"):
        thread.ask(waits_for(release), SHORT_S)
    done: list[int] = []
    with pytest.raises(DeviceSilent):
        thread.ask(lambda: done.append(1), timeout_s=DEADLINE_S)  # at once, or this test takes minutes
    release.set()

    def answers() -> bool:
        with contextlib.suppress(DeviceSilent):
            return thread.ask(lambda: True)
        return False

    wait_until(answers, "the device has answered, and nobody asks it any more")
    assert not done, "what was refused must not be done later: the caller has acted on that"
    thread.close()


def test_two_callers(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's thread has asked before. A rescue waits for what is left of that time, not for as long again."""
    monkeypatch.setattr(module, "ROUND_S", 0.01)
    thread, asked = DeviceThread(contextlib.nullcontext), threading.Event()

    def first() -> None:
        asked.set()
        release.wait(DEADLINE_S)

    def watch() -> None:
        with contextlib.suppress(DeviceSilent):
            thread.ask(first, 1.0)

    watching = threading.Thread(target=watch)
    watching.start()
    assert asked.wait(DEADLINE_S)
    with pytest.raises(DeviceSilent):
        thread.ask(lambda: None, timeout_s=DEADLINE_S)
    watching.join(DEADLINE_S)
    release.set()
    thread.close()
