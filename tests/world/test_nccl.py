"""NCCL's environment variables: our defaults, unless the user has set a value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.world import nccl

NAMES = (*nccl.RECORDS, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")


@pytest.mark.parametrize("theirs", [{}, {nccl.RECORDS[1]: "/mine", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}], ids=str)
def test_the_user_wins(theirs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who debugs NCCL sets these by hand, under either name of the record; our file must not replace theirs."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    os.environ.update(theirs)
    nccl.set_defaults(Path("/logs/7_"), timeout_s=600)
    ours = {nccl.RECORDS[0]: "/logs/7_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200", **(theirs or ours)}


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
