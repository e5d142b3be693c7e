"""Reading a device's memory past a driver that does not answer: marks in host memory, and another process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from laststep.checkpoint.frozen import ChunkBuffers
from laststep.checkpoint.pack import Packed
from laststep.compat import cuda_driver
from laststep.compat.cuda_driver import HANDLE_BYTES, CudaDriver, MemoryReader
from laststep.ranks.device import DeviceThread, MappedMemory, Mark, Ways
from laststep.ranks.fault import DeviceSilent
from tests.ranks.stub_driver import StubDriver
from tests.support.project import DEADLINE_S, wait_until

BYTES = 1 << 16


def handle(path: Path) -> bytes:
    """The stub's handle of a file that plays a device's memory."""
    return os.fsencode(path).ljust(HANDLE_BYTES, b"\0")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> StubDriver:
    return StubDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def memory(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cuda_driver, "LIBRARY", driver.path)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short name: it is the handle
        path = Path(folder, "m")
        path.write_bytes(bytes(range(256)) * (BYTES // 256))
        yield path


@pytest.fixture
def reader(memory: Path) -> Iterator[MemoryReader]:
    reader = MemoryReader(0, 4096)
    yield reader
    reader.close()


def test_another_process_reads(reader: MemoryReader, memory: Path) -> None:
    """Any range, again and again, from one process."""
    content = memory.read_bytes()
    for offset, count in ((0, 4096), (5, 1), (BYTES - 7, 7), (0, 4096)):
        assert bytes(reader.read(handle(memory), offset, count, DEADLINE_S)) == content[offset : offset + count]


def test_a_process_that_hangs(reader: MemoryReader, memory: Path) -> None:
    """Its answer must not be taken for that of a later read: the process is replaced."""
    content = memory.read_bytes()
    reader.read(handle(memory), 0, 1, DEADLINE_S)
    with pytest.raises(TimeoutError):
        reader.read(handle(memory), 0, 13, 0.2)  # the stub sleeps over this
    assert bytes(reader.read(handle(memory), 3, 5, DEADLINE_S)) == content[3:8]


def test_what_cannot_be_mapped(reader: MemoryReader, memory: Path) -> None:
    """The error says what the driver said, and nobody waits."""
    with pytest.raises(OSError, match="the driver's error 400"):
        reader.read(handle(memory.with_name("gone")), 0, 1, DEADLINE_S)


def test_a_device_that_takes_no_second_process(memory: Path) -> None:
    """As in compute mode "exclusive process"."""
    reader = MemoryReader(7, 4096)
    with pytest.raises(OSError, match="the driver's error 101"):
        reader.read(handle(memory), 0, 1, DEADLINE_S)
    reader.close()


def test_marks_are_in_host_memory(driver: StubDriver) -> None:
    """The device writes them; to read one calls no driver, which may not answer."""
    cell = torch.zeros(1, dtype=torch.int32)
    mark = Mark(CudaDriver(driver.library), cell)
    for _ in range(3):
        driver.set("release", 0)
        assert mark.put(0) and not mark.is_reached()
        cell[0] = mark._number  # as the device does later
        assert mark.is_reached()
    driver.set("release", 1)
    assert mark.put(0) and mark.is_reached()
    assert not mark.put(0x801), "this device has none"


class There(MappedMemory):
    """Tensors in the file are those on the device."""

    def __init__(self, file: Path) -> None:
        super().__init__(torch.device("cuda", 0), None)  # type: ignore[arg-type]
        self.content = torch.from_file(str(file), size=BYTES, dtype=torch.uint8)
        self.start = self.content.data_ptr()
        self._segments = [(self.start, self.start + BYTES, handle(file))]

    def _is_there(self, tensor: Tensor) -> bool:  # type: ignore[override]
        return self.start <= tensor.data_ptr() < self.start + BYTES


@pytest.fixture
def there(memory: Path) -> Iterator[There]:
    there = There(memory)
    yield there
    there.close()


def test_a_state_is_read(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, whole tensors, and those with gaps in memory: the bytes that a save would have written."""
    monkeypatch.setattr("laststep.ranks.device.CHUNK_BYTES", 1000)
    floats = there.content[:4096].view(torch.int16)
    state = {
        "whole": floats,
        "image": floats[: 3 * 4 * 5].view(3, 4, 5).permute(2, 0, 1)[1:],
        "number": floats[7],
        "none": floats[:0],
        "host": torch.arange(5),
    }
    expected = [value.clone() for value in state.values()]
    packed = Packed(state)
    buffer, plain = torch.empty(packed.bytes, dtype=torch.uint8), torch.empty(packed.bytes, dtype=torch.uint8)
    packed.copy(0, packed.bytes, plain)
    with there:
        packed.copy(0, packed.bytes, buffer)
        assert float(state["number"]) == float(expected[2]) and state["number"].item() == expected[2].item()
        assert state["image"].tolist() == expected[1].tolist() and torch.equal(state["image"].cpu(), expected[1])
    assert torch.equal(buffer, plain)


def test_memory_that_came_later(there: There) -> None:
    """What torch has allocated since the memory was last noted cannot be mapped. That is said, not guessed."""
    there._segments[0] = (there.start, there.start + 100, b"")
    with there, pytest.raises(DeviceSilent, match="cannot map"):
        there.content[90:110].cpu()


def test_where_torchs_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted in the first steps, and anew once torch has allocated more. A segment without a handle, such as one
    that can grow, is left out."""
    segments = [{"address": 4096, "total_size": 10, "device": 0}, {"address": 8192, "total_size": 20, "device": 0}]
    stats: dict[str, Any] = {"num_device_alloc": 2}
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)

    def snapshot() -> list[dict[str, int]]:
        asked.append(1)
        return [*segments]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    handles = {4096: b"a", 8192: None, 1024: b"c"}
    memory = MappedMemory(torch.device("cuda", 0), SimpleNamespace(handle_of=handles.get))  # type: ignore[arg-type]
    for _ in range(3):
        memory.note()
    assert memory._segments == [(4096, 4106, b"a")] and len(asked) == 1
    segments.append({"address": 1024, "total_size": 5, "device": 0})
    stats["num_device_alloc"] = 3
    memory._noted_at -= DEADLINE_S
    memory.note()
    assert memory._segments == [(1024, 1029, b"c"), (4096, 4106, b"a")]


def test_what_cannot_be_read_is_said_at_the_start(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the user learns of it when steps are lost."""
    memory = MappedMemory(torch.device("cuda", 0), CudaDriver(driver.library))
    assert "expandable_segments" in memory.lack
    memory._segments = [(0, 1, b"")]
    assert memory.lack == ""
    driver.set("compute_mode", 3)
    assert "one process alone" in memory.lack
    driver.set("compute_mode", 0)


def test_the_second_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The driver is asked first, and the other way is taken only while it does not answer. A call that was given up may
    end late: what it writes then must not be what was read in the other way."""
    monkeypatch.setattr("laststep.ranks.device.ANSWER_S", 0.3)
    direct, past = DeviceThread(contextlib.nullcontext), DeviceThread(contextlib.nullcontext)
    ways, buffers = Ways(direct, past), ChunkBuffers(torch.zeros(4, dtype=torch.uint8))
    assert ways.read(threading.current_thread) is direct.thread
    release, late = threading.Event(), threading.Event()

    def read() -> Tensor:
        chunk = buffers.here()
        if threading.current_thread() is direct.thread:
            release.wait(DEADLINE_S)
            chunk.fill_(1)
            late.set()
        else:
            chunk.fill_(2)
        return chunk

    chunk = ways.read(read)
    assert chunk.tolist() == [2] * 4 and ways.is_direct_stuck
    assert ways.read(threading.current_thread) is past.thread
    release.set()
    assert late.wait(DEADLINE_S) and chunk.tolist() == [2] * 4, "the late call has overwritten what is being saved"
    wait_until(lambda: not ways.is_direct_stuck, "the driver's answer was not noticed")
    assert ways.read(threading.current_thread) is direct.thread
    assert capsys.readouterr().out.count("another process reads") == 1
    ways.close()
