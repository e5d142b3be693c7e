"""Direct calls of CUDA's driver, by ctypes, which releases Python's lock.

* Events are queried without torch: `torch.cuda.Event.query` holds Python's lock, and the driver may not return for as
  long as another thread waits to launch a kernel into a full queue. Then no thread of this process would run.
* `write_number` has the device write a number into host memory when it reaches a place in a stream. Reading that
  number shows the device's progress without a call of the driver.
* `MemoryReader` reads a device's memory in another process. While a launch waits for room in a full queue, the driver
  holds a lock that every other call of the process needs, even a copy on another stream (seen: driver 580, CUDA 13, an
  H200). A process with a context of its own maps the same memory by CUDA's IPC handles. This file is the program of
  that process, so it imports the standard library alone.

Source: CUDA Driver API, sections 6.14 (memory), 6.18 (streams), 6.19 (events), 6.21 (stream memory operations).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

LIBRARY = "libcuda.so.1"
SUCCESS, NOT_READY = 0, 600  # CUresult
RELAXED = 2  # CUstreamCaptureMode
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that cuIpcOpenMemHandle takes
COMPUTE_MODE, EXCLUSIVE_PROCESS = 20, 3  # CUdevice_attribute, CUcomputemode
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The driver of this machine's GPUs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._query, self._exchange_mode = library.cuEventQuery, library.cuThreadExchangeStreamCaptureMode
        self._query.argtypes = [ctypes.c_void_p]
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]
        self._write = getattr(library, "cuStreamWriteValue32_v2", None)
        if self._write is not None:
            self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

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

    def write_number(self, stream: int, address: int, number: int) -> bool:
        """Have the device write `number`, 32 bits, to pinned host memory at `address`, once it has done what is queued
        in the stream (`torch.cuda.Stream.cuda_stream`). False if this driver or device cannot."""
        return self._write is not None and self._write(stream, address, number, 0) == SUCCESS

    def handle_of(self, address: int) -> bytes | None:
        """The handle by which another process maps the allocation that begins at `address`; None if the driver has
        none, as for memory of an expandable segment."""
        handle = _Handle()
        status = self._library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle) if status == SUCCESS else None

    def is_exclusive(self, device: int) -> bool:
        """Whether a device takes one process alone (`nvidia-smi -c EXCLUSIVE_PROCESS`)."""
        mode = ctypes.c_int()
        status = self._library.cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, device)
        return status == SUCCESS and mode.value == EXCLUSIVE_PROCESS

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


ROUND_S = 0.1  # waiting is counted in rounds of this length
REQUEST = struct.Struct(f"<{HANDLE_BYTES}sQQ")  # a handle, and the range of its allocation's bytes
ANSWER = struct.Struct("<i")  # a CUresult


class MemoryReader:
    """A process that reads the memory of one device. It starts at the first `read`, which takes a second or two, and
    ends with this process. One thread uses it at a time."""

    def __init__(self, device: int, chunk_bytes: int) -> None:
        """`device` is its number among those that this process sees. At most `chunk_bytes` are read at once."""
        self._device, self._bytes = device, chunk_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer: mmap.mmap | None = None

    def read(self, handle: bytes, offset: int, count: int, timeout_s: float) -> memoryview:
        """`count` bytes of an allocation, valid until the next call. Raises OSError, TimeoutError among them.

        Time in which this process is suspended does not count.
        """
        try:
            if self._buffer is None:
                self._start(timeout_s)
            assert self._process is not None and self._process.stdin is not None and self._buffer is not None
            os.write(self._process.stdin.fileno(), REQUEST.pack(handle, offset, count))
            self._await_answer(timeout_s)
        except OSError:
            self.close()  # an answer that comes late must not be taken for the next one
            raise
        return memoryview(self._buffer)[:count]

    def close(self) -> None:
        """End the process. The next `read` starts another."""
        process, self._process, self._buffer = self._process, None, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            threading.Thread(target=process.wait, daemon=True).start()  # it may be in the driver, and end late

    def _start(self, timeout_s: float) -> None:
        shared = os.memfd_create("laststep")
        try:
            os.truncate(shared, self._bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self._device), str(shared), LIBRARY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=[shared],
                start_new_session=True,  # a Ctrl-C is not meant for it
            )
            buffer = mmap.mmap(shared, self._bytes)
        finally:
            os.close(shared)
        self._await_answer(timeout_s)
        self._buffer = buffer

    def _await_answer(self, timeout_s: float) -> None:
        assert self._process is not None and self._process.stdout is not None
        answers = self._process.stdout.fileno()
        if not any(select.select([answers], [], [], ROUND_S)[0] for _ in range(math.ceil(timeout_s / ROUND_S))):
            raise TimeoutError("the process that reads the device's memory has not answered")
        answer = os.read(answers, ANSWER.size)
        if len(answer) < ANSWER.size:
            raise OSError("the process that reads the device's memory has ended")
        (status,) = ANSWER.unpack(answer)
        if status != SUCCESS:
            raise OSError(f"another process cannot read the device's memory: the driver's error {status}")


def serve(device: int, shared: int, driver: str) -> int:
    """The program of that process: answer requests from standard input until it ends. Returns the exit status."""
    size = os.fstat(shared).st_size
    buffer = mmap.mmap(shared, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    library, context, number = ctypes.CDLL(driver), ctypes.c_void_p(), ctypes.c_int()
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    status = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(number), device)
        or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        or library.cuCtxSetCurrent(context)
    )
    os.write(1, ANSWER.pack(status))
    if status:
        return 1
    library.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), 0)  # if it can: faster copies
    mapped: dict[bytes, int] = {}
    while len(request := os.read(0, REQUEST.size)) == REQUEST.size:
        handle, offset, count = REQUEST.unpack(request)
        status = SUCCESS
        if handle not in mapped:
            base = ctypes.c_uint64()
            status = library.cuIpcOpenMemHandle_v2(
                ctypes.byref(base), _Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS
            )
            if not status:
                mapped[handle] = base.value
        if not status:
            status = library.cuMemcpyDtoH_v2(
                ctypes.c_void_p(address), ctypes.c_uint64(mapped[handle] + offset), ctypes.c_size_t(count)
            )
        os.write(1, ANSWER.pack(status))
    return 0


if __name__ == "__main__":
    os._exit(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
