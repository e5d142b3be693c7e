"""What the tests do to processes is what they say."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.processes import cut_power
from tests.support.project import wait_until

# As a batch shell and srun: a parent in the session, and its child in a process group of its own.
CHILD = "trap 'echo woken >> said' HUP CONT; echo $BASHPID >> said; while true; do sleep 0.01; done"
PARENT = f"set -m; ({CHILD}) & wait"


def has_died(pid: int) -> bool:
    """Whether a process has ended, reaped or not. It may be reaped between any two looks."""
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_nothing_wakes_up_when_the_power_goes_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun would use its last moment to have the ranks on other nodes killed, so that no rank survives in a test of
    survivors. Each process here is gone before the next one is killed, as happens on a busy machine."""
    kill = os.kill

    def kill_and_wait(pid: int, number: int) -> None:
        kill(pid, number)
        if number == signal.SIGKILL:
            wait_until(lambda: has_died(pid), "it did not die")

    said = tmp_path / "said"
    parent = subprocess.Popen(["bash", "-c", PARENT], cwd=tmp_path, start_new_session=True)
    wait_until(lambda: said.exists() and said.read_text().endswith("\n"), "the child did not start")
    child = int(said.read_text())
    monkeypatch.setattr(os, "kill", kill_and_wait)
    assert cut_power([parent.pid, child])
    assert parent.wait() == -signal.SIGKILL and said.read_text() == f"{child}\n"
    assert not cut_power([parent.pid]), "it has ended"
