"""Skips tests that need more GPUs than there are, and writes down the result of each for `python -m tests.gpu`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.devices import CHOSEN
from tests.gpu.report import TAIL, TESTS

# cuBLAS reads this when it starts, which may be in a test that is not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def any_kernels() -> Iterator[None]:
    """A test in this process may ask for deterministic kernels. The next one gets the others again."""
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark and (CHOSEN == "cpu" or torch.cuda.device_count() < mark.args[0]):
        pytest.skip(f"needs {mark.args[0]} GPU{'s' if mark.args[0] > 1 else ''}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (file := os.environ.get(TESTS)) and (report.when == "call" or report.outcome != "passed"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        line = {
            "test": report.nodeid.removeprefix("tests/gpu/"),
            "result": report.outcome,
            "seconds": round(report.duration, 1),
            **({"why": why[-TAIL:]} if why else {}),
        }
        with open(file, "a") as lines:
            lines.write(json.dumps(line) + "\n")
