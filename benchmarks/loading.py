"""The throughput of the input pipeline without a model, compared with other pipelines.

`python -m benchmarks.loading [--turns N]`. The photos are JPEGs generated from a fixed seed, with noise at every scale
as in real photos. The reference reads them as torchvision's references/classification does by default (PIL,
RandomResizedCrop, flip, PILToTensor, ConvertImageDtype, Normalize, default collate), except that its workers persist
across epochs. TorchCodec and NVIDIA's DALI, on its CPU backend with one thread, are included without workers if they
are installed (`pip install torchcodec nvidia-dali-cuda120`). The digits are mnist-5k, and the reference is PyTorch's
MNIST example. All pipelines produce floats on the CPU; in a run with a GPU, Laststep would convert pixels to floats
there.

They take turns. The first epoch of each turn, which starts the workers, does not count. Throughput is images per second
of CPU time, of the rank and its workers together, i.e. per core: other processes on the machine disturb that less than
wall-clock time. A ratio compares Laststep with another within one turn. If the median ratio to the reference is below
the limit by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from torch.distributed import HashStore
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST, ImageFolder
from torchvision.transforms import (
    Compose,
    ConvertImageDtype,
    Normalize,
    PILToTensor,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
    v2,
)

from benchmarks._measure import Check, conclude, spread
from laststep.config.config import Config
from laststep.data.catalog import DATASETS, MNIST_5K
from laststep.data.datasets import AREA, ASPECT
from laststep.data.loader import LoaderFactory, TrainBatchKeys
from laststep.data.order import Order
from laststep.ranks.group import Group
from laststep.ranks.launchers import detect_world
from laststep.tasks.classification import Classification

LIMIT = 1.3  # Laststep's throughput to the reference's
OURS, REFERENCE = "laststep", "reference"
OPTIONAL = {"torchcodec": "torchcodec", "dali": "nvidia-dali-cuda120"}  # the package of each
QUALITY = 88


class Workload(NamedTuple):
    """A set of images and how a trial loads them."""

    width: int  # of a 4:3 photo, in pixels; 0: digits
    images: int
    epochs: int
    batch_size: int
    workers: int
    cache: bool = False  # data.args.cache


WORKLOADS = {
    "photos of 500x375, 0 workers": Workload(500, 300, 1, 32, 0),
    "photos of 500x375, 1 worker": Workload(500, 300, 1, 32, 1),
    "photos of 500x375, 2 workers": Workload(500, 300, 1, 32, 2),
    "photos of 500x375, decoded once, 0 workers": Workload(500, 300, 1, 32, 0, cache=True),
    "photos of 2000x1500, 0 workers": Workload(2000, 30, 1, 15, 0),
    "digits of mnist-5k, 0 workers": Workload(0, 4000, 2, 64, 0),
    "digits of mnist-5k, 1 worker": Workload(0, 4000, 2, 64, 1),
}


# An iterable of batches, and the function that converts a batch to floats.
Contender = tuple[Iterable[Any], Callable[[Any], Any]]


class Trial(NamedTuple):
    """Images per second of CPU time and of wall-clock time."""

    per_core: float
    by_clock: float


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a ratio is below the limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.loading", description="The throughput of the input pipeline.")
    parser.add_argument("--turns", type=int, default=2, help="turns of both contenders (default: 2)")
    turns = parser.parse_args(words).turns
    if turns < 2:
        parser.error("--turns must be at least 2")

    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    figures, checks = [], []
    print(f"{'images/s/core':>15} {'10-90 %':>17} {'wall clock':>13} {'ratio':>7} {'10-90 %':>11}  ({turns} turns)")
    with tempfile.TemporaryDirectory() as folder:
        for name, workload in WORKLOADS.items():
            root = photos(Path(folder), workload) if workload.width else Path(folder)
            contenders = contenders_for(workload)
            taken = [
                {name: trial(of(workload, root), workload.epochs) for name, of in contenders.items()}
                for _ in range(turns)
            ]
            for contender in contenders:
                per_core, by_clock = (spread(values, 1) for values in zip(*(turn[contender] for turn in taken)))
                figure = {"workload": name, "contender": contender, "per_core": per_core, "by_clock": by_clock}
                beside = ""
                if contender != OURS:
                    ratios = [turn[OURS].per_core / turn[contender].per_core for turn in taken]
                    ratio = figure["ratio"] = spread(ratios)  # Laststep's throughput to this one's
                    what, counts = f"images/s/core, / {contender}, {name}", contender == REFERENCE
                    checks.append(Check(what, LIMIT if counts else 1.0, ratios, at_least=True, counts=counts))
                    beside = f"{ratio['median']:>7.2f} {ratio['p10']:>4.1f} - {ratio['p90']:>4.1f}"
                figures.append(figure)
                print(
                    f"{per_core['median']:>15.0f} {per_core['p10']:>7.0f} - {per_core['p90']:>7.0f} "
                    f"{by_clock['median']:>13.0f} {beside:>19}  {contender}, {name}",
                    flush=True,
                )
    packages = ("torchvision", "pillow", *filter(_installed, OPTIONAL.values()))
    versions = {package: version(package) for package in packages}
    return conclude("loading", {"load_before": load, **versions, "turns": turns, "figures": figures}, checks)


def contenders_for(workload: Workload) -> dict[str, Callable[[Workload, Path], Contender]]:
    """What takes turns with Laststep."""
    contenders: dict[str, Callable[[Workload, Path], Contender]] = {OURS: ours, REFERENCE: reference}
    if workload.width and not workload.workers and not workload.cache:
        more = {"torchcodec": torchcodec, "dali": dali}
        contenders |= {name: of for name, of in more.items() if _installed(OPTIONAL[name])}
    return contenders


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def trial(contender: Contender, epochs: int) -> Trial:
    """Load all images once to warm up, then measure `epochs` passes."""
    loader, finish = contender
    images = 0
    for _ in map(finish, loader):
        pass
    cpu, began = cpu_s(), time.perf_counter()
    for _ in range(epochs):
        for batch, _ in map(finish, loader):
            assert batch.dtype == torch.float32
            images += len(batch)
    return Trial(images / (cpu_s() - cpu), images / (time.perf_counter() - began))


def cpu_s() -> float:
    """Seconds of CPU time of this process and its workers."""
    stats = [Path(f"/proc/{worker.pid}/stat").read_text() for worker in multiprocessing.active_children()]
    ticks = sum(int(ticks) for stat in stats for ticks in stat.rpartition(")")[2].split()[11:13])  # user and system
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def ours(workload: Workload, root: Path) -> Contender:
    """The images as Laststep's training loop loads them on a single rank."""
    words = [f"data.root={root}", "data.args.augment=true", "data.name=imagefolder"] if workload.width else []
    words += ["data.args.cache=true"] if workload.cache else []
    task = Classification(Config.load(None, words))
    train, _ = task.datasets()
    if workload.cache:
        train.decoded.open_shared(Group(detect_world(), HashStore(), torch.device("cpu")), "train")  # type: ignore[attr-defined]
    order = Order(workload.images, workload.batch_size, seed=0)
    keys = TrainBatchKeys(order, range(order.steps_per_epoch), shares=[0], total=1, micro_batches=1)
    loading = LoaderFactory(None, workload.workers, torch.device("cpu"))
    return loading.loader(train, 0, keys), task.on_device


def reference(workload: Workload, root: Path) -> Contender:
    """The images as the examples of torchvision and PyTorch load them."""
    dataset: Any
    if workload.width:
        info = DATASETS["imagefolder"]
        crop = [RandomResizedCrop(224), RandomHorizontalFlip(), PILToTensor(), ConvertImageDtype(torch.float)]
        dataset = ImageFolder(str(root / "train"), Compose([*crop, Normalize(info.mean, info.std)]))
    else:
        dataset = MNIST(str(MNIST_5K), transform=Compose([ToTensor(), Normalize((0.1307,), (0.3081,))]))
    workers = workload.workers
    loader = DataLoader(dataset, workload.batch_size, True, num_workers=workers, persistent_workers=workers > 0)
    return loader, lambda batch: batch


def torchcodec(workload: Workload, root: Path) -> Contender:
    """The reference with TorchCodec's decoder and transforms on tensors."""
    from torchcodec.decoders import decode_image

    info = DATASETS["imagefolder"]
    crop = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    transform = v2.Compose([*crop, v2.Normalize(info.mean, info.std)])
    dataset = ImageFolder(str(root / "train"), transform, loader=lambda path: decode_image(path, mode="RGB"))
    return DataLoader(dataset, workload.batch_size, True), lambda batch: batch


def dali(workload: Workload, root: Path) -> Contender:
    """The same samples, drawn by DALI."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    info = DATASETS["imagefolder"]

    def samples() -> tuple[Any, Any]:
        files, labels = fn.readers.file(file_root=str(root / "train"), random_shuffle=True, name="files")
        crop = fn.decoders.image_random_crop(files, random_area=AREA, random_aspect_ratio=ASPECT)
        pixels = fn.resize(crop, resize_x=224, resize_y=224)
        scale = {"mean": [255 * mean for mean in info.mean], "std": [255 * std for std in info.std]}
        return fn.crop_mirror_normalize(pixels, mirror=fn.random.coin_flip(), dtype=types.FLOAT, **scale), labels

    pipeline = pipeline_def(samples, batch_size=workload.batch_size, num_threads=1, device_id=None)()
    epoch = {"reader_name": "files", "auto_reset": True, "last_batch_policy": LastBatchPolicy.PARTIAL}
    return DALIGenericIterator(pipeline, ["pixels", "labels"], **epoch), lambda batch: (
        batch[0]["pixels"],
        batch[0]["labels"],
    )


def photos(folder: Path, workload: Workload) -> Path:
    """Create a folder of JPEGs, with train and val subfolders, unless it exists; returns it."""
    root = folder / str(workload.width)
    if not root.exists():
        draw = numpy.random.default_rng(0)
        for part, count in {"train": workload.images, "val": 1}.items():
            (root / part / "photos").mkdir(parents=True)
            for number in range(count):
                path = root / part / "photos" / f"{number:04}.jpg"
                photo(draw, workload.width, workload.width * 3 // 4).save(path, quality=QUALITY)
        size = sum(path.stat().st_size for path in (root / "train" / "photos").iterdir()) / workload.images
        print(f"# {workload.images} photos, {workload.width} pixels wide, {size / 1000:.0f} kB each")
    return root


def photo(draw: numpy.random.Generator, width: int, height: int) -> Image.Image:
    """Clouds: noise at every scale, fainter at finer scales as in photos, and mostly shared by the three channels."""
    planes = numpy.zeros((4, height, width), dtype=numpy.float32)  # one shared by the channels, and one per channel
    cells, strength = 4, 40.0
    while cells < width:
        for plane, share in zip(planes, (1.0, 0.4, 0.4, 0.4)):
            noise = draw.normal(0, share * strength, (cells * height // width, cells)).astype(numpy.float32)
            plane += numpy.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
        cells, strength = 2 * cells, 0.75 * strength
    pixels = (128 + planes[0] + planes[1:]).clip(0, 255).astype(numpy.uint8)
    return Image.fromarray(pixels.transpose(1, 2, 0).copy())


if __name__ == "__main__":
    sys.exit(main())
