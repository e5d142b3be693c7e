"""Tests on a GPU: `make gpu-check`. Tests that also make sense on a CPU run on a CPU as well, in `make test`.

benchmarks/gpu.py says how to run these tests on a machine that has torch and nothing else.
"""

from __future__ import annotations

import pytest

needs_gpu = pytest.mark.gpu(1)
needs_two_gpus = pytest.mark.gpu(2)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
