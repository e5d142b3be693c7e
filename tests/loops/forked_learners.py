"""Learners on real ranks, forked from a process that has imported torch: a few steps, without a run around them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laststep.config.config import Config
from laststep.loops.learner import Learner
from laststep.ranks.group import Group
from tests.support.images import IMAGES, LABELS, Images
from tests.support.project import DEADLINE_S
from tests.support.ranks import forked
from tests.support.records import a_world

TIMEOUT = timedelta(seconds=DEADLINE_S)
Result = dict[str, Any]


def learn(folder: Path, build: Callable[[], nn.Module], words: Sequence[str], size: int, nodes: int = 1) -> Result:
    """What `size` ranks on `nodes` nodes end with after four steps on all images: the full tensors of the learner's
    state, what each step has measured, and the sums of a validation in which all but rank 0 have no sample."""
    folder.mkdir()
    ranks = [forked(_rank, folder, build, list(words), rank, size, nodes) for rank in range(size)]
    for rank in ranks:
        rank.join(DEADLINE_S)
        assert rank.exitcode == 0, "\n".join(path.read_text() for path in folder.glob("error*"))
    result: Result = torch.load(folder / "result")
    return result


def _rank(folder: Path, build: Callable[[], nn.Module], words: list[str], rank: int, size: int, nodes: int) -> None:
    torch.set_num_threads(1)
    each = size // nodes
    place: dict[str, Any] = {"local_rank": rank % each, "local_size": each, "node": rank // each, "nodes": nodes}
    group = Group(a_world(rank, size, **place), dist.HashStore(), torch.device("cpu"), "gloo")
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        found = _steps(build, words, group)
        if rank == 0:
            torch.save(found, folder / "result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def _steps(build: Callable[[], nn.Module], words: list[str], group: Group) -> Result:
    config = Config.load(None, ["device=cpu", *words])
    learner = Learner(config, Images(config, build), group, total_steps=10)
    learner.warm_up((IMAGES[:4], LABELS[:4]))
    rank, total = group.world.rank, config.train.shares or group.world.size
    shares = [torch.arange(12).chunk(total)[share] for share in learner.shares]
    cuts = [cut for share in shares for cut in share.chunk(config.train.accumulate)]
    measured = []
    for step in range(4):
        learner.learn(step, [(IMAGES[cut], LABELS[cut]) for cut in cuts], list(map(len, cuts)), 12)
        measured.append({name: float(value) for name, value in learner.update().items()})
        learner.train(False)
        sums = group.sum(learner.evaluate(step, 0, (IMAGES[:4], LABELS[:4]), 0 if rank else 4))
        learner.train(True)
    return {"state": _full(learner.state_dict()), "measured": measured, "validation": sums}


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _full(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return value
