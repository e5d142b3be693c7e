"""NCCL's environment variables: our defaults, unless the user has set a value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from laststep.ranks import nccl

SETTINGS = (*nccl.ERROR_HANDLING, *nccl.BLOCKING_WAIT, *nccl.DESYNC_DEBUG, "TORCH_DISTRIBUTED_DEBUG")
MORE = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
NAMES = (*nccl.RECORDS, *SETTINGS, *MORE)
OURS = {
    nccl.RECORDS[0]: "/logs/7_",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "604800",
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these variables is set, and each gets its value back after the test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


def found() -> dict[str, str]:
    """The variables, as torch will read them."""
    nccl.set_defaults(Path("/logs/7_"))
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_the_defaults() -> None:
    """With torch's own, a rank whose peer has died is ended before it can save."""
    assert found() == OURS
    assert nccl.harmful_settings() == []


def test_the_user_wins() -> None:
    """A user who debugs NCCL sets these by hand, under either name; our values must not replace theirs."""
    theirs = {nccl.RECORDS[1]: "/mine", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "NCCL_ASYNC_ERROR_HANDLING": "3"}
    os.environ.update(theirs)
    ours = {name: value for name, value in OURS.items() if name not in (nccl.RECORDS[0], nccl.ERROR_HANDLING[0])}
    assert found() == {**ours, **theirs}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "ends the process"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", "half an all-reduce"),
        ("NCCL_BLOCKING_WAIT", "1", "aborts a collective"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", "ends the process"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "ends the process"),
    ],
)
def test_a_setting_that_prevents_the_rescue_is_named(name: str, value: str, why: str) -> None:
    """Otherwise the user would learn it from a lost step."""
    os.environ[name] = value
    found()
    (line,) = nccl.harmful_settings()
    assert line.startswith(f"WARNING: {name}=") and why in line


def test_a_setting_that_is_switched_off() -> None:
    os.environ.update({"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_DESYNC_DEBUG": "false"})
    assert nccl.harmful_settings() == []


@pytest.mark.parametrize("theirs", [{}, {"NCCL_ALGO": "Tree"}], ids=str)
def test_deterministic_runs_leave_nccl_no_choice(theirs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would choose by topology and message size, so the sums of a resumed run could differ on other nodes. What
    the user has set counts, and is recorded, so that a resume without it is reported."""
    for name in (*nccl.PINNED, *nccl.CHANNELS):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    os.environ.update(theirs)
    nccl.pin_algorithms()
    expected = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    assert {name: os.environ[name] for name in expected} == expected | theirs
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    os.environ["NCCL_MAX_NCHANNELS"] = "4"
    assert nccl.describe()["NCCL"].split() == [
        "2.28.3",
        *(f"{name}={value}" for name, value in (expected | theirs).items()),
        "NCCL_MAX_NCHANNELS=4",
    ]
