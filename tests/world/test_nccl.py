"""NCCL's environment variables: our defaults, unless the user has set a value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
