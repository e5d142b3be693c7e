"""The mean of a small model's gradients over two ranks on CPUs, in one exchange.

gloo's all-reduce is a ring of two rounds (gloo/allreduce.cc). Each of two ranks sends four messages, however little
there is to send, and each message has to wake threads of both, which takes longer than all else in a small model's
step. In a one-shot all-reduce both ranks send all they have in one round, and each adds it up: as many bytes.

A sum of two numbers does not depend on their order, so the mean is that of the all-reduce bit for bit. With more ranks
it would not be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer.world.group import Group

LARGEST = 512 * 1024  # bytes of gradients; for more the ring is as fast, and runs beside the backward pass


def suits_one_shot(group: Group, parameters: Iterable[Tensor]) -> bool:
    """Whether the mean of the gradients of these parameters should be computed in one exchange."""
    if group.world.size != 2 or group.backend != "gloo" or group.device.type != "cpu":
        return False
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad) <= LARGEST


class OneShotHook:
    """DDP's communication hook: gives each bucket its mean over the two ranks."""

    def __init__(self) -> None:
        self._received: dict[int, Tensor] = {}  # by bucket: new memory would cost as much time as the sum

    def register(self, ddp: DistributedDataParallel) -> None:
        """Have DDP call this from now on."""
        ddp.register_comm_hook(None, lambda _, bucket: self._bucket_ready(bucket))  # DDP rejects annotations as text

    def _bucket_ready(self, bucket: dist.GradBucket) -> Future[Tensor]:
        own, both = bucket.buffer(), self._received.get(bucket.index())
        if both is None or both.numel() != 2 * own.numel() or both.dtype != own.dtype:  # DDP changes its buckets once
            both = self._received[bucket.index()] = own.new_empty(2 * own.numel())
        dist.all_gather_into_tensor(both, own.div_(2))  # divided first, as DDP does
        torch.add(*both.chunk(2), out=own)
        future = Future[Tensor]()
        future.set_result(own)
        return future
