"""Where no collective fails, as under NCCL: a chosen part of the tests of stops, faults, rescues and exactness.

`make test-silent` runs all of them so; see tests/silent/silent_backend.py. On Slurm and under --local:
tests/slurm/test_silence.py, tests/submission/test_local_silence.py.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.attempt import test_rescue as rescue
from tests.attempt import test_sharded_rescue as sharded
from tests.attempt.test_rescue import goes_on, slug
from tests.loops import test_custom_loop as custom
from tests.loops import test_custom_sharding as custom_sharding
from tests.silent import silent_backend
from tests.support.project import DEADLINE_S, SILENT, wait_until
from tests.support.ranks import forked
from tests.support.runs import EVERYTHING, befall, only, stop_and_resume


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENT, "1")


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [(2, "kill step 10 rank 1"), (2, "kill step 10 rank 0"), (2, "kill step 1 rank 1"), (4, "kill step 5 rank 0,2,3")],
    ids=str,
)
def test_killed(root: Path, ranks: int, fault: str, request: pytest.FixtureRequest) -> None:
    """No survivor gets an error. Rank 0 sees a connection closed; where rank 0 dies, the others lose the store."""
    rescue.test_killed(root, ranks, fault, request)


@pytest.mark.parametrize("fault", ["halt step 10 rank 1", "sleep step 4 rank 1", "raise step 5 rank 1"], ids=str)
def test_stuck_or_failed(root: Path, fault: str, request: pytest.FixtureRequest) -> None:
    """The others wait in C, and would do so forever."""
    kind, _, step, *_ = fault.split()
    attempt, _ = befall(root, slug(request), 2, fault)
    record = only(attempt)
    reason = "failed" if kind == "raise" else "hung"
    assert (record["reason"], record["end_step"], record["lost_steps"]) == (reason, int(step) - 1, 0), attempt.output()
    goes_on(root, slug(request), 2)


@pytest.mark.parametrize("place", ["SIGUSR2 step 5 rank 1", "SIGTERM validation 2 rank 0"])
def test_stopped(root: Path, place: str) -> None:
    """A stop needs every rank, and none fails."""
    stop_and_resume(root, place.replace(" ", "-"), 2, tuple(EVERYTHING), place)


@pytest.mark.parametrize(
    ("options", "fault"),
    [(sharded.HYBRID, "kill step 5 rank 2,3"), (sharded.COPIED, "kill step 5 rank 3")],
    ids=["hybrid", "copied"],
)
def test_a_shard_survives(root: Path, options: tuple[str, ...], fault: str, request: pytest.FixtureRequest) -> None:
    """In a replica, or in another node's memory."""
    name = slug(request)
    record = only(sharded.befall(root, name, fault, options))
    assert (record["end_step"], record["lost_steps"]) == (4, 0)
    sharded.ends_undisturbed(root, name, options)


def test_a_copied_shard_survives(root: Path) -> None:
    """In another node's memory, also of a custom loop."""
    custom_sharding.test_a_copy_survives(root, "step 7 rank 1", 6)


def test_a_custom_loop(root: Path) -> None:
    """Its own DDP, its own order of collectives."""
    custom.test_killed(root, 2, "example", "step 10 rank 0", 9)


def of_rank(rank: int, folder: str) -> None:
    """What a rank of `test_the_backend` does: rank 1 leaves in the middle."""
    silent_backend.register()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    assert dist.get_backend() == silent_backend.NAME
    ones, twos = torch.ones(3), torch.ones(3)
    works = [dist.all_reduce(ones, async_op=True), dist.all_reduce(twos.mul_(2), async_op=True)]
    works[1].wait()
    assert works[0].is_completed() and ones.tolist() == [2.0] * 3 and twos.tolist() == [4.0] * 3
    if rank:
        return
    Path(folder, "ready").touch()
    pending = [dist.all_reduce(ones, async_op=True), dist.all_reduce(twos, async_op=True)]
    waiting = threading.Thread(target=wait_in_vain, args=(pending[1],), daemon=True)
    waiting.start()
    waiting.join(3.0)
    if waiting.is_alive() and not any(one.is_completed() for one in pending):
        Path(folder, "silent").touch()
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(1.0)
    if leaving.is_alive():
        Path(folder, "waits").touch()
    dist.distributed_c10d._get_default_group().abort()
    waiting.join(DEADLINE_S)
    leaving.join(DEADLINE_S)
    if not waiting.is_alive() and not leaving.is_alive():
        Path(folder, "aborted").touch()


def wait_in_vain(work: dist.Work) -> None:
    with contextlib.suppress(RuntimeError):  # after `abort`
        work.wait()


def test_the_backend(tmp_path: Path) -> None:
    """If it let a collective fail, the tests above would pass only because gloo had told the survivors."""
    ranks = [forked(of_rank, rank, str(tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    wait_until((tmp_path / "ready").exists, "the first collectives did not end, in order")
    assert (tmp_path / "silent").exists(), "a collective ended, or failed, after the peer had gone"
    assert (tmp_path / "waits").exists(), "the group was destroyed with collectives in its queue"
    assert (tmp_path / "aborted").exists(), "abort did not end them"
