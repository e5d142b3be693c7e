"""Hints: a wrong one costs more than none, so each is tied to what its error really says."""

from __future__ import annotations

import pytest

from tests.support.worlds import a_world
from trainer.config.config import Config
from trainer.observe.hints import likely_cause

GONE = (
    "rank 1 on n2: gone (killed, out of memory, or its node died)\nrank 0 on n1 lost contact: Connection closed by peer"
)
WORKER = "rank 0 on n1 failed:\nRuntimeError: DataLoader worker (pid 4711) is killed by signal: "


@pytest.mark.parametrize(
    ("error", "words", "says"),
    [
        (GONE, [], "(`sacct -j 7 --format=JobID,State` tells): set launch.mem_gb, start anew with train.accumulate=2"),
        (GONE, ["launch.mem_gb=16"], "raise launch.mem_gb=16, start"),
        (WORKER + "Killed.", ["data.workers=4"], "set launch.mem_gb, lower data.workers=4, start"),
        (
            WORKER + "Bus error. It is possible that",
            ["data.workers=4"],
            "make /dev/shm larger, or lower data.workers=4",
        ),
        ("File reductions.py, in rebuild_storage_fd\nConnectionResetError", [], "what was killed was most likely"),
        ("torch.OutOfMemoryError: CUDA out of memory.", ["train.accumulate=4"], "start anew with train.accumulate=8"),
        ("OSError: [Errno 12] Cannot allocate memory", [], "this node's memory is full: set launch.mem_gb, start"),
        ("rank 0 on n1 cannot be reached within 600 s: n1:29500: timed out (by", [], "that rank was not started, or"),
    ],
)
def test_in_a_job(error: str, words: list[str], says: str) -> None:
    """There Slurm knows what became of a rank, and gives out the memory."""
    assert says in str(likely_cause(error, Config.load(None, words), a_world(launcher="srun")))


def test_what_is_in_use_is_not_advised() -> None:
    """Who reads "try bf16" under bf16 reads no further."""
    config = Config.load(None, ["train.precision=bf16", "train.activation_checkpointing=true"])
    said = str(likely_cause("torch.OutOfMemoryError: CUDA out of memory.", config, a_world()))
    assert "bf16" not in said and "activation_checkpointing" not in said


@pytest.mark.parametrize(
    "error",
    [
        "rank 0 on n1 failed:\ndata.name=mnist-5k: empty (0 training, 0 validation samples)",
        "rank 1 on n2 failed:\nTraceback\nValueError: a bad sample",
        "received SIGTERM, though Slurm had not ended the job",
    ],
)
def test_no_hint(error: str) -> None:
    """What the error says by itself needs none."""
    assert likely_cause(error, Config(), a_world()) is None
