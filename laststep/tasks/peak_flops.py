"""Peak FLOPs of GPUs by name, from their data sheets: dense products of bf16, or fp16 before Ampere."""

from __future__ import annotations

# The first that is part of the name counts, so variants stand before their family.
PEAK = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 383e12),
)


def peak_flops(gpu: str) -> float | None:
    """FLOPs per second of a GPU of this name; None for one that the table lacks."""
    return next((peak for name, peak in PEAK if name in gpu), None)
