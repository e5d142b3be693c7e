"""A stand-in for CUDA's driver, in C: a query can be held up, and notes its thread's capture mode. A device's memory is
a file, whose name is its IPC handle; a process maps it to read it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from tests.support.needs import require

SOURCE = """
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
volatile int release = 1, waiting = 0, queried_in = -1, status = 0;
static __thread int mode = 0;  /* CU_STREAM_CAPTURE_MODE_GLOBAL */
int current_mode(void) { return mode; }
int cuThreadExchangeStreamCaptureMode(int *other) { int mine = mode; mode = *other; *other = mine; return 0; }
int cuEventQuery(void *event) {
    struct timespec pause = {0, 1000000};
    queried_in = mode;
    waiting = 1;
    for (int i = 0; !release && i < 10000; i++) nanosleep(&pause, 0);  /* at most ten seconds */
    waiting = 0;
    return event == (void *)0x600 ? 600 : status;
}
typedef struct { char path[64]; } Handle;
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &status; return 0; }
int compute_mode = 0;
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 20 ? compute_mode : -1;
    return 0;
}
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) { return 1; }
int cuIpcOpenMemHandle_v2(uint64_t *base, Handle handle, unsigned flags) {
    struct stat found;
    int file = open(handle.path, O_RDONLY);
    if (file < 0 || fstat(file, &found)) return 400;
    void *memory = mmap(0, found.st_size, PROT_READ, MAP_SHARED, file, 0);
    *base = (uint64_t)memory;
    return memory == MAP_FAILED ? 2 : 0;
}
int cuMemcpyDtoH_v2(void *into, uint64_t from, size_t count) {
    if (count == 13) sleep(60);
    memcpy(into, (void *)from, count);
    return 0;
}
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t number, unsigned flags) {
    if (release) *(volatile uint32_t *)address = number;
    return stream == (void *)0x801 ? 801 : 0;
}
"""


class StubDriver:
    """The library; `library` is what `CudaDriver` takes."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("g++")
        require(None if compiler else "no C compiler on this machine: apt-get install g++")
        assert compiler is not None
        source, target = folder / "driver.c", folder / "libdriver.so"
        source.write_text(SOURCE if compiler.endswith("cc") else f'extern "C" {{\n{SOURCE}\n}}')
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
        self.path = str(target)
        self.library = ctypes.CDLL(self.path)

    def number(self, name: str) -> int:
        """The value of one of its variables."""
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        """Give one of its variables another value."""
        ctypes.c_int.in_dll(self.library, name).value = value
