"""A resume whose checkpoint is damaged, or whose disk hangs, on real ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, undisturbed
from tests.support.waiting import DEADLINE_S
from trainer.checkpoint import stripes
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

OPTIONS = ("task=tests.support.tasks.Signalled", "checkpoint.every_steps=2")


def a_file_per_rank() -> None:
    """However small the state is."""
    stripes.STRIPE_BYTES = 1


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
        (hang_in_rank_1, [1, 1], "hung", "is stuck in await_files ("),
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
