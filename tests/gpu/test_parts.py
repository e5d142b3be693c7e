"""The parts that use the GPU, each alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

from laststep.checkpoint.memory import reusable_buffer
from laststep.checkpoint.pack import load
from laststep.checkpoint.restore import NewestCheckpoint
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.config.config import Config
from laststep.data.datasets import ImageFiles, decode_batch
from laststep.data.loader import LoaderFactory
from laststep.data.pixels import Augmentation, Images, normalized
from laststep.doctor.greeting import measure
from laststep.loops.learner import Learner
from laststep.ranks.device import open_queue, set_up_device
from laststep.ranks.group import Group
from laststep.ranks.world import World
from tests.gpu.devices import DEVICES, EXACT, needs_gpu, place, skip_without, skip_without_nvjpeg
from tests.support.images import IMAGES, LABELS, make_folder, resnet
from tests.support.images import Images as Classified
from tests.support.project import PROJECT
from tests.support.records import a_world


def learner(device: str, world: World) -> Learner:
    """A learner that trains a ResNet-18 on that device."""
    words = ["optim.name=adamw", "optim.lr=0.001", "optim.clip_norm=1", EXACT]
    config = Config.load(None, [f"device={device}", *words])
    here = set_up_device(config, a_world())
    return Learner(config, Classified(config, resnet), Group(world, dist.HashStore(), here), 10)


def train(learning: Learner, samples: int) -> list[float]:
    """The losses of a few steps, each on all images, which are part of a global batch of this many `samples`."""
    batch = (IMAGES.to(learning.device), LABELS.to(learning.device))
    learning.warm_up(batch)
    losses = []
    for step in range(4):
        learning.learn(step, [batch], [len(IMAGES)], samples)
        losses.append(learning.update()["loss"].item())
    return losses


@pytest.mark.parametrize("device", DEVICES)
def test_over_the_collectives(device: str) -> None:
    """NCCL (gloo on CPUs) reduces gradients, losses and buffers to the values that a single rank has: one of two ranks,
    with the other left out of the collectives, has half the samples and therefore the same mean."""
    expected = train(learner(device, a_world()), len(IMAGES))
    alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
    try:
        losses = train(learner(device, a_world(0, 2)), 2 * len(IMAGES))
    finally:
        dist.destroy_process_group()
    assert losses == expected and losses[-1] < losses[0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_is_of_its_moment(tmp_path: Path, device: str) -> None:
    """The copy is complete before training continues and overwrites the state that is being saved, however large."""
    weight = torch.arange(20_000_000, dtype=torch.float32, device=device)
    expected = weight.to("cpu", copy=True)
    store = CheckpointStore(tmp_path)
    saver = CheckpointWriter(store, dist.HashStore(), 0, 1, place(device))
    for step in (1, 2):
        saver.start(CheckpointInfo(step, 1, step, {}), {"weight": weight}, lambda: None, 2, 0)
        weight.zero_()
        assert saver.wait(60) and saver.error is None
    saver.close()
    assert torch.equal(load(store.path(1), store.verify(1))["weight"], expected)
    assert not load(store.path(2), store.verify(2))["weight"].any()


@needs_gpu
def test_scalars_are_read_while_the_device_is_busy() -> None:
    """A rescue reads losses and gradient scales while a collective hangs. It must not ask the driver for memory then,
    even if torch's caches have been emptied, as they are whenever a CUDA graph is recorded."""
    device = torch.device("cuda", 0)
    values = [0.5, 0.25, 7.0, 1.0]
    kinds = [torch.float32, torch.float64, torch.int64, torch.bfloat16]
    scalars = [torch.tensor(value, dtype=kind, device=device) for value, kind in zip(values, kinds)]
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(scalars[0])
    queue = open_queue(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
    before = taken()
    busy = torch.cuda.Event()
    torch.cuda._sleep(8_000_000_000)  # some 4 s
    busy.record()
    with queue.beside():
        assert [float(scalar) for scalar in scalars] == values
        assert scaler.state_dict()["scale"] == 4.0
        torch.empty(1 << 20, dtype=torch.uint8, device=device)  # as the hashes of a save
    assert not busy.query(), "it has waited for the device"
    assert taken() == before, "it has asked the driver for memory"
    torch.cuda.synchronize()


def taken() -> list[int]:
    """How often torch has asked the driver for memory of the device and of the host."""
    return [torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]]


def pinned_bytes() -> dict[str, int]:
    """What torch's allocator of pinned memory has. The names differ between versions of torch."""
    return {name: count for name, count in torch.cuda.host_memory_stats().items() if name.endswith("bytes.current")}


@needs_gpu
def test_the_buffer_of_a_save_is_exact_and_pinned() -> None:
    """torch's own pinned memory would be twice as large, and a copy into pageable memory would stop the training."""
    device = place("cuda")
    rows = torch.arange(3 * (1 << 20) + 5, dtype=torch.int64, device=device).view(torch.uint8)
    before = pinned_bytes()
    buffer = reusable_buffer(rows.numel(), device)
    assert buffer.is_pinned() and buffer.numel() == rows.numel()
    assert before and pinned_bytes() == before, "not from torch's allocator"
    buffer.copy_(rows, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer, rows.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_loaded_straight_into_the_device(tmp_path: Path, device: str) -> None:
    """Into the tensors that are there, on whatever device each is; new ones are made on this rank's."""
    here = place(device)
    weight, step = torch.randn(20_000_003, device=here), torch.tensor(5.0)
    state = {"position": {}, "model": {"weight": weight}, "optimizer": {"step": step, "average": weight * 2}}
    store = CheckpointStore(tmp_path)
    saver = CheckpointWriter(store, dist.HashStore(), 0, 1, here)
    saver.start(CheckpointInfo(1, 1, 1, {}), state, lambda: None, 2, 0)
    assert saver.wait(60) and saver.error is None
    saver.close()
    group = Group(a_world(), dist.HashStore(), here, "nccl" if device == "cuda" else "gloo")
    checkpoint = NewestCheckpoint(store, group, store.candidates(print), print, lambda count: None).finish()
    assert checkpoint is not None
    live = torch.zeros_like(weight)
    loaded = checkpoint.load({"model": {"weight": live}, "optimizer": {"step": torch.tensor(0.0)}}, lambda: None)
    assert loaded["model"]["weight"].data_ptr() == live.data_ptr() and torch.equal(live, weight)
    assert loaded["optimizer"]["step"].item() == 5 and loaded["optimizer"]["step"].device.type == "cpu"
    assert loaded["optimizer"]["average"].device.type == device
    assert torch.equal(loaded["optimizer"]["average"], weight * 2)


@pytest.mark.parametrize("workers", [None, 0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_batches_arrive_whole(device: str, workers: int | None) -> None:
    """Batches from memory (None) or from workers are copied to a device that is far behind. It must read each batch as
    it is, not the contents of the memory before the copy, nor the batch after it."""
    rows = torch.randn(64, 1000, 1000)
    dataset = TensorDataset(rows, torch.arange(64))
    keys = [(0, range(first, first + 8)) for first in range(0, 64, 8)]
    collate = None if workers is None else default_collate
    loader = LoaderFactory(collate, workers or 0, place(device)).loader(dataset, 0, keys)
    busy, read = torch.full((2000, 2000), 1 / 2000, device=device), []
    for batch in loader:
        for _ in range(50 if device == "cuda" else 1):
            busy = busy @ busy
        read.append(batch[0] + busy[0, 0])
    loader.close()
    torch.testing.assert_close(torch.cat(read).cpu(), rows + 1 / 2000)


@pytest.mark.parametrize("device", DEVICES)
def test_images_in_memory(device: str) -> None:
    """Every device augments the same image in the same way, with the same result except for the last bits."""
    pixels = torch.randint(0, 256, (40, 16, 16, 3), dtype=torch.uint8)
    images = Images(pixels, torch.arange(40), 16, Augmentation(4, mirror=True))
    for key in ((0, [3, 1, 2]), (5, range(40))):
        here, there = (
            next(iter(LoaderFactory(None, 0, place(name)).loader(images, 0, [key]))) for name in ("cpu", device)
        )
        assert torch.equal(here[0], there[0].cpu()) and torch.equal(here[1], there[1].cpu())
        floats = [normalized(batch[0], (0.5,) * 3, (0.2,) * 3, 3, torch.channels_last) for batch in (here, there)]
        torch.testing.assert_close(floats[0], floats[1].cpu())


@needs_gpu
def test_the_warm_up_copies_no_data_set() -> None:
    """Training copies it to the GPU. A second copy would be there just when the memory is fullest."""
    dataset = TensorDataset(torch.zeros(1 << 20, 64))  # 256 MiB
    loading = LoaderFactory(collate=None, workers=0, device=torch.device("cuda", 0))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (batch,) = loading.warm_up_batch(dataset, 0, 16)
    assert batch.shape == (16, 64) and batch.is_cuda
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@needs_gpu
@pytest.mark.parametrize(("precision", "digits"), [("fp32", 5), ("tf32", 2)])
def test_fp32_rounds_nothing(precision: str, digits: int) -> None:
    """Products and convolutions: torch's own default rounds the inputs of convolutions to TF32."""
    skip_without([f"train.precision={precision}"])
    device = set_up_device(Config.load(None, ["device=cuda", f"train.precision={precision}"]), a_world())
    x, weight = (torch.randn(size, device=device) for size in ((4, 64, 16, 16), (64, 64, 3, 3)))
    a, b = (torch.randn(512, 512, device=device) for _ in range(2))
    for single, double in (
        (functional.conv2d(x, weight), functional.conv2d(x.double(), weight.double())),
        (a @ b, a.double() @ b.double()),
    ):
        error = float((single - double).abs().max() / double.abs().max())
        assert error < 10**-digits
        assert precision == "fp32" or error > 1e-5, "TF32 is not in use"


@pytest.mark.parametrize("device", DEVICES)
def test_jpegs_decoded_on_the_device(device: str, tmp_path: Path) -> None:
    """The pixels do not depend on the rest of the batch; otherwise a resumed run whose batches differ would learn from
    other pixels. And they are those that a worker would produce, except for rounding differences between decoders."""
    if device == "cuda":
        skip_without_nvjpeg()
    root = make_folder(tmp_path, train=12, val=1)
    images = ImageFiles(str(root), "train", 24, augment=False, decode_on_device=True)
    batch: list[Any] = [images[index][0] for index in range(12)]
    here = place(device)
    together = decode_batch(here, batch, 24).cpu()
    alone = torch.cat([decode_batch(here, [image], 24).cpu() for image in batch])
    assert torch.equal(together, alone) and torch.equal(together, decode_batch(here, batch, 24).cpu())
    whole: list[Any] = [ImageFiles(str(root), "train", 24, augment=False)[index][0] for index in range(12)]
    by_workers = torch.stack(whole)
    assert (together.float() - by_workers.float()).abs().mean() < 2


@pytest.mark.parametrize("device", DEVICES)
def test_hello(device: str) -> None:
    """The check that `doctor --nodes` runs in each rank."""
    one = set_up_device(Config.load(None, [f"device={device}"]), a_world())
    assert one.type == device
    greeting = measure(Group(a_world(), dist.HashStore(), one))
    assert greeting.total == 1 and greeting.work_s > 0


@needs_gpu
def test_doctor(tmp_path: Path) -> None:
    """doctor names each GPU, and finds that torch can use every GPU that the driver reports."""
    command = [sys.executable, str(PROJECT / "launch.py"), "doctor", f"launch.root={tmp_path}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    for index in range(torch.cuda.device_count()):
        assert f"GPU {index}" in said and torch.cuda.get_device_name(index) in said
    assert re.search("built for +CUDA", said) and "but torch can use" not in said, said
