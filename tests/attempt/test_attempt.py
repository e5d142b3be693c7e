"""Several ranks together: what they must do in turn, and what they must see of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config
from tests.support.tasks import read_one_step_late
from trainer.commands.verify import inspect
from trainer.records.metrics import read_lines
from trainer.trainer import Trainer


def test_data_is_prepared_by_one_rank_of_each_node_in_turn(tmp_path: Path) -> None:
    """Two downloads into one shared folder would tear each other's files; a rank that opens too early finds half."""
    notes = tmp_path / "notes"
    small = config(tmp_path, "prepared", 4, ("task=tests.support.tasks.Prepared", "train.max_steps=1"))
    attempt = Attempt(small, {"LASTSTEP_TEST_NOTES": str(notes)}, nodes=2)
    assert attempt.wait() == [0, 0, 0, 0], attempt.output()
    prepared, opened = notes.read_text().splitlines()[:4], notes.read_text().splitlines()[4:]
    assert prepared == ["begins 0", "ends 0", "begins 2", "ends 2"]
    assert sorted(opened) == ["opens 0", "opens 1", "opens 2", "opens 3"]


def test_metrics_and_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    """52 samples in batches of 8 leave a last batch of 4, with nothing at all for some of 4 ranks x 2 micro-batches.
    Losses, accuracy and what is learned from them must be those of one rank that sees every sample, but for the order
    of additions: a mean over ranks, or over micro-batches, would be off."""
    alone = train(config(tmp_path, "alone", 1, ("task=tests.support.tasks.Linear",)))
    four = train(config(tmp_path, "four", 4, ("task=tests.support.tasks.Linear", "train.accumulate=2")))
    lines = list(zip(read_lines(alone.metrics), read_lines(four.metrics)))
    assert len(lines) == 16
    for one, many in lines:
        assert set(one) == set(many)
        for key in set(one) - {"time", "samples_per_s"}:
            assert one[key] == pytest.approx(many[key], rel=1e-4), (key, one, many)


def test_batch_norm_and_a_short_last_batch(tmp_path: Path) -> None:
    """50 samples in batches of 8 leave 2 for 2 ranks. Batch norm over one value per channel is an error, so a rank must
    have both; an epoch that ends in an error would end there after every resume."""
    options = ("model.name=resnet18", "data.args.image_size=32", "data.args.samples=50", "train.epochs=1")
    run = train(config(tmp_path, "short", 2, options))
    assert reasons(run) == ["finished"]


# Not asynchronous: which saves meet the full disk must not depend on how busy the machine is.
SAVING = (
    "task=tests.support.tasks.FullDisk",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "checkpoint.asynchronous=false",
)


def test_a_full_disk_for_a_while(tmp_path: Path) -> None:
    """Somebody else fills the disk, and cleans up: the saves in between are missed with a warning, nothing else."""
    calm = train(config(tmp_path, "calm", 2, SAVING), {"LASTSTEP_TEST_FULL": "0 0"})
    full = Attempt(config(tmp_path, "full", 2, SAVING), {"LASTSTEP_TEST_FULL": "4 7"})
    assert full.wait() == [0, 0], full.output()
    assert "step_000000004: could not be written: [Errno 27] File too large; training goes on" in full.output()
    assert fingerprint(full.run) == fingerprint(calm)
    kept = [checkpoint["step"] for checkpoint in inspect(full.run)]
    assert kept == [2, 7, 8, 10, 12, 14], "an epoch ends with steps 7 and 14"


def test_a_disk_that_stays_full(tmp_path: Path) -> None:
    """Hours of training that nothing can keep help nobody: after three saves the attempt fails and says why, and the
    last good checkpoint stands."""
    full = Attempt(config(tmp_path, "full", 2, SAVING), {"LASTSTEP_TEST_FULL": "4 99"})
    assert full.wait() == [1, 1]
    (attempt,) = read_lines(full.run.attempts)
    assert "3 saves in a row failed, the last so:" in attempt["error"] and "File too large" in attempt["error"]
    assert attempt["lost_steps"] == attempt["end_step"] - 2
    assert [(checkpoint["step"], checkpoint["ok"]) for checkpoint in inspect(full.run)] == [(2, True)]
    assert not list(full.run.checkpoints.glob(".*")), "no half checkpoint is left to fill the disk further"


def test_half_a_result_of_a_full_disk(tmp_path: Path) -> None:
    """submitit refuses to write beside what it could not finish an attempt ago: the finished run would have failed."""
    one = config(tmp_path, "one", 1, ("train.max_steps=1",))
    job = tmp_path / "one" / "logs"
    job.mkdir(parents=True)
    DelayedSubmission(Trainer(one)).dump(job / "7_submitted.pkl")
    for name in ("7_0_result.pkl.save_tmp", "7_submitted.pkl.save_tmp"):
        (job / name).write_bytes(b"half a pic")
    place = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "1", "LOCAL_JOB_NUM_NODES": "1"}
    place |= {"LOCAL_NODEID": "0", "LOCAL_GLOBALID": "0", "LOCAL_LOCALID": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "submitit.core._submit", str(job)],
        env={**os.environ, **{f"SUBMITIT_{key}": value for key, value in place.items()}},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in job.iterdir()) == ["7_0_result.pkl", "7_submitted.pkl"]


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (("checkpoint.every_steps=5",), [5, 10, 14]),
        (("checkpoint.every_epochs=1",), [7, 14]),
        (("checkpoint.every_minutes=0.00001",), [3, 6, 7, 9, 12, 14]),  # at every progress line, and the end
        ((), [14]),
    ],
    ids=["steps", "epochs", "minutes", "never"],
)
def test_when_it_saves(tmp_path: Path, when: tuple[str, ...], steps: list[int]) -> None:
    """A save that does not come costs a killed run everything since the last; the last step is always kept. Two epochs
    of 7 steps, a progress line every 3."""
    off = ("checkpoint.every_epochs=null", "checkpoint.every_minutes=null", "checkpoint.keep_last=99")
    run = train(config(tmp_path, "saving", 2, (*off, *when)))
    assert [checkpoint["step"] for checkpoint in inspect(run)] == steps


def test_the_best_is_kept(tmp_path: Path) -> None:
    """The checkpoint with the lowest validation loss stays when newer ones push it out of the newest."""
    keep = ("checkpoint.keep_last=1", "checkpoint.keep_best=1", "train.epochs=6", "optim.lr=0.2")
    run = train(config(tmp_path, "best", 1, keep))
    losses = {line["step"]: line["val_loss"] for line in read_lines(run.metrics) if "val_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best != 42, "the test needs a run that does not end with its best"
    assert [checkpoint["step"] for checkpoint in inspect(run)] == sorted({best, 42})


@pytest.mark.parametrize("before", [None, read_one_step_late], ids=["heard at once", "heard late"])
def test_a_step_that_is_not_finite_fails_the_run(tmp_path: Path, before: Callable[[], None] | None) -> None:
    """NaN would soon be in every weight, and the rest of the job's hours wasted. The same step would fail again, so the
    run is not tried again; what stands in metrics.jsonl is what a checkpoint keeps."""
    options = ("task=tests.support.tasks.Poisoned", "checkpoint.every_steps=2")
    attempt = Attempt(config(tmp_path, "nan", 2, options), before=before)
    assert attempt.wait() == [1, 1]
    (record,) = read_lines(attempt.run.attempts)
    assert record["reason"] == "failed" and record["requeue"] is False
    assert "step 5: the loss is not finite; train.nonfinite=skip would leave such steps out" in record["error"]
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [2, 4]


def test_nothing_is_saved_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    """The worst moment to die: the weights are NaN, and nobody knows yet. The rank that is left would keep them for the
    next attempt, which could never learn again."""
    options = ("task=tests.support.tasks.PoisonedAndKilled", "checkpoint.every_steps=2")
    attempt = Attempt(config(tmp_path, "nan-killed", 2, options))
    assert attempt.wait() == [-signal.SIGKILL, 1], attempt.output()
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [2, 4]
    assert '"step": 5' not in attempt.run.metrics.read_text()


def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """One bad sample of a million need not end a run: every rank leaves out that step, though only one saw the NaN, and
    the curve says so in valid JSON."""
    options = ("task=tests.support.tasks.Poisoned", "train.nonfinite=skip")
    attempt = Attempt(config(tmp_path, "skip", 2, options))
    assert attempt.wait() == [0, 0], attempt.output()
    lines = [line for line in read_lines(attempt.run.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line["step"] for line in lines if line["loss"] is None and line["skipped"]] == [5]
    assert all("skipped" not in line for line in lines if line["step"] != 5)
    assert "NaN" not in attempt.run.metrics.read_text()
    assert "step 5: the loss is not finite, its update was left out (1 so far)" in attempt.output()


@pytest.mark.parametrize(("slow", "steps"), [("0.1 1.0", 12), ("1.2 0.1", 3)], ids=["many steps", "not one"])
def test_the_rank_that_holds_the_others_up_is_named(tmp_path: Path, slow: str, steps: int) -> None:
    """One slow node makes every step of every node slow, and no log would say which. It is looked at again and again,
    perhaps when not one step was done since: a step may take minutes."""
    options = ("task=tests.support.tasks.Slow", f"train.max_steps={steps}", "train.accumulate=2")
    attempt = Attempt(config(tmp_path, "slow", 2, options), {"LASTSTEP_TEST_SLOW": slow})
    assert attempt.wait() == [0, 0], attempt.output()
    assert "] rank 1 on " in attempt.logs[0].read_text()
    assert "holds the others up" in attempt.logs[0].read_text()


def test_a_low_limit_of_open_files(tmp_path: Path) -> None:
    """Each rank costs rank 0 seven connections, so with a shell's usual limit, 1,024, no 150 ranks would meet. Here two
    start with what is just enough to come there."""
    words = ["--local", "--tasks-per-node", "2", "--name", "few", f"launch.root={tmp_path}", "train.max_steps=1"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -S -n 38; exec "$@"', "bash", sys.executable, "launch.py", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
