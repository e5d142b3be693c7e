"""Sums over the ranks in one fixed order: a tree over the shares of `train.shares`.

The tree is that of `tree_sum` over all shares. Each rank has 2^k neighbouring shares, so a rank's own sum is a node of
it, and the sum over the ranks continues where the ranks' own sums end. The result therefore depends neither on the
number of ranks nor on the choices of gloo or NCCL, which here move data but never add: an all-to-all brings the same
chunk of all ranks to one of them, which adds these pieces, and an all-gather brings the sums to all. That sends as many
bytes as a ring all-reduce. gloo's all-gather would collect into new memory and copy from there, so with gloo each rank
broadcasts its chunk instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laststep import compat


def tree_sum(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in a fixed order; overwrites `rows`.

    Neighbours are added pairwise as long as the number of rows is even, then the odd number that is left from left to
    right. So 12 rows are 6 sums, then 3, and these are added one after another.
    """
    while len(rows) % 2 == 0:
        rows = rows[0::2].add_(rows[1::2])
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


class ScatteredSum:
    """A sum over the ranks of a group under way, of which each rank gets one chunk. The first half of an all-reduce."""

    def __init__(
        self, flat: Tensor, size: int, received: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Start it. `flat` has one dimension; its length is a multiple of `size`, the number of ranks. `received` is
        memory of the same shape to use."""
        self._received = torch.empty_like(flat) if received is None else received
        self._size = size
        self._work = dist.all_to_all_single(self._received, flat, group=group, async_op=True)

    def wait(self) -> Tensor:
        """This rank's chunk of the sum. With NCCL only the current stream waits."""
        self._work.wait()
        return tree_sum(self._received.view(self._size, -1))


class BucketSum:
    """The sum of one of DDP's buckets over the ranks of a group, in the bucket's own memory."""

    def __init__(
        self, buffer: Tensor, size: int, received: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._buffer, self._group = buffer, group
        missing = -len(buffer) % size
        self._whole = torch.nn.functional.pad(buffer, (0, missing)) if missing else buffer
        self._scattered = ScatteredSum(self._whole, size, received, group)
        self._gathering: list[dist.Work] = []

    def gather(self) -> None:
        """The second half: start to collect the chunks."""
        if self._gathering:
            return
        chunk, group = self._scattered.wait(), self._group
        if self._whole.is_cuda:
            self._gathering = [compat.all_gather_single(self._whole, chunk, group=group, async_op=True)]
            return
        chunks = self._whole.chunk(dist.get_world_size(group))
        chunks[dist.get_rank(group)].copy_(chunk)
        self._gathering = [
            dist.broadcast(one, group=group, group_src=rank, async_op=True) for rank, one in enumerate(chunks)
        ]

    def wait(self) -> Tensor:
        """The bucket with the sum in it."""
        assert self._gathering
        for work in self._gathering:
            work.wait()
        if self._whole is not self._buffer:
            self._buffer.copy_(self._whole[: len(self._buffer)])
        return self._buffer


class TreeHook:
    """DDP's communication hook: gives each bucket its sum over the ranks, not the mean.

    DDP calls it for one bucket after another, in the same order on every rank, while the backward pass is under way. On
    a GPU everything is queued on a stream beside it. On a CPU somebody has to wait between the two halves: the second
    half of a bucket begins when the next bucket is ready.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[tuple[BucketSum, Future[Tensor]]] = []
        self.sums = 0  # how often all buckets have been summed
        self._received: dict[int, Tensor] = {}  # by bucket, on a CPU: new memory costs as much time as the sum

    def register(self, ddp: DistributedDataParallel) -> None:
        """Have DDP call this from now on."""
        ddp.register_comm_hook(None, lambda _, bucket: self._bucket_ready(bucket))  # DDP rejects annotations as text

    def _bucket_ready(self, bucket: dist.GradBucket) -> Future[Tensor]:
        self.sums += bucket.is_last()
        if self._stream is not None:
            return self._queue(bucket.buffer(), self._stream)
        started, future = BucketSum(bucket.buffer(), self._size, self._memory_for(bucket)), Future[Tensor]()
        for earlier, _ in self._under_way:
            earlier.gather()
        self._under_way.append((started, future))
        if bucket.is_last():
            started.gather()
            under_way, self._under_way = self._under_way, []
            for each, its_future in under_way:
                its_future.set_result(each.wait())
        return future

    def _memory_for(self, bucket: dist.GradBucket) -> Tensor:
        buffer, known = bucket.buffer(), self._received.get(bucket.index())
        length = -(-len(buffer) // self._size) * self._size
        if known is None or len(known) != length or known.dtype != buffer.dtype:  # DDP changes its buckets once
            known = self._received[bucket.index()] = buffer.new_empty(length)
        return known

    def _queue(self, buffer: Tensor, stream: torch.cuda.Stream) -> Future[Tensor]:
        """Queue both halves on a GPU. DDP's wait for the result is a wait of its stream for this one."""
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            started, future = BucketSum(buffer, self._size), Future[Tensor](devices=[buffer.device])
            started.gather()
            future.set_result(started.wait())
        return future
