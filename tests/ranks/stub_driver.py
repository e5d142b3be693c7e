"""A stand-in for CUDA's driver, in C: a query can be held up, and notes its thread's capture mode."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from tests.support.needs import require

SOURCE = """
#include <time.h>
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
        self.library = ctypes.CDLL(str(target))

    def number(self, name: str) -> int:
        """The value of one of its variables."""
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        """Give one of its variables another value."""
        ctypes.c_int.in_dll(self.library, name).value = value
