"""Training on a GPU: images per second compared with a bare loop, gigabyte-sized saves, and starts of a compiled run.

`python -m benchmarks.gpu [PART ...] [--turns N] [--gigabytes N ...]`, planned for about 15 minutes on an H200. Each
part can be run alone and writes its figures to results/gpu.json as soon as it ends. Without a GPU, a much smaller
version runs on the CPU: that shows that the script works, but its figures say nothing about a GPU.

    resnet50    ResNet-50 in bf16, channels_last, compiled, on images already in GPU memory: a minimal loop with the
                same settings, Laststep, and Laststep with train.deterministic, taking turns; prints what
                train.deterministic costs
    vit_b_16    the same for ViT-B/16
    small       a network whose kernels take less time than their launches: also with CUDA graphs, as is the loop
    jpegs       ResNet-50 on 500x375 JPEGs decoded by loader workers; the bare loop reads them as torchvision's
                references/classification does
    saves       how long a checkpoint stalls the loop, and how much it slows down the steps during the write
    digest      what the digest of the state every 100 steps costs: ResNet-50, and the network of `small`, not compiled
    beside      how fast a rescue reads the state while the stream hangs in a collective
    starts      the first start of a compiled run, and a second start that reuses what the first compiled

Besides torch and torchvision it needs three pure-Python packages. To bring them to a machine without a network, run
`pip install --target DIR submitit omegaconf rich` elsewhere, copy DIR and set PYTHONPATH=DIR. `python -m tests.gpu`,
which runs the tests that need a GPU and then this, also needs pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu import beside, saves, starts, throughput
from benchmarks._gpu.contenders import GPU
from benchmarks._measure import RESULTS, machine

LIMIT = 0.98  # lowest acceptable ratio of Laststep's images per second to the bare loop's
PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "resnet50": throughput.resnet50,
    "vit_b_16": throughput.vit_b_16,
    "small": throughput.small,
    "jpegs": throughput.jpegs,
    "saves": saves.measure,
    "digest": throughput.digest,
    "beside": beside.measure,
    "starts": starts.measure,
}


def main(words: list[str] | None = None) -> int:
    """Measure, print tables, write the results; returns 1 if a part fails or Laststep on a GPU misses its limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Measure training on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--turns", type=int, default=5 if GPU else 2, help="timed turns per training (default: %(default)s)"
    )
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", metavar="N", help="checkpoint sizes to save (default: %(default)s)"
    )
    parser.set_defaults(gigabytes=[2, 20] if GPU else [0.02, 0.2])
    given = parser.parse_args(words)
    unknown = ", ".join(set(given.parts) - set(PARTS))
    if unknown or given.turns < 2:
        parser.error(f"{unknown}: no such part" if unknown else "--turns must be at least 2")

    failed, slow = [], []
    device = torch.cuda.get_device_name() if GPU else "the CPU"
    for name in given.parts or PARTS:
        print(f"== {name}, on {device}", flush=True)
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                figures = PARTS[name](given, Path(folder))
        except Exception:  # this machine may not be available again: run the other parts anyway
            traceback.print_exc()
            failed.append(name)
            continue
        write_part(name, {"device": device, "took_s": round(time.monotonic() - began), **figures})
        if GPU and figures.get("ratio", {"median": 1})["median"] < LIMIT:
            slow.append(name)
    if slow:
        print(f"Laststep reaches less than {LIMIT} of the bare loop's images per second: {', '.join(slow)}")
    if not GPU:
        print("No GPU found: these figures are from smaller workloads on the CPU and say nothing about a GPU.")
    return int(bool(failed or slow))


def write_part(part: str, figures: dict[str, Any]) -> None:
    """Write a part's figures to results/gpu.json, which keeps GPU and CPU figures apart."""
    path = RESULTS / "gpu.json"
    results: dict[str, Any] = {"gpu": "not measured yet", "cpu": {}}
    if path.exists():
        results = json.loads(path.read_text())
    kind = "gpu" if GPU else "cpu"
    if isinstance(results[kind], str):
        results[kind] = {}
    load = round(os.getloadavg()[0], 1)  # load average: how busy the machine was with other work
    results[kind][part] = {**machine(), "load": load, **figures}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
