"""What needs a GPU: `python -m pytest tests/gpu`. Bodies that mean something on a CPU run there too, so as to stay true
where there is no GPU. benchmarks/gpu.py says how both run on a machine that has torch and no more."""

from __future__ import annotations

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
