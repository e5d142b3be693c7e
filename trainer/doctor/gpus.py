"""Check: torch can use every GPU of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.doctor.problem import Problem


def check_gpus(in_driver: int, in_torch: int) -> Iterator[Problem]:
    """Compare the number of GPUs that the driver has with the number that torch can use."""
    if in_torch < in_driver:
        yield Problem(
            f"the driver has {in_driver} GPUs, but torch can use {in_torch}",
            "install a torch whose CUDA version is not newer than the one nvidia-smi shows",
        )
