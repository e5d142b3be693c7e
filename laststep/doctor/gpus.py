"""Check: torch can use every GPU of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from laststep.doctor.problem import Problem
from laststep.say import counted


def check_gpus(in_driver: int, in_torch: int) -> Iterator[Problem]:
    """Compare the number of GPUs that the driver has with the number that torch can use."""
    if in_torch < in_driver:
        yield Problem(
            f"the driver has {counted(in_driver, 'GPU')}, but torch can use {in_torch}",
            "install a torch whose CUDA version is not newer than the one nvidia-smi shows",
        )
