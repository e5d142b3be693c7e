"""How fast a rescue reads the state from a device whose stream hangs in a collective; a kernel that sleeps plays it:
beside the stream, and by another process, as it does where the driver does not answer."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu.contenders import DEVICE, GPU
from laststep.checkpoint.pack import Packed
from laststep.checkpoint.writer import WRITE_BYTES
from laststep.ranks.device import CudaQueue, open_queue

TENSOR = 64 << 20  # bytes per tensor
TURNS = 3
CYCLES_PER_GB = 2_000_000_000  # of the kernel that sleeps: about a second


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Read a state of each size in chunks, as a rescue does, with the stream idle and with it hanging, and with it
    hanging by another process."""
    queue = open_queue(torch.device(DEVICE, 0) if GPU else torch.device(DEVICE))
    chunk, plain = queue.host_buffer(WRITE_BYTES), torch.empty(WRITE_BYTES, dtype=torch.uint8)
    past = queue.ways.past if isinstance(queue, CudaQueue) else None
    results: dict[str, Any] = {}
    for gigabytes in given.gigabytes:
        tensors = max(1, round(gigabytes * 1e9 / TENSOR))
        packed = Packed([torch.full((TENSOR // 4,), float(number), device=DEVICE) for number in range(tensors)])

        queue.note_memory()

        def copy(into: torch.Tensor, packed: Packed = packed) -> None:
            for start in range(0, packed.bytes, WRITE_BYTES):
                length = min(WRITE_BYTES, packed.bytes - start)
                packed.copy(start, start + length, into[:length])

        def read(way: str, packed: Packed = packed, cycles: int = int(CYCLES_PER_GB * (1 + gigabytes))) -> float:
            queue.synchronize()
            hangs = way != "idle"
            if hangs and GPU:
                torch.cuda._sleep(cycles)
            began = time.perf_counter()
            if way == "by another process" and past is not None:
                past.ask(lambda: copy(plain), 60.0)
            else:
                with queue.beside():
                    copy(chunk)
            took_s = time.perf_counter() - began
            if hangs and GPU and torch.cuda.default_stream().query():
                raise RuntimeError("the kernel ended before the state was read: it must hang for longer")
            return packed.bytes / took_s / 1e9

        ways = ("idle", "hanging", "by another process")
        rates = {way: statistics.median(read(way) for _ in range(TURNS)) for way in ways}
        results[f"{gigabytes:g} GB"] = {name: round(rate, 2) for name, rate in rates.items()}
        print(f"{gigabytes:g} GB: " + ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()), flush=True)
        queue.synchronize()
    return results
