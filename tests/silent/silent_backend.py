"""A process group for CPUs, as silent as NCCL: when a rank dies, the others get no error, and no collective ends.

gloo moves the bytes, so sums have gloo's bits. The order of events is NCCL's:

* A collective is queued and returns at once. One thread per group does what is queued, in order, as a stream does.
* When a peer is lost, the collective under way neither ends nor fails, and nothing behind it begins. `is_completed`
  stays false, and a thread that waits for it waits in C. NCCL's proxy only stores such an error, and its kernel spins.
* `abort` ends it: what is queued fails.
* `shutdown`, and so `destroy_process_group`, waits until everything queued is done, as does the destructor.

A CPU has no stream, so `wait` blocks the thread that calls it, where with NCCL the next operation that needs the
result's value would: torch.cuda.synchronize, or `.item()`.

This folder on PYTHONPATH is all that it takes: torch loads the entry point of the group torch.backends as it is
imported, and from then on gloo means silent. In a process that has imported torch before, call `register`.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

NAME = "silent"
# What torch calls a collective in any version from 2.11 on; a group has those that torch's own base class has.
COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
LOST = "transport/"  # in every error of gloo's that says that a peer is gone; it has no type of its own
YEARS = timedelta(days=3650)


class _Work(dist.Work):  # type: ignore[misc]
    def __init__(self, done: Future[Any]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> Future[Any]:
        return self._done


class Silent(dist.ProcessGroup):  # type: ignore[misc]
    """The process group of these ranks. Each collective returns a torch Work, as any group's does."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._moves = dist.ProcessGroupGloo(store, rank, size, YEARS)
        self._queued: queue.SimpleQueue[tuple[Callable[[], Any], Any, int, Future[Any]] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._stream = threading.Thread(target=self._do_in_order, name="silent stream", daemon=True)
        self._stream.start()

    def getBackendName(self) -> str:
        """See torch."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        """See torch, whose base class asks a backend in C++."""
        return self._name

    def abort(self) -> None:
        """What is queued fails, and what waits for it."""
        self._aborted.set()

    def shutdown(self) -> None:
        """Wait until everything queued is done."""
        self._queued.put(None)
        self._stream.join()

    def __del__(self) -> None:
        self.shutdown()

    def enqueue(self, begin: Callable[[], Any], outputs: Any, divisor: int = 1) -> dist.Work:
        """Queue a collective, which `begin` starts; the result of its Work is `outputs`, divided by the divisor."""
        done = Future[Any]()
        self._queued.put((begin, outputs, divisor, done))
        return _Work(done)

    def _do_in_order(self) -> None:
        while (queued := self._queued.get()) is not None:
            begin, outputs, divisor, done = queued
            try:
                if not self._aborted.is_set():
                    begin().wait()
                    for output in outputs if divisor > 1 else ():
                        output.div_(divisor, rounding_mode=None if output.is_floating_point() else "trunc")
            except RuntimeError as error:
                if LOST not in str(error):
                    done.set_exception(error)
                    continue
                self._aborted.wait()
            if self._aborted.is_set():
                done.set_exception(RuntimeError("the communicator was aborted"))
            else:
                done.set_result(outputs)


def _collective(name: str) -> Callable[..., Any]:
    def call(self: Silent, *args: Any, **options: Any) -> Any:
        outputs = args[0] if args else []
        mean = name == "allreduce" and args[1:] and args[1].reduceOp == dist.ReduceOp.AVG
        if mean:  # gloo has none for whole numbers, NCCL has
            args[1].reduceOp = dist.ReduceOp.SUM
        begin = getattr(self._moves, name)
        return self.enqueue(lambda: begin(*args, **options), outputs, self.size() if mean else 1)

    return call


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Silent, _name, _collective(_name))


def register() -> None:
    """From now on the ranks of this process that ask for gloo get a silent group."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(
        NAME, lambda options, _: Silent(options.store, options.group_rank, options.group_size), True, ["cpu"]
    )
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        init(NAME if backend == "gloo" else backend, *args, **options)

    dist.init_process_group = init_process_group
