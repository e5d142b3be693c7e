"""Which device the tests use, and what a test needs of it, or of the machine.

LASTSTEP_GPU_CHECK names the only device (cuda or cpu); `python -m tests.gpu` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchvision

from laststep.ranks import device as devices
from laststep.ranks.launchers import detect_world
from tests.gpu.machine import lack_of_compilers
from tests.support.runs import FAULTY

VARIABLE = "LASTSTEP_GPU_CHECK"
CHOSEN = os.environ.get(VARIABLE)
FIRST_WITH_BF16 = (8, 0)  # compute capability; the first with TF32, too

EXACT = "train.deterministic=true"
# The first step on a GPU takes seconds.
FAULTY_ON_GPU = (*FAULTY, "task=tests.gpu.tasks.FaultyOnGPU", "launch.hang_timeout_s=15", EXACT)

needs_gpu = pytest.mark.gpu(1)
_CUDA = pytest.param("cuda", marks=needs_gpu)
# For tests that have something to say about both.
DEVICES: list[Any] = [{"cpu": "cpu", "cuda": _CUDA}[CHOSEN]] if CHOSEN else ["cpu", _CUDA]
# For tests of which others, elsewhere, have the CPU's side: there a CPU is only a stand-in, to test these tests.
GPU_OR_STAND_IN: list[Any] = ["cpu" if CHOSEN == "cpu" else _CUDA]


def place(device: str) -> torch.device:
    """The device by its full name, as a rank has it."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def ranks_on(device: str, count: int) -> tuple[tuple[str, ...], Callable[[], None] | None]:
    """The options of `count` ranks on this device, and what each of them calls first: on CPUs, on a GPU each, or, where
    there are fewer, on the first GPU together, over NCCL all the same."""
    return (f"device={device}",), None if device == "cpu" else one_gpu_each


def share_the_gpu() -> None:
    """Make this rank use the first GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # else the preflight check misses the others
    devices._choose_device = lambda config, world: torch.device("cuda", 0)


def one_gpu_each() -> None:
    """Make this rank use the GPU of its number, also where one machine stands for several nodes; where there are too
    few GPUs, the first one, over NCCL."""
    world = detect_world()
    if torch.cuda.device_count() >= world.size:
        devices._choose_device = lambda config, world: torch.device("cuda", world.rank)
    else:
        share_the_gpu()
        os.environ.update(nccl_host(world.rank))


def nccl_host(rank: int) -> dict[str, str]:
    """Variables with which NCCL believes that this rank is alone on its host. It refuses two ranks on one GPU of one
    host; of different hosts it cannot tell. They communicate by NCCL's sockets, with its kernels and its proxy."""
    return {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_HOSTID": f"laststep-test-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }


def skip_without(options: Iterable[str]) -> None:
    """Skip a test whose options need what this machine lacks: arithmetic, which the product refuses, or the programs
    with which torch compiles for a GPU."""
    for name in ("bf16", "tf32"):
        if f"train.precision={name}" in options and torch.cuda.get_device_capability() < FIRST_WITH_BF16:
            pytest.skip(f"{torch.cuda.get_device_name()} has no {name}")
    if "train.compile=true" in options and (lack := lack_of_compilers()):
        pytest.skip(f"torch.compile needs {lack}")


def skip_without_nvjpeg() -> None:
    """Skip a test of JPEGs on the GPU where torchvision is built without the library that decodes them."""
    jpeg = torchvision.io.encode_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8))
    try:
        torchvision.io.decode_jpeg([jpeg], device="cuda")
    except RuntimeError as error:
        if "nvjpeg" not in str(error).lower():
            raise
        pytest.skip(f"torchvision {torchvision.__version__} is built without nvJPEG")
