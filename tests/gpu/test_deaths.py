"""What only a GPU can show, and what matters most: no step is lost when a rank dies, or is stuck, behind a full queue.

Under NCCL the survivor of a dead rank gets no error: its stream hangs in a collective, while its CPU queues more work.
For one rank a kernel that does not end plays that collective. Two ranks on one GPU pretend to be on two hosts: NCCL
would otherwise refuse.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.gpu.devices import (
    FAULTY_ON_GPU,
    GPU_OR_STAND_IN,
    needs_gpu,
    one_gpu_each,
    ranks_on,
    share_the_gpu,
    skip_without,
)
from tests.gpu.supervised_ranks import train_supervised
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import EVERYTHING, KILLED, config, only, undisturbed

FULL_QUEUE = {"LASTSTEP_TEST_KERNELS": "1"}


@needs_gpu
@pytest.mark.parametrize("step", [2, 5])
def test_stuck_behind_a_full_queue(root: Path, step: int) -> None:
    """The thread that trains waits in the driver, in the middle of a launch, perhaps with a lock of the driver's that
    the rescue must not need."""
    stuck(root, f"fills-{step}", f"fills step {step} rank 0", "device=cuda")


@needs_gpu
@pytest.mark.parametrize("dead", [1, 0])
def test_a_death_behind_a_full_queue(root: Path, dead: int) -> None:
    """As in the training of a large model: one step has more kernels than a GPU's queue takes."""
    options = (*FAULTY_ON_GPU, "device=cuda")
    env = {"LASTSTEP_TEST_FAULT": f"kill step 5 rank {dead}", **FULL_QUEUE}
    attempt = Attempt(config(root, f"full-{dead}", 2, options), env, before=one_gpu_each)
    assert KILLED in attempt.wait(), attempt.output()
    assert_nothing_lost(attempt)
    run = train(config(root, f"full-{dead}", 2, options), before=one_gpu_each)
    assert fingerprint(run) == undisturbed(2, options, one_gpu_each)


def assert_nothing_lost(attempt: Attempt) -> None:
    """A rank was killed as its CPU began step 5. Its GPU was up to two steps behind, so that the steps 3 and 4 may not
    have been done by anybody."""
    record = only(attempt)
    assert record["end_step"] in (2, 3, 4) and record["lost_steps"] == 0, attempt.output()


@needs_gpu
@pytest.mark.parametrize("step", [2, 5])
def test_stuck_with_the_next_steps_queued(root: Path, step: int) -> None:
    """Like a collective of NCCL's that waits for a dead rank: the CPU does not wait, and queues the step's update and
    the next step behind it. The state in memory is that of the step before, and it is saved."""
    stuck(root, f"queued-{step}", f"queues step {step} rank 0", "device=cuda")


@needs_gpu
@pytest.mark.parametrize("step", [2, 5])
def test_stuck_in_a_kernel(root: Path, step: int) -> None:
    """The CPU waits for the device, and the state is copied beside the kernel. In the second step no part of the state
    has been copied before."""
    stuck(root, f"kernel-{step}", f"kernel step {step} rank 0", "device=cuda")


@needs_gpu
@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.parametrize(
    "more",
    [
        ("train.precision=fp16",),
        ("train.nonfinite=skip", "optim.name=adamw"),
        ("train.compile=true", "train.cuda_graphs=true", "data.args.samples=48"),
    ],
    ids=str,
)
def test_stuck_with_more_state_queued(root: Path, step: int, more: tuple[str, ...]) -> None:
    """A gradient scaler, an update that may be skipped, CUDA graphs: each has more state on the device."""
    name = f"queued-{step}-{'-'.join(more).replace('=', '-')}"
    stuck(root, name, f"queues step {step} rank 0", "device=cuda", *more)


def stuck(root: Path, name: str, fault: str, *options: str) -> None:
    """One attempt in which rank 0, the only one, gets stuck: it must keep the step before. A second attempt must finish
    like an undisturbed run."""
    words = (*FAULTY_ON_GPU, *options)
    skip_without(words)
    attempt = Attempt(config(root, name, 1, words), {"LASTSTEP_TEST_FAULT": fault})
    assert attempt.wait() == [1], attempt.output()
    record, step = only(attempt), int(fault.split()[2])
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("hung", step - 1, 0), attempt.output()
    assert fingerprint(train(config(root, name, 1, words))) == undisturbed(1, words)


@needs_gpu
@pytest.mark.parametrize("fault", ["kill step 5 rank 1", "kill step 5 rank 0", "sleep step 5 rank 1"])
def test_one_of_two_over_nccl(root: Path, fault: str) -> None:
    """Over NCCL the survivor waits in a collective for good, and nothing may end its process before it has saved."""
    options = (*FAULTY_ON_GPU, *EVERYTHING, "device=cuda")
    name = f"nccl-{fault.replace(' ', '-')}"
    attempt = Attempt(config(root, name, 2, options), {"LASTSTEP_TEST_FAULT": fault}, before=one_gpu_each)
    codes = attempt.wait()
    assert KILLED in codes or fault.startswith("sleep"), attempt.output()
    assert_nothing_lost(attempt)
    run = train(config(root, name, 2, options), before=one_gpu_each)
    assert fingerprint(run) == undisturbed(2, options, one_gpu_each)


@pytest.mark.parametrize("device", GPU_OR_STAND_IN)
@pytest.mark.parametrize(
    "fault",
    [
        "kill step 5 rank 1",
        "kill step 5 rank 0",
        "sleep step 5 rank 1",
        pytest.param("queues step 5 rank 1", marks=needs_gpu),
    ],
)
def test_two_ranks_on_one_gpu(root: Path, fault: str, device: str) -> None:
    """One of two ranks dies or gets stuck in mid-step, and the other saves the last complete step. With "queues" the
    stuck rank's own stream is behind, and its state is read beside it."""
    before = share_the_gpu if device == "cuda" else None
    options = (*FAULTY_ON_GPU, *EVERYTHING, f"device={device}", "launch.backend=gloo")
    name = f"shared-{fault.replace(' ', '-')}"
    attempt = Attempt(config(root, name, 2, options), {"LASTSTEP_TEST_FAULT": fault}, before=before)
    codes = attempt.wait()
    record = only(attempt)
    assert KILLED in codes or not fault.startswith("kill"), attempt.output()
    assert (record["end_step"], record["lost_steps"]) == (4, 0), attempt.output()
    calm = root / "shared-calm"
    if not calm.exists():
        train(config(root, calm.name, 2, options), before=before)
    assert fingerprint(train(config(root, name, 2, options), before=before)) == fingerprint(RunDir(calm))


@pytest.mark.parametrize("device", GPU_OR_STAND_IN)
@pytest.mark.parametrize("dead", [1, 0])
def test_ranks_start_again_under_their_supervisors(root: Path, dead: int, device: str) -> None:
    """A supervisor has imported torch and touched no GPU, so the rank that it forks again can use one: CUDA works in no
    process whose parent has used it. The other rank ends by itself, and both continue in the same job. These ranks
    believe that they are in a job on Slurm, where ranks that see a single GPU take it."""
    options, before = ranks_on(device, 2)
    options = (*FAULTY_ON_GPU, *EVERYTHING, *options)
    fault = {"LASTSTEP_TEST_FAULT": f"kill step 5 rank {dead}"}
    run, said = train_supervised(config(root, f"supervised-{dead}", 2, options), fault)
    first, second = read_lines(run.attempts)
    assert first["end_step"] in (2, 3, 4) and (first["lost_steps"], first["blamed"] != []) == (0, True), said
    again = (second["start_step"], second["step_restarts"], second["reason"])
    assert again == (first["end_step"], 1, "finished"), said
    calm = train(config(root, f"supervised-{dead}-calm", 2, options), before=before)
    assert fingerprint(run) == fingerprint(calm)
