"""Attempts of several ranks: data preparation, metrics, saves, steps that are not finite, slow ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from laststep.checkpoint.store import CheckpointStore
from laststep.cli.verify import inspect
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.trainer import Trainer
from tests.support.disk import acting_at
from tests.support.forked import forked_python
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, undisturbed, without_a_long_wait
from tests.support.tasks import read_one_step_late


def test_data_is_prepared_by_one_rank_of_each_node_in_turn(tmp_path: Path) -> None:
    """Two downloads into one shared folder would damage each other's files; a rank that opens them too early would find
    them incomplete."""
    notes = tmp_path / "notes"
    small = config(tmp_path, "prepared", 4, ("task=tests.support.tasks.Prepared", "train.max_steps=1"))
    attempt = Attempt(small, {"LASTSTEP_TEST_NOTES": str(notes)}, nodes=2)
    assert attempt.wait() == [0, 0, 0, 0], attempt.output()
    prepared, opened = notes.read_text().splitlines()[:4], notes.read_text().splitlines()[4:]
    assert prepared == ["begins 0", "ends 0", "begins 2", "ends 2"]
    assert sorted(opened) == ["opens 0", "opens 1", "opens 2", "opens 3"]


def test_metrics_and_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    """52 samples in batches of 8 leave a last batch of 4: some of the 4 ranks x 2 micro-batches get no sample. Losses,
    accuracy and weights must be those of one rank that sees every sample, up to the order of additions. A mean over
    ranks, or over micro-batches, would be wrong."""
    alone = train(config(tmp_path, "alone", 1, ("task=tests.support.tasks.Linear",)))
    four = train(config(tmp_path, "four", 4, ("task=tests.support.tasks.Linear", "train.accumulate=2")))
    lines = list(zip(read_lines(alone.metrics), read_lines(four.metrics)))
    assert len(lines) == 16
    for one, many in lines:
        assert set(one) == set(many)
        for key in set(one) - {"time", "samples_per_s"}:
            assert one[key] == pytest.approx(many[key], rel=1e-4), (key, one, many)


def test_batch_norm_and_a_short_last_batch(tmp_path: Path) -> None:
    """50 samples in batches of 8 leave 2 for 2 ranks. Batch norm over one value per channel is an error, so one rank
    must get both. Otherwise the run would fail at the end of the epoch, again after every resume."""
    options = ("model.name=resnet18", "data.args.image_size=32", "data.args.samples=50", "train.epochs=1")
    run = train(config(tmp_path, "short", 2, options))
    assert reasons(run) == ["finished"]


# Synchronous saves: which of them fail on the full disk must not depend on how busy the machine is.
SAVING = (
    "task=tests.support.tasks.FullDisk",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "checkpoint.asynchronous=false",
)


def test_a_full_disk_for_a_while(tmp_path: Path) -> None:
    """Another user fills the disk, then cleans up: the saves in between fail with a warning, and nothing else."""
    full = Attempt(config(tmp_path, "full", 2, SAVING), {"LASTSTEP_TEST_FULL": "4 7"})
    assert full.wait() == [0, 0], full.output()
    assert "step_000000004: could not be written: [Errno 27] File too large; training continues" in full.output()
    assert fingerprint(full.run) == undisturbed(2, ())
    kept = [checkpoint["step"] for checkpoint in inspect(full.run)]
    assert kept == [2, 7, 8, 10, 12, 14], "an epoch ends with steps 7 and 14"
    verify_while_the_run_deletes(full.run)


def verify_while_the_run_deletes(run: RunDir) -> None:
    """`launch.py verify` of a run that trains meets its deletions. No checkpoint may be called damaged for that."""
    store = CheckpointStore(run.checkpoints)
    steps = store.steps()
    for left in reversed(range(1, len(steps))):  # each time the oldest is deleted, before another call of the reader
        with acting_at(left, lambda left=left: store.prune(steps[-1], left, 0)):  # type: ignore[misc]
            found = inspect(run)
        assert all(checkpoint["ok"] for checkpoint in found)
        assert store.steps() == steps[-left:]


def test_a_disk_that_stays_full(tmp_path: Path) -> None:
    """Training for hours without being able to save is useless: after three failed saves the attempt fails with the
    reason, and the last good checkpoint remains."""
    full = Attempt(config(tmp_path, "full", 2, SAVING), {"LASTSTEP_TEST_FULL": "4 99"})
    assert full.wait() == [1, 1]
    (attempt,) = read_lines(full.run.attempts)
    assert "3 saves in a row failed, the last with:" in attempt["error"] and "File too large" in attempt["error"]
    assert "Traceback" not in attempt["error"], "it explains itself"
    assert attempt["lost_steps"] == attempt["end_step"] - 2
    assert [(checkpoint["step"], checkpoint["ok"]) for checkpoint in inspect(full.run)] == [(2, True)]
    assert not list(full.run.checkpoints.glob(".*")), "no partial checkpoint may fill the disk further"


def test_a_run_folder_that_is_moved_away(root: Path) -> None:
    """A user deletes or renames the folder of a run that trains. It must not come back without its configuration,
    unknown to every verb, while the job holds its nodes until the time limit: the ranks notice it, say so and end."""
    endless = ("task=tests.support.tasks.Unhurried", "train.epochs=1000", "checkpoint.every_steps=30")
    attempt = Attempt(config(root, "moved", 2, endless))
    attempt.wait_for("saved step 7")
    moved = RunDir(attempt.run.path.rename(root / "elsewhere"))
    assert attempt.wait() == [1, 1]
    assert not attempt.run.path.exists(), "nothing brings the folder back"
    for log in moved.logs.glob("*_log.out"):
        assert f"{attempt.run.path} was deleted or moved while the run trained" in log.read_text()


def test_half_a_result_of_a_full_disk(tmp_path: Path) -> None:
    """submitit refuses to write if an earlier attempt left a partial file: the finished run would end as failed."""
    one = config(tmp_path, "one", 1, ("train.max_steps=1",))
    job = tmp_path / "one" / "logs"
    job.mkdir(parents=True)
    DelayedSubmission(Trainer(one)).dump(job / "7_submitted.pkl")
    for name in ("7_0_result.pkl.save_tmp", "7_submitted.pkl.save_tmp"):
        (job / name).write_bytes(b"half a pic")
    place = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "1", "LOCAL_JOB_NUM_NODES": "1"}
    place |= {"LOCAL_NODEID": "0", "LOCAL_GLOBALID": "0", "LOCAL_LOCALID": "0"}
    done = subprocess.run(
        [forked_python(), "-m", "submitit.core._submit", str(job)],
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
        (("checkpoint.every_minutes=0.00001",), [3, 6, 7, 9, 12, 14]),  # at every progress line and at the end
        ((), [14]),
    ],
    ids=["steps", "epochs", "minutes", "never"],
)
def test_when_it_saves(tmp_path: Path, when: tuple[str, ...], steps: list[int]) -> None:
    """A missing save costs a killed run all steps since the one before. The last step is always saved. The run has two
    epochs of 7 steps and a progress line every 3 steps."""
    off = ("checkpoint.every_epochs=null", "checkpoint.every_minutes=null", "checkpoint.keep_last=99")
    run = train(config(tmp_path, "saving", 2, (*off, *when)))
    assert [checkpoint["step"] for checkpoint in inspect(run)] == steps


def test_the_best_is_kept(tmp_path: Path) -> None:
    """The checkpoint with the lowest validation loss is kept even when it is no longer among the newest."""
    keep = ("checkpoint.keep_last=1", "checkpoint.keep_best=1", "train.epochs=6", "optim.lr=0.2")
    run = train(config(tmp_path, "best", 1, keep))
    losses = {line["step"]: line["val_loss"] for line in read_lines(run.metrics) if "val_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best != 42, "the test needs a run whose best step is not its last"
    assert [checkpoint["step"] for checkpoint in inspect(run)] == sorted({best, 42})


@pytest.mark.parametrize("before", [None, read_one_step_late], ids=["read at once", "read one step late"])
def test_a_step_that_is_not_finite_fails_the_run(tmp_path: Path, before: Callable[[], None] | None) -> None:
    """NaN would soon be in every weight, and the rest of the job wasted. A retry would fail the same way, so there is
    none. metrics.jsonl has what a checkpoint has."""
    options = ("task=tests.support.tasks.Poisoned", "checkpoint.every_steps=2")
    attempt = Attempt(config(tmp_path, "nan", 2, options), before=before)
    assert attempt.wait() == [1, 1]
    (record,) = read_lines(attempt.run.attempts)
    assert record["reason"] == "failed" and record["requeue"] is False
    assert "step 5: the loss is not finite; train.nonfinite=skip would leave such steps out" in record["error"]
    assert "Traceback" not in record["error"], "one line says it all"
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [2, 4]


def test_nothing_is_saved_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    """The worst moment for a rank to die: the weights are NaN, and no rank has noticed yet. If the surviving rank saved
    them, no later attempt could ever recover."""
    options = ("task=tests.support.tasks.PoisonedAndKilled", "checkpoint.every_steps=2")
    attempt = Attempt(config(tmp_path, "nan-killed", 2, options), before=without_a_long_wait)
    assert attempt.wait() == [-signal.SIGKILL, 1], attempt.output()
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [2, 4]
    assert '"step": 5' not in attempt.run.metrics.read_text()


def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """One bad sample in a million need not end a run: every rank skips that step, though only one saw the NaN, and
    metrics.jsonl says so in valid JSON."""
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
def test_the_rank_that_slows_the_others_down_is_named(tmp_path: Path, slow: str, steps: int) -> None:
    """One slow node makes every step slow on every node, and without this no log would say which. The comparison is
    periodic, and may find that no step was finished since the last one: a step may take minutes."""
    options = ("task=tests.support.tasks.Slow", f"train.max_steps={steps}", "train.accumulate=2")
    attempt = Attempt(config(tmp_path, "slow", 2, options), {"LASTSTEP_TEST_SLOW": slow})
    assert attempt.wait() == [0, 0], attempt.output()
    assert "] rank 1 on " in attempt.logs[0].read_text()
    assert "is slowing the others down" in attempt.logs[0].read_text()


def test_a_low_limit_of_open_files(tmp_path: Path) -> None:
    """Each rank costs rank 0 seven connections, so with the usual limit of a shell, 1,024, 150 ranks could not meet.
    Here the limit is just high enough for two ranks to start at all."""
    words = ["--local", "--tasks-per-node", "2", "--name", "few", f"launch.root={tmp_path}", "train.max_steps=1"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -S -n 38; exec "$@"', "bash", sys.executable, "launch.py", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
