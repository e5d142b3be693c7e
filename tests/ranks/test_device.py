"""A rank's device: which GPU it has, which of its errors blame the node, and the memory of a CPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from laststep.ranks.device import gpu_uuid
from laststep.ranks.fault import BadNode, blamed_host
from tests.support.project import DEADLINE_S, PROJECT

CARD, OTHER = "0e5b1f00-1111-2222-3333-444444444444", "0e5b1f00-5555-6666-7777-888888888888"


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        (None, 0, f"GPU-{CARD}"),
        (None, 1, f"GPU-{OTHER}"),
        ("1,0", 0, f"GPU-{CARD}"),
        (f"GPU-{CARD}", 0, f"GPU-{CARD}"),
        ("MIG-a", 0, "MIG-a"),
        ("MIG-a, MIG-b", 1, "MIG-b"),
    ],
)
def test_the_uuid_of_a_gpu(visible: str | None, index: int, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of one GPU must not look like the same device, nor two GPUs, or a right layout would be refused."""
    known = [SimpleNamespace(uuid=CARD), SimpleNamespace(uuid=OTHER)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[device.index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_uuid(torch.device("cuda", index)) == uuid


def test_a_device_without_a_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none, and a virtual GPU may have none: neither is the same device as another one."""
    nothing = SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: nothing)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_uuid(torch.device("cpu")) == gpu_uuid(torch.device("cuda", 0)) == ""


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
    """A wrong answer lets a run leave good nodes because of a bug of its own."""
    assert blamed_host(error, "n1") == host


ROUNDS, BLOCKS, MEGABYTES = 10, 8, 20  # more than what glibc keeps by itself
PAGES = ROUNDS * BLOCKS * MEGABYTES * 256
FREED = f"""
import resource
from laststep.ranks.device import keep_freed_memory

keep_freed_memory()
for number in range(1 + {ROUNDS}):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"1" * ({MEGABYTES} << 20) for _ in range({BLOCKS})]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**env: str) -> int:
    """How many pages the process has taken from the kernel after the first round."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    done = subprocess.run(
        [sys.executable, "-c", FREED], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_blocks_take_the_memory_of_those_before() -> None:
    """Else each step of a training on CPUs would get the same memory anew, page by page."""
    assert page_faults() < PAGES / 100


@pytest.mark.parametrize("chosen", [{"MALLOC_TOP_PAD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_a_users_own_choice_stays(chosen: dict[str, str]) -> None:
    """Somebody who has set the C library up, such as for a machine with little memory, knows why."""
    assert page_faults(**chosen) > PAGES / 2
