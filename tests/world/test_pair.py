"""The mean of the gradients of two ranks, in memory that both see."""

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
from trainer.world import pair
from trainer.world.exported import free_port
from trainer.world.group import Group
from trainer.world.pair import PART, Pair

# Each rank begins with this.
BEGIN = """
import os, select, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tests.support.worlds import a_world
from trainer.world import pair
from trainer.world.group import Group
from trainer.world.pair import PART, Pair

dist.init_process_group("gloo")
rank = dist.get_rank()
group = Group(a_world(rank, 2), dist.HashStore(), torch.device("cpu"), "gloo")
"""
# Prints whether the gradients of a pair are those of gloo's all-reduce, bit for bit, for each type and in two steps:
# DDP makes other buckets after the first. The largest have several parts, the last of them shorter.
MEAN = """
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXTREMES = {
    0: [0.0, 1e-45, 6e-8, 65504.0, 3e38, float("inf"), float("-inf")],
    1: [-0.0, 3e-45, 1e-7, 65504.0, 3e38, 1.0, 2.0],
}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (7, 1000, PART * 3 // 4 + 1)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=t)) for t in TYPES for size in sizes)

    def forward(self, gradients):
        return sum((weight * gradient).sum().double() for weight, gradient in zip(self.weights, gradients))

torch.manual_seed(rank)
plain, paired = (DistributedDataParallel(Model(), gradient_as_bucket_view=True, bucket_cap_mb=0.001) for _ in range(2))
Pair.of(group).register(paired)
for step in range(2):
    gradients = [torch.randn(len(weight)).to(weight.dtype) for weight in plain.module.weights]
    gradients[0::3] = [torch.tensor(EXTREMES[rank]).to(t) for t in TYPES]
    for model in (plain, paired):
        model(gradients).backward()
    for one, other in zip(plain.parameters(), paired.parameters()):
        assert one.grad.view(torch.uint8).equal(other.grad.view(torch.uint8)), (step, one.dtype, one.grad, other.grad)
        one.grad = other.grad = None
print("the same bits")
dist.destroy_process_group()
"""
# Rank 1 is killed in its second step: before or after it has said that its gradient is there. If it is "gone", rank 0
# comes later. Its user has given SIGPIPE the default action, as tools that print to a pager do.
KILLED = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
own = Pair.of(group)
own.register(model)
meet, meetings = own._meet, []

def meet_or_die():
    meetings.append(1)
    if len(meetings) == 2 and rank == 1:
        if sys.argv[1] == "after":
            os.write(own._tell, pair.WORD)
        os.kill(os.getpid(), signal.SIGKILL)
    if len(meetings) == 2 and sys.argv[1] == "gone":
        select.select([own._told], [], [])
    meet()

own._meet = meet_or_die
try:
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([[rank + 1.0]])).sum().backward()
        print(model.module.weight.grad.item())
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    os._exit(0)
"""
# Rank 1 cannot open what rank 0 offers, or has no memory to offer.
REFUSED = """
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

def refuse(*_, **__):
    raise PermissionError

before = [number for number in range(200) if is_open(number)]
if rank == 1 and sys.argv[1] == "hidden":
    pair.os = type("Hidden", (), {**vars(os), "open": staticmethod(refuse)})
elif rank == 1:
    pair.tempfile.TemporaryFile = refuse
assert Pair.of(group) is None
print([number for number in range(200) if is_open(number)] == before)
dist.destroy_process_group()
"""


def two_ranks(code: str, *words: str) -> list[tuple[int, str]]:
    """Run this code as two ranks; returns the exit status and the output of each."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(PROJECT)}
    ranks = [
        subprocess.Popen(
            [forked_python(), "-c", BEGIN + code, *words],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    return [(rank.wait(DEADLINE_S), said) for rank in ranks for said in [rank.communicate(timeout=DEADLINE_S)[0]]]


def test_it_is_the_mean_of_the_all_reduce() -> None:
    """A run that began without it, as on two hosts, must go on as it would have."""
    assert two_ranks(MEAN) == [(0, "the same bits\n")] * 2


@pytest.mark.parametrize(("moment", "steps"), [("before", 1), ("gone", 1), ("after", 2)])
def test_the_other_rank_is_killed(moment: str, steps: int) -> None:
    """The survivor must not wait forever, nor take an old gradient for a new one. It knows that a peer is gone, and so
    leaves it to that peer's own error to say why."""
    (status, said), (killed, _) = two_ranks(KILLED, moment)
    assert (status, killed) == (0, -9)
    assert said == "1.5\n" * steps + "PeerLost: rank 1 on here has ended\n"


@pytest.mark.parametrize("why", ["hidden", "no memory"])
def test_ranks_that_cannot_see_each_other(why: str) -> None:
    """As in containers of their own: gloo's all-reduce, on both ranks, and nothing is left open."""
    assert two_ranks(REFUSED, why) == [(0, "True\n")] * 2


@pytest.mark.parametrize(
    ("size", "hosts", "device", "backend"),
    [
        (1, ("here",), "cpu", ""),
        (2, ("here", "there"), "cpu", "gloo"),
        (4, ("here",) * 4, "cpu", "gloo"),
        (2, ("here", "here"), "cuda", "gloo"),
        (2, ("here", "here"), "cuda", "nccl"),
    ],
)
def test_where_there_is_none(size: int, hosts: tuple[str, ...], device: str, backend: str) -> None:
    """With more ranks the sum would depend on the order of the ranks, and a resumed run would get other bits."""
    group = Group(a_world(0, size, hosts=hosts), dist.HashStore(), torch.device(device), backend)
    assert Pair.of(group) is None


def test_only_the_memory_that_was_offered_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container the same number may be that of another process and of another file of this user."""
    offer = pair._Offer()
    process, memory, pipe, token = offer.numbers
    assert pair._map(process, memory, token).numel() == 2 * PART
    for wrong in [
        (process, memory, token + 1),
        (process, pipe, token),
        (process, -1, token),
        (2**22 + 1, memory, token),
    ]:
        with pytest.raises(FileNotFoundError):
            pair._map(*wrong)
    offer.close()
    os.close(offer.told)
