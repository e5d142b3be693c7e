"""When ranks of a sharded run die or get stuck, the others save every shard: replicas of it, or copies on other nodes.

As in test_rescue.py, the next attempt continues at the interrupted step, and the run ends with the weights and metrics
of an undisturbed one. tests/attempt/test_sharded_survivors.py has the rest by script: each rank in turn.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.attempt.apart import fall_apart
from tests.support.ranks import Attempt, fingerprint
from tests.support.runs import FAULTY, KILLED, only, without_a_long_wait
from tests.support.runs import config as a_config

SHARDED = (
    "task=tests.support.tasks.Faulty",
    "train.batch_size=8",
    "optim.name=adamw",
    "optim.lr=0.001",
    "optim.clip_norm=1",
)
HYBRID = (*SHARDED, "train.sharding=hybrid")
FULL = (*SHARDED, "train.sharding=full")
COPIED = (*FULL, "checkpoint.replicas=1")


def config(root: Path, name: str, options: tuple[str, ...]) -> Config:
    """A small run of four ranks on two nodes."""
    return a_config(root, name, 2, (*FAULTY, *options, "launch.nodes=2"))


def befall(
    root: Path, name: str, fault: str, options: tuple[str, ...], before: Callable[[], None] | None = None
) -> Attempt:
    """One attempt with this fault, to its end."""
    attempt = Attempt(config(root, name, options), {"LASTSTEP_TEST_FAULT": fault}, 2, before)
    kind, _, _, _, hit = fault.split()
    dead = [int(rank) for rank in hit.split(",")]
    if kind == "halt":
        attempt.wait_for_end(*(rank for rank in range(4) if rank not in dead))
        attempt.signal(signal.SIGKILL, *dead)
    codes = attempt.wait()
    assert codes == [KILLED if rank in dead else 1 for rank in range(4)], attempt.output()
    return attempt


def ends_undisturbed(root: Path, name: str, options: tuple[str, ...]) -> None:
    """The next attempt finishes, with the weights and metrics of a run that nothing has befallen."""
    prints = []
    for run in (name, "undisturbed-" + "-".join(one.split("=")[-1] for one in options[-2:])):
        attempt = Attempt(config(root, run, options), nodes=2)
        assert attempt.wait() == [0] * 4, attempt.output()
        prints.append(fingerprint(attempt.run))
    assert prints[0] == prints[1]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (HYBRID, "kill step 5 rank 0"),
        (HYBRID, "kill step 5 rank 2,3"),
        (COPIED, "kill step 5 rank 3"),
        (COPIED, "kill step 5 rank 0,1"),
        (COPIED, "halt step 5 rank 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].partition("=")[0],
)
def test_no_step_is_lost(root: Path, options: tuple[str, ...], fault: str) -> None:
    """Any rank, any node."""
    name = "-".join((options[-1].partition("=")[-1], *fault.replace(",", "-").split()))
    record = only(befall(root, name, fault, options))
    assert (record["end_step"], record["lost_steps"]) == (4, 0)
    ends_undisturbed(root, name, options)


def test_full_without_copies(root: Path) -> None:
    """The run is back at its newest checkpoint, and the record says why."""
    options = (*FULL, "checkpoint.every_steps=3")
    attempt = befall(root, "bare", "kill step 6 rank 2", options, without_a_long_wait)
    record = only(attempt)
    assert (record["end_step"], record["lost_steps"]) == (5, 2)
    said = "step 5 cannot be saved: shard 2 is held by no surviving rank; the run is back at step 3"
    assert said in record["error"] and said in attempt.output()
    ends_undisturbed(root, "bare", options)
    assert read_lines(attempt.run.attempts)[1]["start_step"] == 3


def test_one_behind_in_a_hybrid_run(root: Path, tmp_path: Path) -> None:
    """Rank 3 is killed after its update of step 5. Rank 1, the only one left with its shard, never gets what all ranks
    have gathered at the end of that step: it does its update with what the others have got, and no step is lost."""
    env = {"LASTSTEP_TEST_APART": f"5 rank 1 hangs {tmp_path}"}
    attempt = Attempt(config(root, "apart", HYBRID), env, nodes=2, before=fall_apart)
    assert attempt.wait() == [1, 1, 1, KILLED], attempt.output()
    record = only(attempt)
    assert (record["end_step"], record["lost_steps"]) == (5, 0), attempt.output()
    assert "it has now done the update of step 5" in attempt.logs[1].read_text()
    ends_undisturbed(root, "apart", HYBRID)


def test_one_behind_while_all_live(root: Path, tmp_path: Path) -> None:
    """Rank 0 fails after a step, and its update is nowhere else. In the main thread of rank 1 the collective hangs, or
    raises an error, or returns after all while the update is being done in the thread of the rescue: it is done once,
    with the same bits."""
    small = ("train.precision=fp16", "model.args.width=16")  # a CPU takes long for wide convolutions of this kind
    options = (*FAULTY, *FULL, *small, "train.ema_decay=0.9", "train.max_steps=10")
    done = 0
    for how in ("hangs", "fails", "returns"):
        folder = tmp_path / how
        folder.mkdir()
        env = {"LASTSTEP_TEST_APART": f"3 rank 1 {how} {folder}"}
        attempt = Attempt(a_config(root, "behind", 2, options), env, before=fall_apart)
        assert attempt.wait() == [1, 1], attempt.output()
        done += 3
        record = read_lines(attempt.run.attempts)[-1]
        assert (record["end_step"], record["lost_steps"]) == (done, 0), attempt.output()
        assert f"it has now done the update of step {done}" in attempt.logs[1].read_text()
    prints = []
    for name in ("behind", "calm"):
        attempt = Attempt(a_config(root, name, 2, options))
        assert attempt.wait() == [0, 0], attempt.output()
        prints.append(fingerprint(attempt.run))
    assert prints[0] == prints[1]
