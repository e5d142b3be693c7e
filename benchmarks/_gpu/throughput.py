"""Images per second of the bare loop and of Laststep, which take turns, and the share of the device's peak FLOP/s."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._gpu.contenders import DEVICE, GPU, LEARNING_RATE, WORKLOAD, Workload
from benchmarks._gpu.turns import take_turns
from benchmarks._measure import spread
from benchmarks.loading import QUALITY, photo
from laststep.tasks.models import build_model

RESNET = Workload("resnet50", 256, 224, lead=2, steps=40) if GPU else Workload("resnet18", 8, 32, lead=1, steps=4)
VIT = Workload("vit_b_16", 256, 224, lead=2, steps=30) if GPU else Workload("vit_b_16", 2, 32, lead=1, steps=2)
SMALL = Workload("convnet", 32, 8, lead=10, steps=5000 if GPU else 400, classes=10)
GRAPHS = "reduce-overhead"  # torch.compile's name for CUDA graphs
AGAINST = {"cuda-graphs": f"bare-{GRAPHS}"}  # the bare loop with which a contender is compared, if not the plain one
# The bare loop's kernels may be any; Laststep's are deterministic as it comes.
AS_IT_COMES = {"deterministic": ["train.deterministic=true"]}
# Shared by all parts, so that none has to compile what another has already compiled.
KEPT = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/laststep-gpu"}


def resnet50(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A ResNet-50 on images in device memory, also with deterministic kernels."""
    return in_turns(RESNET, given.turns, folder, AS_IT_COMES if GPU else {})


def vit_b_16(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A vision transformer on images in device memory, also with deterministic kernels."""
    return in_turns(VIT, given.turns, folder, AS_IT_COMES if GPU else {})


def small(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A network whose kernels take less time than their launches, also with CUDA graphs."""
    graphs = ["train.cuda_graphs=true"]
    return in_turns(SMALL, given.turns, folder, {"cuda-graphs": graphs} if GPU else {}, [GRAPHS] if GPU else [])


def digest(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Steps with a digest of the state every 100, as it comes, beside steps without. A turn has whole hundreds."""
    found = {}
    large = RESNET._replace(batch_size=64, lead=100, steps=200)
    small = SMALL._replace(lead=100, steps=2000 if GPU else 100)
    for load in (large, small) if GPU else (small,):
        place = folder / load.model
        place.mkdir()
        # Deterministic, or each process would time the convolutions that cuDNN happens to choose for it.
        same = ["train.compile=false", "train.deterministic=true"]
        plain = [*words(load, (given.turns + 1) * (load.lead + load.steps), place), *same]
        start = [sys.executable, "-m", "laststep"]
        commands = {"digest": [*start, "--name=digest", *plain]}
        commands["none"] = [*start, "--name=none", *plain, "train.digest_every=null"]
        env = {"OMP_NUM_THREADS": "1", WORKLOAD: json.dumps(load)}
        _, taken = take_turns(commands, env, given.turns, place)
        ratios = spread([turn["digest"] / turn["none"] for turn in taken], 4)
        step = spread([1e3 * turn["none"] / load.steps for turn in taken], 3)
        found[load.model] = {"step_ms": step, "ratio": ratios}
        print(
            f"{load.model}: a step takes {step['median']} ms; with a digest every 100 steps {ratios['median']} times "
            f"that (10-90 %: {ratios['p10']} - {ratios['p90']}, {given.turns} turns)",
            flush=True,
        )
    return found


def jpegs(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A ResNet-50 on JPEG files. The untimed steps use up the batches that the workers have prefetched, two each."""
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    load = RESNET._replace(lead=2 * workers + 2, classes=10, workers=workers, jpegs=str(folder / "jpegs"))
    count = (given.turns + 1) * (load.lead + load.steps) * load.batch_size
    make_jpegs(folder / "jpegs", count, different=500 if GPU else 20, classes=load.classes)
    return in_turns(load, given.turns, folder, {"decoded-on-device": ["data.args.decode_on_device=true"]})


def in_turns(
    load: Workload, turns: int, folder: Path, variants: dict[str, list[str]], modes: Sequence[str] = ()
) -> dict[str, Any]:
    """Time the bare loop, Laststep, the variants of Laststep, given as additional words, and the bare loop in these
    modes of torch.compile."""
    bare = [sys.executable, "-m", "benchmarks._gpu.contenders"]
    commands = {"bare": bare, **{f"bare-{mode}": [*bare, mode] for mode in modes}}
    for name, more in {"laststep": [], **variants}.items():
        steps = (turns + 1) * (load.lead + load.steps)
        commands[name] = [sys.executable, "-m", "laststep", f"--name={name}", *words(load, steps, folder), *more]
    env = {"OMP_NUM_THREADS": "1", WORKLOAD: json.dumps(load), **KEPT}
    starts, taken = take_turns(commands, env, turns, folder)
    images = load.steps * load.batch_size
    rates = {name: spread([images / turn[name] for turn in taken], 1) for name in commands}
    ratios = {name: spread([turn[AGAINST.get(name, "bare")] / turn[name] for turn in taken]) for name in commands}
    flops, at_best = flops_of(load), matrix_rate()
    print(
        f"{'images/s':>9} {'10-90 %':>17} {'to bare':>8} {'10-90 %':>13} {'TFLOP/s':>8} {'of best':>8}  ({turns} turns)"
    )
    for name, rate in rates.items():
        ratio, done = ratios[name], rate["median"] * flops
        print(
            f"{rate['median']:>9,.0f} {rate['p10']:>8,.0f} - {rate['p90']:>6,.0f} {ratio['median']:>8.3f} "
            f"{ratio['p10']:>5.3f} - {ratio['p90']:.3f} {done / 1e12:>8.3g} {done / at_best:>8.1%}  "
            f"{name}, {load.model}, batches of {load.batch_size}"
        )
    cost = {}
    if "deterministic" in commands:
        cost = {"deterministic_costs": spread([turn["deterministic"] / turn["laststep"] - 1 for turn in taken])}
        print(f"train.deterministic costs {cost['deterministic_costs']['median']:+.1%} of a step's time")
    print(f"best: {at_best / 1e12:.3g} TFLOP/s, in large matrix products in bf16", flush=True)
    return {
        **load._replace(jpegs="")._asdict(),
        "turns": turns,
        "images_per_s": rates,
        "to_bare": ratios,
        "ratio": ratios["laststep"],
        **cost,
        "flops_per_image": flops,
        "matrix_flops_per_s": at_best,
        "share": round(rates["laststep"]["median"] * flops / at_best, 4),
        "start_s": {name: round(seconds, 1) for name, seconds in starts.items()},
    }


def words(load: Workload, steps: int, folder: Path) -> list[str]:
    """The command-line words that train `steps` steps of the workload with Laststep."""
    data = ["data.name=fake", "task=benchmarks._gpu.contenders.Held"]
    if load.jpegs:
        data = ["data.name=imagefolder", f"data.root={load.jpegs}", "task=benchmarks._gpu.contenders.Timed"]
    return [
        *data,
        "data.args.augment=true",
        f"data.args.image_size={load.image_size}",
        f"data.workers={load.workers}",
        f"model.name={load.model}",
        f"optim.lr={LEARNING_RATE}",
        "optim.schedule=constant",
        f"train.batch_size={load.batch_size}",
        f"train.max_steps={steps}",
        "train.precision=bf16",
        "train.channels_last=true",
        "train.deterministic=false",
        f"train.compile={str(GPU).lower()}",
        f"device={DEVICE}",
        f"launch.root={folder}",
        "launch.hang_timeout_s=3600",  # waiting for one's turn is not a hang
    ]


def make_jpegs(folder: Path, count: int, different: int, classes: int) -> None:
    """Create `count` files: `different` distinct images, and hard links to them for the rest."""
    draw = numpy.random.default_rng(0)
    for part in ("train", "val"):
        for label in range(classes):
            (folder / part / str(label)).mkdir(parents=True)
    paths = [folder / "train" / str(number % classes) / f"{number:07}.jpg" for number in range(count)]
    for path in paths[:different]:
        photo(draw, 500, 375).save(path, quality=QUALITY)
    for number, path in enumerate(paths[different:]):
        os.link(paths[number % different], path)
    for label in range(classes):
        os.link(paths[label], folder / "val" / str(label) / "0.jpg")


def flops_of(load: Workload) -> float:
    """Floating-point operations per image of a step, counting convolutions, matrix products and attention."""
    with torch.device("meta"):
        model = build_model(load.model, 3, load.classes, load.image_size, {})
        images = torch.empty(2, 3, load.image_size, load.image_size)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops() / 2


@cache
def matrix_rate() -> float:
    """The device's best rate: floating-point operations per second of large matrix products in bf16."""
    edge, products = (8192, 30) if GPU else (512, 3)
    a, b = (torch.randn(edge, edge, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    for _ in range(3):
        a @ b
    finish()
    began = time.perf_counter()
    for _ in range(products):
        a @ b
    finish()
    return products * 2 * edge**3 / (time.perf_counter() - began)


def finish() -> None:
    """Wait until the device has finished all queued work."""
    if GPU:
        torch.cuda.synchronize()
