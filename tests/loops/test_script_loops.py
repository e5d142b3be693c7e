"""A custom loop may do at its beginning and end what a script written for torchrun does, whatever launched it."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt


def attempt(root: Path, loop: str, ranks: int = 2, *options: str) -> Attempt:
    """One attempt at a run of a function in tests/loops/script_loops.py, which has ended."""
    place = [f"launch.root={root}", f"launch.name={loop}-{ranks}", f"launch.tasks_per_node={ranks}"]
    words = [f"task=tests.loops.script_loops.{loop}", "device=cpu", "launch.hang_timeout_s=20"]
    started = Attempt(Config.load(None, [*words, *place, *options]))
    started.wait()
    return started


def steps(ended: Attempt) -> int:
    """The steps of a run that has finished."""
    (record,) = read_lines(ended.run.attempts)
    assert record["reason"] == "finished", ended.output()
    return int(record["end_step"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_for_torchrun(root: Path, ranks: int) -> None:
    """Its module reads RANK at its top. Its process group exists already and is still needed when it destroys it, and
    sys.exit(0) is how scripts end: none of that may cost the run its last save."""
    ended = attempt(root, "script", ranks)
    assert steps(ended) == 6 and [rank.exitcode for rank in ended.ranks] == [0] * ranks
    assert f"'LOCAL_WORLD_SIZE': '{ranks}'" in ended.output()


def test_an_exit_in_mid_epoch(root: Path) -> None:
    """It ends the run as a return there would, with the step that it interrupts."""
    assert steps(attempt(root, "leaves_early")) == 2


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("fails", "called sys.exit(no data)"),
        ("other_ranks", "init_process_group(world_size=8): this is rank"),
        ("unwrapped", "run.restore(optimizer=...): updates parameters of no registered DistributedDataParallel"),
    ],
)
def test_refused(root: Path, loop: str, message: str) -> None:
    """Training would go wrong silently: on a part of the data, or with ranks that drift apart."""
    (record,) = read_lines(attempt(root, loop).run.attempts)
    assert record["reason"] == "failed" and message in record["error"]


def test_without_ddp(root: Path) -> None:
    """The way out for a loop that averages by itself; one rank needs none."""
    assert steps(attempt(root, "averages")) == 6
    assert steps(attempt(root, "unwrapped", ranks=1)) == 6


def test_another_backend(root: Path) -> None:
    """A script with `nccl` in it is tried on CPUs: it trains there, and the log says why not by NCCL."""
    ended = attempt(root, "other_backend")
    assert steps(ended) == 6
    assert (
        ended.output().count("WARNING: init_process_group(backend=nccl): the ranks are connected by gloo already") == 1
    )
    assert "backend=cpu:gloo" not in ended.output()


def test_a_rehearsal_that_fails(root: Path) -> None:
    """The error comes from a pass that the script's author has not written: it says so, and how to do without."""
    (record,) = read_lines(attempt(root, "opaque", 4).run.attempts)
    for text in (
        "the rehearsal failed",
        "train.rehearsal=false",
        "found no tensor that requires a gradient",
    ):
        assert text in record["error"]


@pytest.mark.parametrize(("ranks", "option"), [(2, "train.rehearsal=true"), (4, "train.rehearsal=false")])
def test_no_rehearsal(root: Path, ranks: int, option: str) -> None:
    """Two ranks need none, as a sum of two is the same in either order; more can do without."""
    ended = attempt(root, "opaque", ranks, f"launch.name=none-{ranks}", option)
    assert steps(ended) == 2 and 'result {"passes": 2' in ended.output()


def test_settings_of_its_own(root: Path) -> None:
    """The function gets them; one that its dataclass lacks ends the run before it trains."""
    ended = attempt(root, "with_settings", 1, "args.lr=0.5")
    assert steps(ended) == 6 and 'result {"lr": 0.5}' in ended.output()
    (record,) = read_lines(attempt(root, "with_settings", 2, "args.rl=0.5").run.attempts)
    assert "args.rl: Settings has no such field; did you mean lr?" in record["error"] and record["requeue"] is False
