"""Skips tests that need a GPU on machines without one."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark and torch.cuda.device_count() < mark.args[0]:
        pytest.skip(f"needs {mark.args[0]} GPU{'s' if mark.args[0] > 1 else ''}")
