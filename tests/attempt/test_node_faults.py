"""A node that lacks a GPU or its data does not end a run that has trained; a wrong configuration ends one that has not.

These runs take themselves for jobs of a Slurm that does not answer: elsewhere nothing starts a run again by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from laststep.config.errors import ConfigError
from laststep.ranks.fault import DeviceConflict
from laststep.ranks.group import Registration, check_devices
from laststep.ranks.launchers import detect_world
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, train
from tests.support.runs import FAULTY, config, only

NO_GPU = "device=cuda: torch finds no GPU on this machine; use device=cpu"
ON_SLURM = {
    **{"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n1", "SLURM_CONF": "/no/slurm.conf"},
    **{"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "SLURM_SUBMIT_DIR": "/",
}
RESTARTED = {**ON_SLURM, "SLURM_RESTART_COUNT": "1"}


def no_gpu() -> None:
    """Make this rank one whose node has lost its GPU."""
    mock.patch("laststep.ranks.group.set_up_device", side_effect=ConfigError(NO_GPU)).start()


def no_data() -> None:
    """Make this rank one whose node lacks the mount with the data."""
    missing = FileNotFoundError(2, "No such file or directory", "/data/train")
    mock.patch("tests.support.tasks.Faulty.datasets", side_effect=missing).start()


@pytest.mark.parametrize(("fault", "said"), [(no_gpu, NO_GPU), (no_data, "/data/train")], ids=["no GPU", "no data"])
def test_a_fault_of_a_node_is_retried_once_the_run_has_trained(
    root: Path, fault: Callable[[], None], said: str
) -> None:
    """A run that has trained for weeks must not end because the next node is broken. The batch shell requeues the job:
    the rank exits with 1, and does not hand submitit an error, which submitit would take for the end of the run."""
    small = config(root, f"weeks-{fault.__name__}", 1, FAULTY)
    first = Attempt(small, {**ON_SLURM, "LASTSTEP_TEST_FAULT": "raise step 5 rank 0"})
    assert first.wait() == [1], first.output()
    broken = Attempt(small, RESTARTED, before=fault)
    assert broken.wait() == [1], broken.output()
    assert said in broken.output() and "in _rank" not in broken.output(), "the caller sees no error"
    kept, lost = read_lines(broken.run.attempts)
    assert (kept["end_step"], kept["requeue"]) == (4, True)
    assert (lost["reason"], lost["requeue"]) == ("failed", True) and said in lost["error"]


@pytest.mark.parametrize(("fault", "said"), [(no_gpu, NO_GPU), (no_data, "/data/train")], ids=["no GPU", "no data"])
def test_what_is_wrong_from_the_first_start_is_not_retried(root: Path, fault: Callable[[], None], said: str) -> None:
    """The configuration asks for a GPU that no node has, or for data that are nowhere: the user must learn it now."""
    attempt = Attempt(config(root, f"new-{fault.__name__}", 1, FAULTY), ON_SLURM, before=fault)
    assert attempt.wait() == [1], attempt.output()
    assert said in attempt.output()
    assert only(attempt)["requeue"] is False


def gpu_on_rank_0_only() -> None:
    """Make this rank, if it is the first, one that has found a GPU."""
    device = torch.device("cpu" if detect_world().rank else "meta")
    mock.patch("laststep.ranks.group.set_up_device", return_value=device).start()


def test_a_rank_that_fell_back_to_the_cpu(root: Path) -> None:
    """Where each rank takes the GPU that it finds, a node without one would train on its CPU: the collectives would
    hang, or the run would crawl. The record blames that rank, and no rank waits for a timeout."""
    attempt = Attempt(config(root, "fell-back", 2, ()), before=gpu_on_rank_0_only)
    assert attempt.wait() == [1, 1], attempt.output()
    record = only(attempt)
    assert record["error"].startswith("rank 1 on ")
    assert "found no GPU; the others train on meta with gloo" in record["error"]
    assert "found no GPU" in attempt.logs[0].read_text(), "rank 0's log is where a user looks"


def one_gpu(backend: str) -> None:
    """Make this rank one that trains on the same GPU as every other rank."""
    mock.patch("laststep.ranks.group.choose_backend", return_value=backend).start()
    mock.patch("laststep.ranks.group.gpu_uuid", return_value="MIG-77").start()


def test_two_ranks_with_one_gpu(root: Path) -> None:
    """NCCL would fail with a line about a bus, which names no rank."""
    attempt = Attempt(config(root, "one-gpu", 2, ()), before=functools.partial(one_gpu, "nccl"))
    assert attempt.wait() == [1, 1], attempt.output()
    record = only(attempt)
    assert record["error"].startswith("rank 0 and rank 1 on ")
    assert "both use MIG-77; launch.slurm.gpus-per-task=1 gives each rank its own" in record["error"]
    assert record["requeue"] is False, "it would happen again"


def test_the_ranks_of_one_gpu_are_named_however_many_there_are() -> None:
    """Ranks of two nodes may have the same GPU by its number, and two ranks on CPUs have none."""
    cards = [card("n1", "GPU-a"), card("n1", "GPU-b"), card("n2", "GPU-a"), card("n2", "GPU-a")]
    check_devices(cards[:3])
    check_devices([card("n1", "", "cpu", "gloo")] * 2)
    with pytest.raises(DeviceConflict, match=r"^rank 2 and rank 3 on n2 both use GPU-a; use one rank per GPU, or"):
        check_devices(cards)


def card(host: str, gpu: str, device: str = "cuda", backend: str = "nccl") -> Registration:
    return Registration(host=host, pid="1", device=device, backend=backend, gpu=gpu, at=0.0, local_ip="", rank_0_ip="")


def test_two_ranks_share_a_gpu_on_purpose(root: Path) -> None:
    """gloo can do that, and nobody gets gloo on a GPU without asking for it."""
    train(config(root, "shared-gpu", 2, ()), before=functools.partial(one_gpu, "gloo"))
