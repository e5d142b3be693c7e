"""The memory of tensors on a CPU."""

from __future__ import annotations

import ctypes
import os

# See malloc.h and mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST = 32 << 20  # bytes of a block that is kept; gaps left by larger ones would raise the peak memory


def keep_freed_memory() -> None:
    """Have the C library keep memory that is freed, since the next step will need as much.

    By default it gives large blocks back to the kernel. Then each step takes them anew, page by page, which can take a
    noticeable part of its time. A user who has chosen how to allocate memory keeps that. Without glibc nothing happens.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_THRESHOLD, LARGEST)
