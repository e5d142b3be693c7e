"""Which errors blame a node. A wrong answer lets a run leave good nodes because of a bug of its own."""

from __future__ import annotations

import pytest

from laststep.ranks.fault import BadNode, blamed_host


@pytest.mark.parametrize(
    ("error", "host"),
    [
        (BadNode("n3", "row remapping has failed on GPU 2"), "n3"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"), "n1"),
        (RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"), "n1"),
        (RuntimeError("CUDA error: unknown error"), "n1"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "n1"),
        (RuntimeError("No CUDA GPUs are available"), "n1"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (RuntimeError("CUDA error: device-side assert triggered"), ""),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), ""),
        (RuntimeError("CUDA error: invalid device ordinal"), ""),
        (ValueError("CUDA error: unknown error"), ""),
        (ValueError("a bad sample"), ""),
    ],
)
def test_blamed(error: Exception, host: str) -> None:
    assert blamed_host(error, "n1") == host
