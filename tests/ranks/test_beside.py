"""Programs beside the training: they can cost it nothing, and nothing of them outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from laststep.ranks import beside, process
from laststep.ranks.beside import Beside, Program
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.project import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux")


def program(folder: Path, what: str) -> Program:
    """A program that notes its starts in this folder."""
    run = RunDir(folder)
    return Program(
        Beside("noting", "tests.ranks.beside_program", words=(what,), memory_gb=2.0), run, run.beside_log("n")
    )


def starts(folder: Path, count: int = 1) -> list[dict[str, Any]]:
    """What its starts have noted, once there are as many as asked for."""

    def found() -> list[dict[str, Any]]:
        lines = read_lines(folder / "starts")
        return lines if len(lines) >= count else []

    return wait_until(found, "the program has not started")


def is_gone(pid: int) -> bool:
    return not process.identity(pid)


def test_it_can_cost_the_rank_nothing(tmp_path: Path) -> None:
    """Any of these, inherited from the rank, would let it slow, end or block the training: its priority, its memory,
    its place in the kernel's list of what to kill, its connections, the signals to its group."""
    held_open, _ = os.pipe()
    os.set_inheritable(held_open, True)
    one = program(tmp_path, "wait")
    one.start()
    (seen,) = starts(tmp_path)
    assert seen["nice"] == 19 and seen["oom_score_adj"] == 1000 and seen["memory"] == 2 * 2**30
    assert seen["session"] == seen["pid"]
    assert seen["files"] == sorted(["/dev/null", *2 * [str(tmp_path / "logs" / f"{tmp_path.name}.n.log")]])
    assert not seen["more_files"]
    assert seen["pid"] in process.beside, "its work would count as the training's progress"
    one.end()
    wait_until((tmp_path / "ended").exists, "it was not asked to end")
    one.close(time.monotonic() + 10)
    assert is_gone(seen["pid"]) and len(starts(tmp_path)) == 1 and not process.beside
    assert "begun" in RunDir(tmp_path).beside_log("n").read_text()


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """A tracker that hangs must not hold a requeue up."""
    one = program(tmp_path, "ignore")
    one.start()
    (seen,) = starts(tmp_path)
    one.end()
    began = time.monotonic()
    one.close(began + 0.2)
    assert time.monotonic() - began < beside.KILLED_S
    assert is_gone(seen["pid"]) and not (tmp_path / "ended").exists()


def test_one_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may kill it where memory is short; the run would not be seen for the rest of the attempt."""
    monkeypatch.setattr(beside, "AGAIN_S", (0.1, 0.2))
    one = program(tmp_path, "die")
    one.start()
    starts(tmp_path, 3)
    one.close(time.monotonic() + 10)


def test_it_dies_with_its_rank(tmp_path: Path) -> None:
    """It would write into a run that another attempt has begun to continue."""
    rank = os.fork()
    if rank == 0:
        program(tmp_path, "ignore").start()
        time.sleep(600)
        os._exit(1)
    try:
        (seen,) = starts(tmp_path)
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    wait_until(lambda: is_gone(seen["pid"]), "it outlives its rank")
