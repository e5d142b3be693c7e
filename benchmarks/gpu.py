"""What training costs on a GPU: images per second beside a bare loop's, saves of gigabytes, a compiled run's starts.

`python -m benchmarks.gpu [PART ...] [--turns N] [--gigabytes N ...]`, planned for a quarter of an hour on an H200. Each
part can be run alone, and its figures are in results/gpu.json as soon as it ends. Without a GPU all of it is small, and
on the CPU: that shows that the script works, and its figures say nothing of a GPU.

    resnet50    ResNet-50 in bf16, channels_last, compiled, on images that lie on the GPU: the shortest loop with the
                same settings, Laststep, and Laststep with train.deterministic, in turns
    vit_b_16    ViT-B/16, likewise
    jpegs       ResNet-50 on JPEGs of 500x375 that loader workers decode; the bare loop reads them as torchvision's
                references/classification does
    saves       how long the loop stands still for a checkpoint, and what the steps beside the write lose
    starts      the first start of a compiled run, and one that finds what the first has compiled

Beside torch and torchvision it needs three packages of pure Python, which can be brought to a machine without a
network: `pip install --target DIR submitit omegaconf rich` elsewhere, and PYTHONPATH=DIR there. The checks that need a
GPU, `python -m pytest tests/gpu -W default`, need pytest and hypothesis besides.
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

from benchmarks._gpu import saves, starts, throughput
from benchmarks._gpu.contenders import GPU
from benchmarks._measure import RESULTS, machine

LIMIT = 0.98  # of the bare loop's images per second
PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "resnet50": throughput.resnet50,
    "vit_b_16": throughput.vit_b_16,
    "jpegs": throughput.jpegs,
    "saves": saves.measure,
    "starts": starts.measure,
}


def main(words: list[str] | None = None) -> int:
    """Measure, print tables, write the results; 1 when a part fails, or Laststep on a GPU is slower than its limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="What training costs on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--turns", type=int, default=5 if GPU else 2, help="turns of each training (default: %(default)s)"
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", metavar="N", help="sizes to save (default: %(default)s)")
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
        except Exception:  # the machine may not be here again: the other parts have their turn all the same
            traceback.print_exc()
            failed.append(name)
            continue
        keep(name, {"device": device, "took_s": round(time.monotonic() - began), **figures})
        if GPU and figures.get("ratio", {"median": 1})["median"] < LIMIT:
            slow.append(name)
    if slow:
        print(f"Laststep gives less than {LIMIT} of the bare loop's images per second: {', '.join(slow)}")
    if not GPU:
        print("No GPU was at hand: these figures are a CPU's, of smaller work, and none is a GPU's.")
    return int(bool(failed or slow))


def keep(part: str, figures: dict[str, Any]) -> None:
    """Enter a part's figures in results/gpu.json, which has those of a GPU and those of a CPU apart."""
    path = RESULTS / "gpu.json"
    results: dict[str, Any] = {"gpu": "not measured yet", "cpu": {}}
    if path.exists():
        results = json.loads(path.read_text())
    kind = "gpu" if GPU else "cpu"
    if isinstance(results[kind], str):
        results[kind] = {}
    load = round(os.getloadavg()[0], 1)  # processes that wanted to run: what else the machine did
    results[kind][part] = {**machine(), "load": load, **figures}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
