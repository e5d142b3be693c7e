"""A resume whose checkpoint is damaged, or whose disk hangs, on real ranks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laststep.attempt import attempt, start
from laststep.checkpoint import files, restore, store
from laststep.config.config import Config
from laststep.config.errors import CheckpointError
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.task import find_task
from tests.support.project import DEADLINE_S
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, undisturbed

OPTIONS = ("task=tests.support.tasks.Signalled", "checkpoint.every_steps=2")


def a_file_per_rank() -> None:
    """However small the state is."""
    files.STRIPE_BYTES = 1


def stopped_at_5(root: Path, name: str) -> RunDir:
    """A run of two ranks that has been stopped after step 5, with checkpoints of steps 2, 4 and 5."""
    attempt = Attempt(
        config(root, name, 2, OPTIONS), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 0"}, before=a_file_per_rank
    )
    attempt.wait()
    return attempt.run


@pytest.mark.parametrize("shard", [0, 1])
def test_damage_that_sizes_do_not_show(root: Path, shard: int) -> None:
    """Whichever rank finds it, both resume from the checkpoint before, the record says so, and the run ends as if
    nothing had been: the damaged bytes must have reached no tensor."""
    run = stopped_at_5(root, f"flipped-{shard}")
    (file,) = (run.checkpoints / "step_000000005").glob(f"shard_000{shard}*")
    data = bytearray(file.read_bytes())
    data[1000] ^= 16
    file.write_bytes(data)
    attempt = Attempt(config(root, run.name, 2, OPTIONS))
    assert attempt.wait() == [0, 0], attempt.output()
    said = attempt.logs[0].read_text()
    assert f"skipped step_000000005: {file.name} differs from its SHA-256 in the manifest" in said
    assert "resuming after step 4" in said
    assert [record["start_step"] for record in read_lines(run.attempts)] == [0, 4]
    assert fingerprint(run) == undisturbed(2, OPTIONS)


def make_the_task_late() -> None:
    """The task is made once this rank has read all of its share."""
    real_read, real_find, has_read = files.read_files, find_task, threading.Event()

    def noted(*given: Any) -> dict[str, CheckpointError]:
        errors = real_read(*given)
        has_read.set()
        return errors

    def late(given: Config) -> Any:
        assert has_read.wait(DEADLINE_S), "the task is made before the checkpoint is read"
        return real_find(given)

    vars(restore)["read_files"], vars(start)["find_task"] = noted, late


def test_the_disk_works_while_the_task_is_made(root: Path) -> None:
    """A large checkpoint takes as long to read as a large model to make: people wait for the longer of them, not for
    both."""
    run = stopped_at_5(root, "late-task")
    attempt = Attempt(config(root, run.name, 2, OPTIONS), before=make_the_task_late)
    assert attempt.wait() == [0, 0], attempt.output()
    assert "resuming after step 5" in attempt.logs[0].read_text()
    assert fingerprint(run) == undisturbed(2, OPTIONS)


def hang_in_rank_1() -> None:
    """A read of a checkpoint hangs, as on a dead file server."""
    if os.environ["SUBMITIT_LOCAL_GLOBALID"] == "1":
        os.preadv = lambda *_: time.sleep(DEADLINE_S) or 0  # type: ignore[func-returns-value]


def die_in_rank_1() -> None:
    """The node dies while it reads."""
    if os.environ["SUBMITIT_LOCAL_GLOBALID"] == "1":
        os.preadv = lambda *_: os.kill(os.getpid(), signal.SIGKILL) or 0  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("fault", "codes", "reason", "symptom"),
    [
        (hang_in_rank_1, [1, 1], "hung", "is stuck in read_share ("),
        (die_in_rank_1, [1, -signal.SIGKILL], "failed", "gone (killed, out of memory, or its node died)"),
    ],
    ids=["hangs", "dies"],
)
def test_a_fault_while_the_checkpoint_is_read(
    root: Path, fault: object, codes: list[int], reason: str, symptom: str, request: pytest.FixtureRequest
) -> None:
    """The other ranks wait for that rank, which is named with its host, and the attempt ends. No step is lost."""
    run = stopped_at_5(root, request.node.callspec.id)
    options = (*OPTIONS, "launch.hang_timeout_s=5")
    attempt = Attempt(config(root, run.name, 2, options), before=fault)  # type: ignore[arg-type]
    assert attempt.wait() == codes, attempt.output()
    record = read_lines(run.attempts)[-1]
    assert (record["reason"], record["start_step"], record["end_step"], record["lost_steps"]) == (reason, 5, 5, 0)
    assert "rank 1 on " in record["error"] and symptom in record["error"]
    train(config(root, run.name, 2, options))
    assert reasons(run)[-1] == "finished" and fingerprint(run) == undisturbed(2, OPTIONS)


def hang_beside_code_that_fails() -> None:
    """The reads of the checkpoint hang, and the task cannot be made."""
    os.preadv = lambda *_: time.sleep(10 * DEADLINE_S) or 0  # type: ignore[func-returns-value]

    def fails(given: Config) -> Any:
        raise ImportError("no module of the user's")

    vars(start)["find_task"] = fails


def test_code_that_fails_beside_a_disk_that_hangs(root: Path) -> None:
    """The ranks end, and nothing waits for the disk: else nodes would be held for hours by a job that has failed. The
    record and the log name the step that the attempt began at, on whichever rank writes them."""
    run = stopped_at_5(root, "fails-beside-a-hang")
    attempt = Attempt(config(root, run.name, 2, OPTIONS), before=hang_beside_code_that_fails)
    assert attempt.wait() == [1, 1], attempt.output()
    record = read_lines(run.attempts)[-1]
    assert (record["reason"], record["start_step"], record["end_step"], record["lost_steps"]) == ("failed", 5, 5, 0)
    assert "no module of the user's" in record["error"] and record["step_s"] is None
    assert "attempt ended (failed) after step 5, no step lost" in attempt.output()
    train(config(root, run.name, 2, OPTIONS))
    assert fingerprint(run) == undisturbed(2, OPTIONS)


def fail_listings(number: int, times: int) -> None:
    """The first listings of checkpoints/ fail, by whatever function. The disk is not looked at for longer than 2 s."""
    for module in (store, start, attempt):
        vars(module)["START_S"] = 2.0
    left = times

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def lists(path: Any = ".") -> Any:
            nonlocal left
            if not isinstance(path, int) and os.path.basename(path) == "checkpoints" and left:
                left -= 1
                raise OSError(number, os.strerror(number))
            return real(path)

        return lists

    os.listdir, os.scandir = failing(os.listdir), failing(os.scandir)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_a_listing_that_fails_for_a_moment(root: Path, number: int, request: pytest.FixtureRequest) -> None:
    """The run continues where it was, as if nothing had been. It once began at step 0, without a word."""
    run = stopped_at_5(root, request.node.callspec.id)
    attempt = Attempt(config(root, run.name, 2, OPTIONS), before=partial(fail_listings, number, 3))
    assert attempt.wait() == [0, 0], attempt.output()
    said = attempt.logs[0].read_text()
    assert f"checkpoints: cannot be listed: {os.strerror(number)}; looking again for " in said
    assert "resuming after step 5" in said
    assert [record["start_step"] for record in read_lines(run.attempts)] == [0, 5]
    assert fingerprint(run) == undisturbed(2, OPTIONS)


def hide(run: RunDir) -> None:
    run.checkpoints.rename(run.path / "scratch")


def an_empty_mount_point(run: RunDir) -> None:
    hide(run)
    run.checkpoints.mkdir()


def a_link_to_nothing(run: RunDir) -> None:
    hide(run)
    run.checkpoints.symlink_to(run.path / "away")


def an_old_view(run: RunDir) -> None:
    hide(run)
    shutil.copytree(run.path / "scratch" / "step_000000004", run.checkpoints / "step_000000004")


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (an_empty_mount_point, "has no checkpoint, but the run's records say that step 5 is saved"),
        (a_link_to_nothing, "which is not there"),
        (an_old_view, "only goes up to step 4, but the run's records say that step 5 is saved"),
    ],
)
def test_a_disk_that_is_not_what_it_was(root: Path, lose: Callable[[RunDir], None], says: str) -> None:
    """The attempt fails in one line, records that step 5 is saved, and leaves the metrics alone. Once the disk is back,
    the run continues from there."""
    run = stopped_at_5(root, lose.__name__)
    metrics = run.metrics.read_text()
    lose(run)
    options = (*OPTIONS, "launch.hang_timeout_s=5")
    attempt = Attempt(config(root, run.name, 2, options), before=partial(fail_listings, 0, 0))
    attempt.wait_for_end(0)
    assert attempt.ranks[0].exitcode == 1
    attempt.signal(signal.SIGKILL, 1)  # it waits for rank 0's address
    attempt.wait()
    record = read_lines(run.attempts)[-1]
    kept = record["end_step"] - record["lost_steps"]
    assert (record["reason"], record["start_step"], kept) == ("failed", 5, 5) and says in record["error"]
    assert run.metrics.read_text() == metrics
    if run.checkpoints.is_symlink():
        run.checkpoints.unlink()
    else:
        shutil.rmtree(run.checkpoints)
    (run.path / "scratch").rename(run.checkpoints)
    train(config(root, run.name, 2, OPTIONS))
    assert [record["start_step"] for record in read_lines(run.attempts)] == [0, 5, 5]
    assert fingerprint(run) == undisturbed(2, OPTIONS)
