"""Four and eight ranks: sharding, hybrid, the order of NCCL's ring, and a restart. Where there are too few GPUs for
four ranks they share the first.

One machine stands for two nodes where a test needs nodes: the ranks believe the launcher.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.gpu.devices import CHOSEN, FAULTY_ON_GPU, needs_gpu, one_gpu_each, ranks_on
from tests.gpu.supervised_ranks import train_supervised
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import KILLED, config, only

ON_CPUS = CHOSEN == "cpu"
DEVICE = "cpu" if ON_CPUS else "cuda"
RANKS: list[Any] = [4] if ON_CPUS else [pytest.param(4, marks=needs_gpu), pytest.param(8, marks=pytest.mark.gpu(8))]
WIDE = (*FAULTY_ON_GPU, f"device={DEVICE}", "train.batch_size=16", "data.args.samples=104", "train.ema_decay=0.9")
ADAMW = ("optim.name=adamw", "optim.lr=0.001", "optim.clip_norm=1")


def attempt(root: Path, name: str, ranks: int, options: tuple[str, ...], nodes: int = 1, **env: str) -> Attempt:
    """One attempt of a run on this many nodes."""
    words = (*WIDE, *options, f"launch.nodes={nodes}")
    small = config(root, name, ranks // nodes, words)
    return Attempt(small, env, nodes, before=None if ON_CPUS else one_gpu_each)


def finish(root: Path, name: str, ranks: int, options: tuple[str, ...], nodes: int = 1) -> RunDir:
    """One attempt, which must finish the run."""
    last = attempt(root, name, ranks, options, nodes)
    assert last.wait() == [0] * ranks, last.output()
    return last.run


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_stop_and_resume(root: Path, sharding: str, ranks: int) -> None:
    """More than two numbers add up to other bits in another order: each attempt must add along the same ring."""
    options = (*ADAMW, f"train.sharding={sharding}", "task=tests.support.tasks.Signalled")
    name = f"ring-{sharding}-{ranks}"
    stopped = attempt(root, name, ranks, options, LASTSTEP_TEST_SIGNAL="SIGTERM step 4 rank 1")
    assert stopped.wait() == [128 + signal.SIGTERM] * ranks, stopped.output()
    run = finish(root, name, ranks, options)
    assert fingerprint(run) == fingerprint(finish(root, f"{name}-calm", ranks, options))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kept", ["train.sharding=hybrid", "train.sharding=full checkpoint.replicas=1"])
def test_a_node_dies(root: Path, kept: str, ranks: int) -> None:
    """All ranks of one of two nodes are killed. Of each shard the other node has a replica, or a copy in memory."""
    options = (*ADAMW, *kept.split())
    name = f"node-{options[-1].partition('=')[0]}-{ranks}"
    dead = range(ranks // 2, ranks)
    fault = f"kill step 5 rank {','.join(map(str, dead))}"
    hit = attempt(root, name, ranks, options, nodes=2, LASTSTEP_TEST_FAULT=fault)
    codes = hit.wait()
    # The second of the dead may get NCCL's error of the first one's connection before it is killed itself.
    assert codes[: ranks // 2] == [1] * (ranks // 2) and KILLED in codes[ranks // 2 :], hit.output()
    record = only(hit)
    assert record["end_step"] in (2, 3, 4) and record["lost_steps"] == 0, hit.output()
    run = finish(root, name, ranks, options, nodes=2)
    assert fingerprint(run) == fingerprint(finish(root, f"{name}-calm", ranks, options, nodes=2))


@pytest.mark.parametrize("ranks", RANKS)
def test_the_ranks_start_again(root: Path, ranks: int) -> None:
    """One of them is killed: under their supervisors all continue in the same job, and their ring is the same."""
    options, before = ranks_on(DEVICE, ranks)
    words = (*WIDE, *ADAMW, *options)
    fault = {"LASTSTEP_TEST_FAULT": "kill step 5 rank 2"}
    run, said = train_supervised(config(root, f"again-{ranks}", ranks, words), fault)
    first, second = read_lines(run.attempts)
    assert first["end_step"] in (2, 3, 4) and first["lost_steps"] == 0, said
    again = (second["start_step"], second["step_restarts"], second["reason"])
    assert again == (first["end_step"], 1, "finished"), said
    assert fingerprint(run) == fingerprint(train(config(root, f"again-{ranks}-calm", ranks, words), before=before))
