"""The run's lock, where the disk answers wrongly, and between hosts that share it by a network file system."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from laststep.config.errors import ConfigError, DiskError
from laststep.ranks import disk
from laststep.ranks.disk import Before
from laststep.ranks.process import identity
from tests.support.clients import Clients, missing
from tests.support.disk import flock_fails
from tests.support.needs import require
from tests.support.records import a_world

REMEMBERED_S = 3600.0
OURS, OTHER = a_world(size=2), a_world(size=2, job_id="8")


@pytest.fixture(autouse=True)
def flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may replace it."""
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "lock"
    disk._held_locks.pop(tmp_path / "lock", None)


class OnlySigned(Before):
    """The process that has signed is known, as on one host."""

    def lives(self, signed: str, process: str) -> bool:
        return process == identity()


def test_other_hosts_read_who_holds_it(tmp_path: Path) -> None:
    """Rank 0 keeps the file open for as long as it lives, frozen perhaps. If what it has written stayed on its host, no
    rank on another one could save its step: it must know that the lock is its own attempt's."""
    require(missing())
    with Clients(tmp_path, 2, REMEMBERED_S) as (host, another):
        lock = another.view / "lock"
        assert not lock.exists(), "the other host believes that there is no lock"
        disk.acquire_run_lock(host.view / "lock", OURS)
        assert disk.lock_is_ours(lock, OURS) and not disk.lock_is_ours(lock, OTHER)
        assert disk.lock_holder(lock) == disk.lock_signature(OURS)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks(lock: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On such a file system the signature is all that says whose the run is. If rank 0 did not write it, no survivor
    would dare to save the last step of any rank's death."""
    flock_fails(number)
    disk.acquire_run_lock(lock, OURS)
    assert f"{lock}: this file system has no locks; do not start a second attempt" in capsys.readouterr().out
    disk._held_locks.clear()  # what follows is another process
    assert disk.lock_is_ours(lock, OURS) and not disk.lock_is_ours(lock, OTHER)


def test_a_second_attempt_without_locks(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known to live is left alone; what is dead, or unknown, must not keep the user from training."""
    monkeypatch.setattr(disk, "LOCK_WAIT_S", {False: 0.0})
    flock_fails(errno.ENOSYS)
    disk.acquire_run_lock(lock, OURS)
    with pytest.raises(ConfigError, match=r"another attempt is at work on this run \(job 7, restart 0, on here\)"):
        disk.acquire_run_lock(lock, OTHER, OnlySigned())
    with disk.no_start(lock, OnlySigned()) as holder:
        assert holder == "job 7, restart 0, on here", "a shell would record the attempt as lost, which lives"
    assert disk.lock_is_ours(lock, OURS)
    monkeypatch.setattr("tests.ranks.test_run_lock.identity", lambda: "it has died")
    disk.acquire_run_lock(lock, OTHER, OnlySigned())
    assert not disk.lock_is_ours(lock, OURS)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO, errno.ESTALE])
def test_an_error_that_passes(lock: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock daemon of an NFS server that restarts, say: it must not pass for a file system without locks, on which
    nothing keeps a second attempt from tearing the run apart."""
    failed = flock_fails(number, times=1)
    disk.acquire_run_lock(lock, OURS)
    assert failed and disk.lock_holder(lock) == disk.lock_signature(OURS)
    said = capsys.readouterr().out
    assert said.count(f"{os.strerror(number)}; looking again for 30 s") == 1 and "no locks" not in said


def test_an_error_that_stays(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be told that the lock is free: neither an attempt that begins, nor a shell that is about to record an
    attempt as lost. But a survivor of the attempt that has signed may save: nobody else has."""
    monkeypatch.setattr(disk, "LOCK_START_S", 0.0)
    monkeypatch.setattr(disk, "LOCK_LOOK_S", 0.0)
    disk.acquire_run_lock(lock, OURS)
    disk._held_locks.clear()
    flock_fails(errno.ENOLCK)
    with pytest.raises(DiskError, match=f"{lock}: the disk refuses the run's lock: No locks available"):
        disk.acquire_run_lock(lock, OTHER)
    with pytest.raises(DiskError, match="No locks available"), disk.no_start(lock):
        pytest.fail("the lock was said to be free")
    assert disk.lock_is_ours(lock, OURS) and not disk.lock_is_ours(lock, OTHER)


def test_a_dead_nodes_lock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS server may keep it for days. The next start of the job must not be refused as if the user had started two
    runs: with that status its shell would not count the failure, or end without a word of what helps."""
    monkeypatch.setattr(disk, "LOCK_WAIT_S", {True: 0.0})
    first = a_world(size=2, launcher="submitit-slurm")
    with lock.open("w") as file:
        file.write(disk.lock_signature(first))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DiskError, match=r"locked by an earlier start of this job \(job 7, restart 0, on here\)"):
            disk.acquire_run_lock(lock, replace(first, restart=1))
