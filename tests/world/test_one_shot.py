"""The mean of a small model's gradients over two ranks, in one exchange."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
import torch.distributed as dist

from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S
from tests.support.worlds import a_world
from trainer.world.exported import free_port
from trainer.world.group import Group
from trainer.world.one_shot import LARGEST, suits_one_shot

# Prints whether the gradients with the hook are those without it, bit for bit, for each type and in two steps: DDP
# makes other buckets after the first. Each type has a bucket of its own.
RANK = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer.world.one_shot import OneShotHook

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXTREMES = {
    0: [0.0, 1e-45, 6e-8, 65504.0, 3e38, float("inf"), float("-inf")],
    1: [-0.0, 3e-45, 1e-7, 65504.0, 3e38, 1.0, 2.0],
}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=t)) for t in TYPES for size in (7, 1000))

    def forward(self, gradients):
        return sum((weight * gradient).sum().double() for weight, gradient in zip(self.weights, gradients))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
plain, hooked = (DistributedDataParallel(Model(), gradient_as_bucket_view=True, bucket_cap_mb=0.001) for _ in range(2))
OneShotHook().register(hooked)
for step in range(2):
    gradients = [torch.randn(len(weight)).to(weight.dtype) for weight in plain.module.weights]
    gradients[0::2] = [torch.tensor(EXTREMES[rank]).to(t) for t in TYPES]
    for model in (plain, hooked):
        model(gradients).backward()
    for one, other in zip(plain.parameters(), hooked.parameters()):
        assert one.grad.view(torch.uint8).equal(other.grad.view(torch.uint8)), (step, one.dtype, one.grad, other.grad)
        one.grad = other.grad = None
print("the same bits")
dist.destroy_process_group()
"""


def test_it_is_the_mean_of_the_all_reduce() -> None:
    """A run that began without it is resumed with it, and must go on as it would have."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(PROJECT)}
    ranks = [
        subprocess.Popen(
            [forked_python(), "-c", RANK],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and all("the same bits" in out for out in outputs), outputs


@pytest.mark.parametrize(
    ("size", "elements", "device", "backend", "suits"),
    [
        (2, LARGEST // 4, "cpu", "gloo", True),
        (2, LARGEST // 4 + 1, "cpu", "gloo", False),
        (4, 10, "cpu", "gloo", False),
        (2, 10, "cuda", "gloo", False),
        (2, 10, "cuda", "nccl", False),
    ],
)
def test_when_it_is_used(size: int, elements: int, device: str, backend: str, suits: bool) -> None:
    """With more ranks the sum would depend on the order of the ranks, and a resumed run would get other bits."""
    group = Group(a_world(0, size), dist.HashStore(), torch.device(device), backend)
    frozen, trained = torch.empty(LARGEST, device="meta"), torch.empty(elements, device="meta", requires_grad=True)
    assert suits_one_shot(group, [frozen, trained]) is suits
