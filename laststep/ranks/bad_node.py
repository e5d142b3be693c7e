"""Which errors of a rank are the fault of its node. Any other error may be a bug of the user's, and blames no node."""

from __future__ import annotations

import re

# What CUDA and torch say of a GPU or a driver that has failed. Not of an illegal memory access or a failed assertion,
# which a kernel of the user's may cause, nor of memory that runs out.
_HARDWARE = re.compile(
    r"CUDA error: (uncorrectable|unknown error|no CUDA-capable device|CUDA-capable device\(s\) is/are busy"
    r"|startup failure|system (not yet initialized|has unsupported display driver)"
    r"|Invalid access of peer GPU memory over nvlink or a hardware error)"
    r"|No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver initialization failed"
)


class BadNode(RuntimeError):
    """A check has found that a node is bad. Raised in a rank, it ends the attempt, and the record blames the node."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host


def blamed_host(error: BaseException, host: str) -> str:
    """The node that is to blame for an error of a rank on `host`; empty if none is."""
    if isinstance(error, BadNode):
        return error.host
    return host if isinstance(error, RuntimeError) and _HARDWARE.search(str(error)) else ""
