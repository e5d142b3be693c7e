"""The buffer of a save: exact in size, pinned for a GPU. CUDA's runtime is a stand-in; tests/gpu has the real one."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from laststep.checkpoint.memory import PORTABLE, reusable_buffer, whole_pages

CUDA = torch.device("cuda")


class Runtime:
    """Stands in for torch.cuda.cudart(): notes what is pinned."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        assert flags == PORTABLE and address % mmap.PAGESIZE == 0
        if not self.answer:
            self.pinned[address] = count
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 3 * (1 << 20) + 5])
def test_exact_in_size(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pinned memory is rounded up to a power of two: of a node's 2 TB, a state of 1.1 TB would take all."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = reusable_buffer(count, CUDA)
    assert buffer.numel() == count
    assert list(runtime.pinned.values()) == [whole_pages(count)]
    assert count <= whole_pages(count) < max(count, 1) + mmap.PAGESIZE
    buffer.fill_(1)
    part = buffer[: count // 2]
    del buffer
    assert runtime.pinned, "a part of it is still in use"
    del part
    assert not runtime.pinned, "memory that is freed while it is pinned would stay the device's"


def test_where_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may limit locked memory: a save with a larger buffer is better than none."""
    asked: list[SimpleNamespace] = []
    empty = torch.empty

    def noted(*size: int, pin_memory: bool = False, **more: object) -> torch.Tensor:
        asked.append(SimpleNamespace(size=size, pin_memory=pin_memory))
        return empty(*size, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(answer=2))
    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("CUDA error")))
    assert reusable_buffer(5000, CUDA).numel() == 5000
    assert asked[-1] == SimpleNamespace(size=(5000,), pin_memory=True)
