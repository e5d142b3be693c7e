"""Functions of CUDA's driver that torch offers only while it holds Python's lock, or not at all.

torch 2.14 holds Python's lock during Event.query() and set_device() (seen with a stand-in for CUDA's runtime). While a
thread waits to launch a kernel into a full queue, the driver may keep its own lock, so that such a call waits for the
device. If it held Python's lock meanwhile, no thread of this process would run, and nothing could end the process in
order. ctypes releases Python's lock.

The names are those of the driver's own interface (CUDA Driver API, sections 6.8, 6.18 and 6.19), which stays the same
from version to version; the runtime's events are the driver's (section 6.44).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

LIBRARY = "libcuda.so.1"
SUCCESS, NOT_READY = 0, 600  # CUresult
RELAXED = 2  # CUstreamCaptureMode


class CudaDriver:
    """The driver of this machine's GPUs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._query, self._exchange_mode = library.cuEventQuery, library.cuThreadExchangeStreamCaptureMode
        self._query.argtypes = [ctypes.c_void_p]
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]

    @classmethod
    def load(cls) -> CudaDriver | None:
        """The driver that torch uses; None where there is no such library, as with ROCm."""
        try:
            return cls(ctypes.CDLL(LIBRARY))
        except (OSError, AttributeError):
            return None

    def has_passed(self, event: int) -> bool | None:
        """Whether the device has passed an event (`torch.cuda.Event.cuda_event`); None if the driver reports an
        error."""
        status = self._query(event)
        return status == SUCCESS if status in (SUCCESS, NOT_READY) else None

    @contextlib.contextmanager
    def ignoring_captures(self) -> Iterator[None]:
        """In this block this thread may call anything, whatever another thread captures. In CUDA's default mode, in
        which torch captures graphs, a query in any thread of the process would fail, and so would the capture."""
        mode = ctypes.c_int(RELAXED)
        self._exchange_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))
