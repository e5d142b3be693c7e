"""What the check runs on: `python -m tests.gpu.machine` prints it as JSON, in a process that a driver may hang."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.support.project import PROJECT

PACKAGES = ("torch", "torchvision", "submitit", "omegaconf", "pytest", "nvidia-ml-py")
PREFIXES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_NCCL_", "PYTORCH_")
DRIVER = Path("/proc/driver/nvidia/version")


def facts() -> dict[str, Any]:
    """Hardware and versions. Nothing that names the machine or its user."""
    found: dict[str, Any] = {"commit": _commit(), "python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    found["processor"], found["cores"] = _processor(), len(os.sched_getaffinity(0))
    found["driver"] = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else None
    found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    found["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
    if found["gpus"] and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["links"] = _output("nvidia-smi", "topo", "-m")
    found["compile lacks"] = lack_of_compilers()
    found["environment"] = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    return found


def lack_of_compilers() -> str | None:
    """What torch.compile lacks here: Triton compiles a launcher in C for each of its kernels."""
    if not importlib.util.find_spec("triton"):
        return "triton: pip install triton"
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return "a C compiler, e.g. gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h, e.g. of the system package python3-dev"
    return None


def _gpu(index: int) -> dict[str, Any]:
    """A GPU."""
    gpu = torch.cuda.get_device_properties(index)
    return {"name": gpu.name, "gib": round(gpu.total_memory / 2**30, 1), "capability": f"{gpu.major}.{gpu.minor}"}


def _processor() -> str:
    """The kind of processor."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of this clone, with a + if something has changed since."""
    commit = _output("git", "-C", str(PROJECT), "rev-parse", "--short", "HEAD")
    changed = commit and _output("git", "-C", str(PROJECT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if changed else commit


def _output(*words: str) -> str | None:
    """What a command prints; None if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return None


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
