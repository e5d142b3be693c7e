"""Hints: a wrong one costs more than none, so each depends on the text of its error."""

from __future__ import annotations

import pytest

from laststep.config.config import Config
from laststep.records.progress import likely_cause
from tests.support.records import a_world

GONE = (
    "rank 1 on n2: gone (killed, out of memory, or its node died)\nrank 0 on n1 lost contact: Connection closed by peer"
)
WORKER = "rank 0 on n1 failed:\nRuntimeError: DataLoader worker (pid 4711) is killed by signal: "


@pytest.mark.parametrize(
    ("error", "words", "says"),
    [
        (
            GONE,
            [],
            "(`sacct -j 7 --format=JobID,State` shows it): set launch.mem_gb, start a new run",
        ),
        (GONE, ["launch.mem_gb=16"], "raise launch.mem_gb=16, start"),
        (WORKER + "Killed.", ["data.workers=4"], "set launch.mem_gb, lower data.workers=4, start"),
        (
            WORKER + "Bus error. It is possible that",
            ["data.workers=4"],
            "make /dev/shm larger, or lower data.workers=4",
        ),
        (
            "File reductions.py, in rebuild_storage_fd\nConnectionResetError",
            [],
            "a process was killed, most likely because",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory.",
            ["train.accumulate=4"],
            "a new run with train.accumulate=8",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", [], "this node is out of memory: set launch.mem_gb, start"),
        ("rank 0 on n1 cannot be reached within 600 s: n1:29500: timed out (by", [], "that rank did not start, or"),
    ],
)
def test_in_a_job(error: str, words: list[str], says: str) -> None:
    """Slurm records how a rank ended, and limits the memory."""
    assert says in str(likely_cause(error, Config.load(None, words), a_world(launcher="srun")))


def test_the_buffers_of_saves_are_named() -> None:
    """Who asks for as much memory as a bare loop needs cannot know of them. Small ones are not worth a word."""
    config, world = Config.load(None, ["launch.mem_gb=16"]), a_world(size=4, launcher="srun")
    said = str(likely_cause(GONE, config, world, buffer_bytes=3 * 10**9))
    assert "raise launch.mem_gb=16 (the ranks of a node keep 12.0 GB in buffers for their saves), start" in said
    assert "buffers" not in str(likely_cause(GONE, config, world, buffer_bytes=10**6))


def test_settings_in_use_are_not_advised() -> None:
    """A user who is told to try bf16, and already uses it, stops reading."""
    config = Config.load(None, ["train.precision=bf16", "train.activation_checkpointing=true"])
    said = str(likely_cause("torch.OutOfMemoryError: CUDA out of memory.", config, a_world()))
    assert "bf16" not in said and "activation_checkpointing" not in said


def test_only_settings_that_go_together_are_advised() -> None:
    """The next run would be refused."""
    config = Config.load(None, ["train.compile=true", "train.cuda_graphs=true"])
    said = str(likely_cause("torch.OutOfMemoryError: CUDA out of memory.", config, a_world()))
    assert "accumulate" not in said and "activation_checkpointing" not in said
    assert "with train.cuda_graphs=false, train.precision=bf16 or a smaller train.batch_size" in said


@pytest.mark.parametrize(
    "error",
    [
        "rank 0 on n1 failed:\ndata.name=mnist-5k: empty (0 training, 0 validation samples)",
        "rank 1 on n2 failed:\nTraceback\nValueError: a bad sample",
        "received SIGTERM, though Slurm had not ended the job",
    ],
)
def test_no_hint(error: str) -> None:
    """An error that says enough by itself gets no hint."""
    assert likely_cause(error, Config(), a_world()) is None
