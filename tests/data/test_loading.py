"""Loading: a sample does not depend on the process that loads it, nor on the rest of its batch.

If a sample depended on the number of workers or ranks, on the first step of an attempt or on the rest of its batch, a
resumed run would learn from different images than the undisturbed one, without any sign of it.
"""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import signal
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torchvision.transforms.v2 import functional as transforms

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data import datasets, loader
from laststep.data import loader as loader_module
from laststep.data.datasets import ImageFiles, read_image
from laststep.data.loader import VALIDATION, LoaderFactory, TrainBatchKeys
from laststep.data.order import Order, seed_generators
from laststep.data.pixels import Augmentation, Images, normalized
from laststep.ranks.group import Group
from laststep.ranks.process import set_up_worker
from laststep.tasks.classification import Classification
from tests.support.images import make_folder, photo
from tests.support.records import a_world

CPU = torch.device("cpu")
KINDS = (
    "mnist-5k",
    "mnist-5k resized",
    "cifar10",
    "fake",
    "imagefolder",
    "imagefolder cached",
    "imagefolder on-device",
)
BATCH, STEPS = 12, 6  # of 30 samples: two epochs of two full batches and a short one each


def test_fake_images_are_those_of_torchvision() -> None:
    """They have been ever since, so runs with them keep their bits. The generators stay as they are."""
    theirs = torchvision.datasets.FakeData(20, (3, 9, 9), 7, transforms.pil_to_tensor, random_offset=20)
    ours = datasets.FakeImages(20, 9, 7, 20, None)
    before = torch.get_rng_state()
    for number in range(20):
        (image, label), (pixels, target) = theirs[number], ours[number]
        assert torch.equal(image.permute(1, 2, 0), pixels) and label == target
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(IndexError):
        ours[20]


class FewColours:
    """Replaces torchvision's CIFAR10, which downloads 160 MB: images in the same arrays and lists."""

    classes = ("cat", "dog", "frog")

    def __init__(self, root: str, train: bool) -> None:
        self.data = numpy.random.default_rng(train).integers(0, 256, (40, 32, 32, 3), dtype=numpy.uint8)
        self.targets = [number % 3 for number in range(40)]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("photos"), train=30, val=6)


@pytest.fixture
def task(request: pytest.FixtureRequest, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Classification:
    """A task that augments images of the kind named by the test."""
    monkeypatch.setitem(datasets._IN_MEMORY, "cifar10", FewColours)
    name, *more = request.param.split()
    words = [f"data.name={name}", f"data.root={photos}", "data.args.augment=true"]
    words += ["data.args.image_size=20"] if "resized" in more else []
    words += ["data.args.cache=true"] if "cached" in more else []
    words += ["data.args.decode_on_device=true"] if "on-device" in more else []
    words += ["data.args.image_size=24"] if name == "imagefolder" else []
    words += ["data.args.samples=30"] if name == "fake" else []
    return Classification(Config.load(None, words))


class First(Dataset[Any]):
    """30 samples of another data set, in a class that the loader does not know."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def few(dataset: Any) -> Dataset[Any]:
    """30 samples of a data set in memory, in memory too; any other data set as it is."""
    if isinstance(dataset, Images):
        pixels, labels = (tensor[:30] for tensor in dataset.tensors)
        return Images(pixels, labels, dataset.size, dataset.augmentation)
    return dataset


def loading(workers: int = 0, **more: Any) -> LoaderFactory:
    return LoaderFactory(**{"collate": None, "workers": workers, "device": CPU, **more})


def samples(task: Classification, dataset: Any, rank: int, size: int, **how: Any) -> dict[tuple[int, int], Tensor]:
    """The images that reach the model in a rank's steps, by (epoch, index)."""
    begin, micro_batches = how.pop("begin", 0), how.pop("micro_batches", 1)
    keys = list(TrainBatchKeys(Order(30, BATCH, 3), range(begin, STEPS), [rank], size, micro_batches))
    loader = loading(**how).loader(dataset, 3, keys)
    found = {}
    try:
        for (epoch, indices), batch in zip(keys, loader):
            images, labels = task.on_device(batch)
            assert images.dtype == torch.float32 and labels.dtype == torch.int64
            found.update({(epoch, int(index)): image for index, image in zip(indices, images)})
    finally:
        loader.close()  # Python's exit would wait for its workers without end
    return found


@pytest.mark.parametrize("task", KINDS, indirect=True)
def test_samples_are_the_same_whoever_loads_them(task: Classification) -> None:
    """Bit for bit, with other numbers of workers and ranks, smaller micro-batches and another first step."""
    train = few(task.datasets()[0])
    alone = samples(task, train, 0, 1)
    assert len(alone) == 60
    for how in ({"workers": 2}, {"micro_batches": 3}, {"begin": 4, "workers": 1}, {"begin": 2}):
        found = samples(task, train, 0, 1, **how)
        assert found and all(torch.equal(image, alone[key]) for key, image in found.items()), how
    ranks = [samples(task, train, rank, 3, begin=1, workers=rank) for rank in range(3)]
    together = {key: image for found in ranks for key, image in found.items()}
    assert len(together) == 60 - BATCH
    assert all(torch.equal(image, alone[key]) for key, image in together.items())


@pytest.mark.parametrize("task", KINDS, indirect=True)
def test_augmentation_differs_by_epoch_and_spares_validation(task: Classification) -> None:
    """Augmentation that repeats in each epoch augments nothing, and in validation it would change the measure."""
    train, val = task.datasets()
    found = samples(task, few(train), 0, 1)
    same = [torch.equal(found[0, index], found[1, index]) for index in range(30)]
    assert sum(same) < 5
    first, again = (
        task.on_device(next(iter(loading(workers=n).loader(val, seed, [(VALIDATION, range(4))]))))
        for n, seed in ((0, 1), (1, 2))
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0], task.on_device(default_collate([val[index] for index in range(4)]))[0])


@pytest.mark.parametrize("mirror", [True, False])
def test_augmentation_shifts_and_mirrors(mirror: bool) -> None:
    """Each image is its original shifted by up to 2 pixels, the gap black, perhaps mirrored; every shift occurs."""
    pixels = torch.randint(1, 256, (400, 6, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augmentation = Augmentation(2, mirror)
    draws = augmentation.draw(400, torch.Generator().manual_seed(0))
    seen = set()
    for original, augmented, (down, right, mirrored) in zip(pixels, augmentation(pixels, draws), draws.tolist()):
        padded = torch.zeros(10, 11, 3, dtype=torch.uint8)
        padded[2:8, 2:9] = original
        expected = padded[down : down + 6, right : right + 7]
        assert torch.equal(augmented, expected.flip(1) if mirrored else expected)
        seen.add((down, right, mirrored))
    assert len(seen) == 5 * 5 * (1 + mirror)


def test_augmentations_are_frozen() -> None:
    """A newer version of Laststep must draw the same numbers when it resumes a run: these may never change."""
    images = Images(torch.zeros(3, 8, 8, 1, dtype=torch.uint8), torch.arange(3), 8, Augmentation(4, True))
    draws = images.draws(seed=0, epoch=1, device=CPU)
    assert draws is not None and draws.tolist() == [[3, 3, 1], [2, 8, 0], [7, 2, 1]]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalized(layout: torch.memory_format) -> None:
    """The same numbers as torchvision's, in the requested layout. Grey images fit a model with three channels."""
    colour = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    images = normalized(colour, mean, std, 3, layout)
    scaled = transforms.to_dtype(colour.permute(0, 3, 1, 2), torch.float32, scale=True)
    torch.testing.assert_close(images, transforms.normalize(scaled, list(mean), list(std)))
    assert images.is_contiguous(memory_format=layout)
    grey = normalized(colour[..., :1], (0.4,), (0.1,), 3, layout)
    assert grey.shape == (2, 3, 5, 4) and grey.is_contiguous(memory_format=layout)
    assert torch.equal(grey[:, 0], grey[:, 2]) and torch.equal(grey[:, 0], images[:, 0])


# --- in memory


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(30, 2, 3), torch.arange(30), torch.randn(30))


def test_memory_gives_the_batches_of_samples() -> None:
    """Batches indexed as a whole equal those that torch collates from single samples, types included."""
    keys = list(TrainBatchKeys(Order(30, 7, 3), range(9), [0], 1, 1))
    tensors = rows()
    slowly = list(loading(collate=default_collate).loader(tensors, 3, keys))
    at_once = list(loading().loader(tensors, 3, keys))
    assert all(type(a) is type(b) for a, b in zip(slowly, at_once))
    torch.testing.assert_close(at_once, slowly, rtol=0, atol=0)


@pytest.mark.parametrize("size", [16, 6], ids=["aligned", "not aligned"])
def test_batches_fetched_together_are_those_fetched_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever an attempt starts, over the ends of epochs, which have a short batch; each lies in memory where it
    would if it were fetched alone, since a product may round otherwise at another address."""
    monkeypatch.setattr(loader, "BLOCK", 3)
    tensors, order = TensorDataset(torch.randn(70, 4), torch.arange(70)), Order(70, size, 3)
    for first in range(6):
        keys = list(TrainBatchKeys(order, range(first, 2 * order.steps_per_epoch), [0], 1, 1))
        batches = list(loading().loader(tensors, 3, keys))
        assert [batch[1].tolist() for batch in batches] == [list(indices) for _, indices in keys]
        assert all(torch.equal(batch[0], tensors.tensors[0][batch[1]]) for batch in batches)
        assert all(tensor.data_ptr() % 64 == 0 for batch in batches for tensor in batch)
        together = len({batch[0].untyped_storage().data_ptr() for batch in batches})
        assert (together < len(batches)) == (size == 16), "the test must see both ways"


def test_a_batch_can_be_changed_in_place() -> None:
    """Autograd refuses a backward pass through a tensor that has changed: another batch has not."""
    batches = iter(loading().loader(TensorDataset(torch.randn(64, 16)), 3, [(0, range(16)), (0, range(16, 32))]))
    (one,), (other,) = next(batches), next(batches)
    weight = torch.ones(16, requires_grad=True)
    loss, before = (one * weight).sum(), one.clone()
    other.mul_(2)
    loss.backward()
    assert torch.equal(one, before)


def test_the_warm_up_needs_no_copy_of_the_data_on_the_device() -> None:
    """The copy that training makes would be the second one, just when the GPU's memory is fullest."""
    elsewhere = loading(device=torch.device("meta"))
    assert next(iter(elsewhere.loader(rows(), 3, [(0, [1])])))[0].is_meta, "training's batches are indexed there"
    warm_up = elsewhere.warm_up_batch(rows(), 3, 40)
    assert [len(tensor) for tensor in warm_up] == [40] * 3 and not any(tensor.is_meta for tensor in warm_up)


def test_samples_get_pythons_integers() -> None:
    """A data set may look its samples up by the index, in a JSON file for example."""

    class Lookup(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            assert type(index) is int
            return super().__getitem__(index)

    keys = TrainBatchKeys(Order(30, 7, 3), range(5), [0], 1, 1)
    assert sum(len(batch[1]) for batch in loading().loader(Lookup(*rows().tensors), 3, keys)) == 30


def test_memory_needs_no_workers() -> None:
    """Workers that pass on what the rank already holds would only cost time and memory."""
    loader = loading(workers=2).loader(rows(), 3, [(0, [1, 2]), (0, [3])])
    assert [batch[1].tolist() for batch in loader] == [[1, 2], [3]]
    assert not hasattr(loader.batches, "_iterator")


def test_a_stop_does_not_kill_a_worker_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals every process of a job at once. Until the worker ignores that, torch would let it die, and an
    orderly stop would become a failed attempt."""

    def killed_at_once(_: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        set_up_worker()

    monkeypatch.setattr(loader_module, "set_up_worker", killed_at_once)
    loader = loading(workers=1, collate=len).loader(rows(), 3, [(0, [1, 2]), (0, [3])])
    assert list(loader) == [2, 1]
    loader.close()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the rank itself receives it again"


def test_a_collate_of_your_own_is_called() -> None:
    """It gets the samples even if the data could be indexed as a whole: it may pad them, or mix images."""

    def collate(samples: Sequence[Any]) -> int:
        return sum(int(label) for _, label, _ in samples)

    assert list(loading(collate=collate).loader(rows(), 3, [(0, [1, 2]), (0, [3])])) == [3, 3]


class Doubled(TensorDataset):
    """A user's data set whose samples are not the rows of its tensors."""

    def __getitem__(self, index: int) -> Any:
        return 2 * int(self.tensors[1][index])


def test_a_data_set_of_your_own_is_asked() -> None:
    """A subclass of TensorDataset may define its own samples."""
    batches = loading().loader(Doubled(*rows().tensors), 3, [(0, [1, 2])])
    assert [batch.tolist() for batch in batches] == [[2, 4]]


@pytest.mark.parametrize("task", ["mnist-5k", "cifar10", "imagefolder on-device"], indirect=True)
def test_a_part_of_a_data_set(task: Classification) -> None:
    """A ready-made data set can be wrapped in another, as for cross-validation."""
    train, _ = task.datasets()
    found = samples(task, Subset(train, range(30)), 0, 1)
    again = samples(task, Subset(train, range(30)), 0, 1, workers=1, begin=3)
    assert all(torch.equal(image, found[key]) for key, image in again.items())
    assert not torch.equal(found[0, 0], found[1, 0])


# --- image files


def encoded(image: Image.Image, kind: str = "JPEG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def centre(content: bytes, size: int = 32) -> Tensor:
    return read_image(content, size, augment=False).int()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().float().mean())


def test_reads_every_kind_of_image() -> None:
    """Grey images, CMYK for print, transparent PNGs, palettes: each becomes an RGB image of the right size."""
    image = photo(1, 100, 80)
    expected = centre(encoded(image, "PNG"))
    kinds = {
        "progressive": encoded(image, quality=95, progressive=True),
        "CMYK": encoded(image.convert("CMYK"), quality=95),
        "RGBA": encoded(image.convert("RGBA"), "PNG"),
        "palette": encoded(image.quantize(256), "PNG"),
        "webp": encoded(image, "WEBP", quality=95),
        "bmp": encoded(image, "BMP"),
        "tiff": encoded(image, "TIFF"),
    }
    for name, content in kinds.items():
        pixels = read_image(content, 32, augment=False)
        assert pixels.shape == (32, 32, 3) and pixels.dtype == torch.uint8
        assert difference(pixels.int(), expected) < 6, name
    grey = centre(encoded(image.convert("L"), quality=95))
    assert torch.equal(grey[..., 0], grey[..., 1])
    assert difference(grey, centre(encoded(image.convert("L").convert("RGB"), "PNG"))) < 6
    for width, height in ((1, 1), (3, 200), (200, 3)):
        assert centre(encoded(photo(1, width, height))).shape == (32, 32, 3)
        assert read_image(encoded(photo(1, width, height)), 32, augment=True).shape == (32, 32, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_cameras_images_are_upright(orientation: int, kind: str) -> None:
    """A camera held upright records that only in EXIF: such images must not lie on their side. 0 is unknown."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(photo(1, 64, 32), kind, exif=exif)  # so that its centre crop is the same however it is turned
    upright = encoded(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), "PNG")
    assert difference(centre(content), centre(upright)) < 1


def test_damaged_exif_harms_no_image() -> None:
    """Some camera or program wrote broken EXIF data: no reason to end a run of days."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(photo(1), exif=exif, dpi=(72, 72))
    damaged = content.replace(b"Exif\x00\x00MM\x00*", b"Exif\x00\x00XXXX")
    assert damaged != content
    assert torch.equal(centre(damaged), centre(encoded(photo(1))))


def test_validation_sees_the_centre() -> None:
    """As for published accuracies: the shorter side is resized to 256 pixels, then 224 are cropped."""
    content = encoded(photo(1, 500, 375), quality=95)
    image = Image.open(io.BytesIO(content))
    expected = transforms.center_crop(transforms.resize(image, [256]), [224])
    assert difference(centre(content, 224), transforms.pil_to_tensor(expected).permute(1, 2, 0).int()) < 1


@pytest.mark.parametrize("grey", [True, False])
def test_large_photos_look_the_same(grey: bool) -> None:
    """A photo much larger than its sample is decoded at a fraction of its size: the same crop, without black edges, and
    with the same look."""
    image = photo(1, 501, 403)
    image = image.convert("L") if grey else image
    for seed in range(20):
        seed_generators(seed)
        whole = read_image(encoded(image, "PNG"), 24, augment=True).int()
        seed_generators(seed)
        reduced = read_image(encoded(image, quality=95), 24, augment=True).int()
        assert difference(whole, reduced) < 7 and (whole - reduced).abs().max() < 32


def test_random_crops_are_of_many_shares() -> None:
    """From a twelfth of an image to all of it, mirrored or not: otherwise training falls short of published figures."""
    ramp = Image.fromarray(numpy.tile(numpy.arange(0, 256, dtype=numpy.uint8), (256, 1))).convert("RGB")
    content = encoded(ramp, "PNG")
    spans, mirrored = [], []
    seed_generators(0)
    for _ in range(200):
        line = read_image(content, 32, augment=True)[16, :, 0].int()
        spans.append(int((line[-1] - line[0]).abs()))
        mirrored.append(bool(line[-1] < line[0]))
    assert min(spans) < 90 and max(spans) > 220
    assert 60 < sum(mirrored) < 140


def left_encoded(root: Path, *words: str) -> Classification:
    """A task whose JPEGs are decoded on the device."""
    words = (f"data.root={root}", "data.args.image_size=24", "data.args.decode_on_device=true", *words)
    return Classification(Config.load(None, ["data.name=imagefolder", *words]))


def test_decoding_on_the_device(photos: Path) -> None:
    """The same draws and the same crop of each image as in the workers. A CMYK image, a PNG and an image on its side
    work too: one of them among a million must not end a run."""
    root = photos.parent / "mixed"
    shutil.copytree(photos, root, dirs_exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    odd = {
        "0.jpg": encoded(photo(0).convert("CMYK")),
        "2.jpg": encoded(photo(2), "PNG"),
        "4.jpg": encoded(photo(4).convert("L")),
        "6.jpg": encoded(photo(6), exif=exif, quality=95),
    }
    for name, content in odd.items():
        (root / "train" / "class0" / name).write_bytes(content)
    for augment in ("true", "false"):
        task = left_encoded(root, f"data.args.augment={augment}")
        found = samples(task, task.datasets()[0], 0, 1, workers=1)
        train = ImageFiles(str(root), "train", 24, augment == "true")
        for key, image in samples(task, train, 0, 1).items():
            assert (found[key] - image).abs().mean() < 0.05, key


@pytest.mark.parametrize("kept", [0, 300])
def test_a_damaged_file_is_named_by_the_device(kept: int, tmp_path: Path) -> None:
    """As by a worker, although the decoder gets a whole batch and does not say which image is damaged."""
    make_folder(tmp_path, train=4, val=2)
    victim = tmp_path / "train" / "class1" / "1.jpg"
    content = victim.read_bytes()
    header = content.index(b"\xff\xda")  # "start of scan": it says how long it is, and then the pixels begin
    pixels = header + 2 + int.from_bytes(content[header + 2 : header + 4], "big")
    victim.write_bytes(content[:pixels] + bytes(kept))
    task = left_encoded(tmp_path)
    batch = next(iter(loading().loader(task.datasets()[0], 3, [(0, range(4))])))
    with pytest.raises(ConfigError) as raised:
        task.on_device(batch)
    assert str(raised.value).startswith(f"data.root={tmp_path}: {victim} is not an intact image (")
    assert "\n" not in str(raised.value)


@pytest.fixture
def cached(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Classification, ImageFiles]:
    """A task with a cache of decoded images, and its images, whose files a test may delete."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = shutil.copytree(photos, tmp_path / "photos")
    words = ["data.name=imagefolder", f"data.root={root}", "data.args.image_size=24", "data.args.cache=true"]
    task = Classification(Config.load(None, [*words, "data.args.augment=true"]))
    images = task.datasets()[0]
    assert isinstance(images, ImageFiles) and images.decoded is not None
    images.decoded.open_shared(Group(a_world(), torch.distributed.HashStore(), CPU), "train")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"], (
        "the file has no name, so nothing stays behind however the ranks end"
    )
    return task, images


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_is_decoded_once(workers: int, cached: tuple[Classification, ImageFiles], photos: Path) -> None:
    """Then every worker can use it, whichever decoded it, and the image files are not read again."""
    task, images = cached
    first = samples(task, images, 0, 1, workers=workers)
    shutil.rmtree(images.root)
    again = samples(task, images, 0, 1, workers=2 - workers)
    assert first.keys() == again.keys() and len(first) == 60
    assert all(torch.equal(image, again[key]) for key, image in first.items())
    each_time = samples(task, ImageFiles(str(photos), "train", 24, augment=True, cache=True), 0, 1)
    assert all(torch.equal(image, again[key]) for key, image in each_time.items())


def test_no_room_for_decoded_images(
    cached: tuple[Classification, ImageFiles], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A share of the disk is left to others, which one warning says. If the disk is full after all, training continues:
    the images are decoded each time, into the same samples."""
    task, images = cached
    monkeypatch.setattr(datasets, "SPARE_SHARE", 1.0)
    monkeypatch.setattr(datasets, "SPARE_BYTES", 1 << 60)
    without = samples(task, images, 0, 1)
    samples(task, images, 0, 1, workers=2)
    assert capfd.readouterr().out.count("has no room for more decoded images: the rest is decoded each time") == 1
    assert images.decoded is not None and not any(map(images.decoded.get, range(30)))
    monkeypatch.undo()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        full = samples(task, images, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert 0 < sum(images.decoded.get(index) is not None for index in range(30)) < 30
    found = samples(task, images, 0, 1)
    assert all(images.decoded.get(index) for index in range(30))
    assert all(torch.equal(image, full[key]) and torch.equal(image, found[key]) for key, image in without.items())


@pytest.mark.parametrize(
    ("size_gb", "free_gb", "kept"),
    [(252, 20, True), (10_000, 100, True), (252, 3, False), (20, 3, True), (20, 1, False)],
)
def test_room_for_decoded_images(
    size_gb: int,
    free_gb: int,
    kept: bool,
    cached: tuple[Classification, ImageFiles],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large disk that is 95 % full still has room for a cache of gigabytes: only the last 4 GB are left to others,
    or a tenth of a small disk. Without the cache every image is decoded in every epoch."""
    _, images = cached
    disk = types.SimpleNamespace(f_frsize=1 << 30, f_blocks=size_gb, f_bavail=free_gb)
    monkeypatch.setattr(os, "fstatvfs", lambda file: disk)
    assert images.decoded is not None
    images.decoded.put(0, numpy.zeros((2, 2, 3), dtype=numpy.uint8), 1)
    assert (images.decoded.get(0) is not None) == kept


def test_nowhere_to_keep_decoded_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If TMPDIR is full or missing, the run is slower but does not fail."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    words = ["data.name=imagefolder", f"data.root={photos}", "data.args.image_size=24"]
    task = Classification(Config.load(None, [*words, "data.args.cache=true"]))
    images = task.datasets()[0]
    assert isinstance(images, ImageFiles) and images.decoded is not None
    images.decoded.open_shared(Group(a_world(), torch.distributed.HashStore(), CPU), "train")
    assert len(samples(task, images, 0, 1)) == 60


def test_a_worker_dies_while_it_adds_an_image(cached: tuple[Classification, ImageFiles]) -> None:
    """A half-written entry does not count: otherwise the model would silently train on other pixels too."""
    task, images = cached
    expected = samples(task, images, 0, 1)
    assert images.decoded is not None and images.decoded._file is not None
    size = datasets._ENTRY.size
    entry = os.pread(images.decoded._file, size, size * 7)
    for written in range(1, size):
        os.pwrite(images.decoded._file, entry[:written] + bytes(size - written), size * 7)
        assert images.decoded.get(7) is None or not any(entry[written:])
    found = samples(task, images, 0, 1)
    assert all(torch.equal(image, found[key]) for key, image in expected.items())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "truncated large", "text", "empty", "truncated png"])
def test_a_damaged_file_is_named(damage: str, workers: int, tmp_path: Path) -> None:
    """Nobody would find it among a million files: one line without traceback, from a worker or from the rank."""
    make_folder(tmp_path, train=4, val=2)
    content = {
        "truncated": encoded(photo(1))[:-100],
        "truncated large": encoded(photo(1, 900, 700))[:-1000],
        "text": b"<html>404</html>",
        "empty": b"",
        "truncated png": encoded(photo(1), "PNG")[:-1000],
    }[damage]
    victim = tmp_path / "train" / "class1" / "1.jpg"
    victim.write_bytes(content)
    words = ["data.name=imagefolder", f"data.root={tmp_path}", "data.args.image_size=24"]
    train, _ = Classification(Config.load(None, words)).datasets()
    loader = loading(workers=workers).loader(train, 3, [(0, range(4))])
    with pytest.raises(ConfigError) as raised:
        next(iter(loader))
    loader.close()
    said = str(raised.value)
    assert said.startswith(f"data.root={tmp_path}: {victim} is not an intact image (") and said.endswith("; replace it")
    assert "\n" not in said and "0x" not in said and "cpp" not in said


def test_a_file_that_is_gone_may_come_back(tmp_path: Path) -> None:
    """An error of the disk is no configuration error: a shared disk may recover, and then the run continues."""
    make_folder(tmp_path, train=4, val=2)
    words = ["data.name=imagefolder", f"data.root={tmp_path}", "data.args.image_size=24"]
    train, _ = Classification(Config.load(None, words)).datasets()
    (tmp_path / "train" / "class1" / "1.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"class1/1\.jpg"):
        next(iter(loading().loader(train, 3, [(0, range(4))])))


def test_draws_of_a_task_do_not_disturb_samples(photos: Path) -> None:
    """A sample's draws are its own, even if the model draws in the same process between two samples."""
    words = ["data.name=imagefolder", f"data.root={photos}", "data.args.image_size=24", "data.args.augment=true"]
    train, _ = Classification(Config.load(None, words)).datasets()
    keys = [(0, [1, 2]), (0, [3, 4])]
    calm = [batch[0] for batch in loading().loader(train, 3, keys)]
    disturbed = []
    for batch in loading().loader(train, 3, keys):
        disturbed.append(batch[0])
        random.random(), torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(calm, disturbed))
