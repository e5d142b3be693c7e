"""Host memory for what is saved and restored: hidden from forked processes, and pinned for a GPU."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device (CUDA Runtime API, section 6.11)


# All that is mapped now, and in a forked process what was: there it must never be unmapped. Its addresses are free, and
# may have been given to others.
_mapped = weakref.WeakSet[mmap.mmap]()
_inherited: list[mmap.mmap] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))


class HostMemory:
    """Zeroed memory of this process alone, as a tensor of bytes.

    It is hidden from processes forked later, such as loader workers: otherwise each page would be copied on the next
    write, which makes a save ten times as slow, and would stay in memory as long as they live. Reads past the page
    cache (`laststep.checkpoint.files`) rely on it.
    """

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _mapped.add(self._memory)
        if hasattr(mmap, "MADV_DONTFORK"):  # Linux
            self._memory.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # the first access to new memory costs a call of the kernel for each page
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)[:count]

    def release(self, start: int, stop: int) -> None:
        """Return the whole pages in [start, stop) to the system. Their bytes are zero from now on."""
        start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


def reusable_buffer(count: int, device: torch.device) -> Tensor:
    """A buffer of `count` bytes that every save copies its stripe into, so that only the first save pays for new pages.

    For a GPU the memory is pinned. torch's own pinned memory would be up to twice as large: its allocator rounds every
    request up to a power of two (PowerOf2Ceil in ATen/core/CachingHostAllocator.h). So whole pages are mapped and then
    pinned, as torch/cuda/_pin_memory_utils.py does; where CUDA refuses that, torch's allocator is used.
    """
    if device.type == "cuda":
        pinned = _pinned(whole_pages(count), device)
        return torch.empty(count, dtype=torch.uint8, pin_memory=True) if pinned is None else pinned[:count]
    return HostMemory(count).tensor.zero_()


def whole_pages(count: int) -> int:
    """`count` bytes, at least one, rounded up to whole pages."""
    return -(-max(count, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _pinned(count: int, device: torch.device) -> Tensor | None:
    """`count` bytes of pinned memory, which is unpinned before it is freed; None if CUDA refuses."""
    # Written to first: the driver keeps its lock while it pins pages, and other threads launch kernels meanwhile.
    memory = HostMemory(count).tensor.zero_()
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, count, PORTABLE)):
        with suppress(RuntimeError):  # CUDA reports the refusal once more, at the next kernel: let it be this one
            torch.zeros(1, device=device)
        return None
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return memory
