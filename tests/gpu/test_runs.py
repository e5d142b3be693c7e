"""Runs on a GPU are as exact, as safe and as fast to save as those on CPUs, which the rest of tests/ covers.

One rank on one GPU, unless a test says otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.checkpoint.store import CheckpointStore
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.gpu.devices import (
    DEVICES,
    EXACT,
    FAULTY_ON_GPU,
    GPU_OR_STAND_IN,
    needs_gpu,
    one_gpu_each,
    share_the_gpu,
    skip_without,
    skip_without_nvjpeg,
)
from tests.support.images import make_folder
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import EVERYTHING, config, stop_and_resume, undisturbed

GRAPHS = ("train.compile=true", "train.cuda_graphs=true", "train.epochs=3")  # 7 steps each
NO_DROPOUT = "model.args.dropout=0"  # a GPU draws different random numbers than a CPU


def hashes(run: RunDir) -> dict[int, str]:
    """The fingerprint of all tensors in a checkpoint, by step."""
    store = CheckpointStore(run.checkpoints)
    manifests = [store.verify(step) for step in store.steps()]
    return {manifest.step: manifest.files[manifest.shards[0]]["sha256"] for manifest in manifests}


@needs_gpu
def test_jpegs_decoded_on_the_gpu_are_exact(root: Path) -> None:
    """Compare a resumed run with an undisturbed one."""
    skip_without_nvjpeg()
    photos = make_folder(root / "photos", train=24, val=8, classes=3)
    words = ("data.name=imagefolder", f"data.root={photos}", "data.args.image_size=16", "data.args.augment=true")
    late = (*words, "data.args.decode_on_device=true", "data.workers=1", "device=cuda", NO_DROPOUT, EXACT)
    stop_and_resume(root, "late-photos", 1, late, "SIGTERM step 4 rank 0")


@pytest.mark.parametrize("device", DEVICES)
def test_everything_is_exact(root: Path, device: str) -> None:
    """Averaging, accumulation, AdamW, warm-up, clipping, loader workers: all of their state is restored."""
    stop_and_resume(root, f"everything-{device}", 1, (*EVERYTHING, f"device={device}", EXACT), "SIGTERM step 4 rank 0")


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        "train.precision=fp32",
        "train.precision=tf32",
        "train.precision=bf16 train.channels_last=true",
        "train.precision=fp16 optim.clip_norm=0.5",
        "train.precision=bf16 train.compile=true data.args.samples=48 train.epochs=1",
        "train.activation_checkpointing=true model.name=resnet18 data.args.image_size=32 train.max_steps=6",
    ],
)
def test_each_arithmetic_is_exact(root: Path, options: str, request: pytest.FixtureRequest) -> None:
    """cuDNN, cuBLAS and compiled kernels choose the order of sums, and must choose the same in every attempt."""
    skip_without(options.split())
    name = f"exact-{request.node.callspec.indices['options']}"
    stop_and_resume(root, name, 1, (*options.split(), "device=cuda", EXACT), "SIGTERM step 4 rank 0")


@needs_gpu
def test_recomputed_dropout_is_exact(root: Path) -> None:
    """A compiled model draws it twice in each step, the second time as the first, and in each attempt the same."""
    words = ("task=tests.support.tasks.SignalledTransformer", "train.compile=true", "device=cuda", EXACT)
    skip_without(words)
    recomputed = (*words, "train.activation_checkpointing=true")
    calm = train(config(root, "recomputed-calm", 1, recomputed))
    stopped = Attempt(config(root, "recomputed", 1, recomputed), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 4 rank 0"})
    assert stopped.wait() == [143], stopped.output()
    assert fingerprint(train(config(root, "recomputed", 1, recomputed))) == fingerprint(calm)


@needs_gpu
@pytest.mark.parametrize("options", ["", "train.precision=fp16 optim.clip_norm=0.5"])
def test_cuda_graphs_are_exact(root: Path, options: str, request: pytest.FixtureRequest) -> None:
    """The short last batch of an epoch has graphs of its own, which are used from the third epoch on. A run that is
    resumed in that epoch computes this batch without them."""
    name = f"graphs-exact-{request.node.callspec.indices['options']}"
    words = (*options.split(), *GRAPHS, "device=cuda", EXACT)
    skip_without(words)
    stop_and_resume(root, name, 1, words, "SIGTERM step 18 rank 0")


@needs_gpu
@pytest.mark.parametrize("options", ["", "train.precision=bf16 optim.name=adamw", "train.ema_decay=0.9"])
def test_cuda_graphs_keep_the_bits(root: Path, options: str, request: pytest.FixtureRequest) -> None:
    """They are the kernels of the same compiled model, and torch records them: else the run would be slower than its
    configuration says."""
    number = request.node.callspec.indices["options"]
    words = (*options.split(), *GRAPHS, "device=cuda", EXACT)
    skip_without(words)
    graphs = train(config(root, f"graphs-{number}", 1, words))
    assert not any("no CUDA graph" in log.read_text() for log in graphs.logs.iterdir())
    without = train(config(root, f"no-graphs-{number}", 1, (*words, "train.cuda_graphs=false")))
    assert fingerprint(graphs) == fingerprint(without)


@needs_gpu
def test_cuda_graphs_over_nccl(root: Path) -> None:
    """DistributedDataParallel sums the gradients where the graphs have left them."""
    skip_without(GRAPHS)
    stop_and_resume(root, "graphs-nccl", 2, (*GRAPHS, "device=cuda", EXACT), "SIGTERM step 18 rank 1", one_gpu_each)


@needs_gpu
def test_over_nccl(root: Path) -> None:
    """Two ranks over NCCL."""
    stop_and_resume(root, "two", 2, (*EVERYTHING, "device=cuda", EXACT), "SIGTERM step 4 rank 1", one_gpu_each)


@pytest.mark.parametrize("device", GPU_OR_STAND_IN)
@pytest.mark.parametrize("options", ["", "model.name=resnet18 data.args.image_size=32 train.channels_last=true"])
def test_shares(root: Path, options: str, device: str) -> None:
    """Two ranks on one GPU compute one share each, one rank both: the same bits."""
    name = "resnet" if options else "plain"
    words = (*EVERYTHING, *options.split(), "train.shares=2", f"device={device}", EXACT)
    one = train(config(root, f"{name}-one", 1, words))
    before = share_the_gpu if device == "cuda" else None
    two = train(config(root, f"{name}-two", 2, (*words, "launch.backend=gloo")), before=before)
    assert fingerprint(one) == fingerprint(two)


@needs_gpu
def test_shares_over_nccl(root: Path) -> None:
    """The sum over two GPUs is that of one GPU that computes both shares."""
    words = (*EVERYTHING, "train.shares=2", "device=cuda", EXACT)
    one, two = (train(config(root, f"shares-{n}", n, words), before=one_gpu_each) for n in (1, 2))
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize(
    ("before", "after"),
    [("cpu", "cpu"), pytest.param("cpu", "cuda", marks=needs_gpu), pytest.param("cuda", "cpu", marks=needs_gpu)],
)
def test_from_device_to_device(root: Path, before: str, after: str) -> None:
    """A run that began on a GPU continues on a CPU, and the other way round: at its step, and with the state of its
    optimiser and average, since the losses are those of a run that did not change devices."""
    options = (*EVERYTHING, NO_DROPOUT, EXACT, f"device={before}")
    name = f"from-{before}-to-{after}"
    stopped = Attempt(config(root, name, 1, options), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 4 rank 0"})
    assert stopped.wait() == [143], stopped.output()
    run = train(config(root, name, 1, (*options, f"device={after}")))
    assert [record["start_step"] for record in read_lines(run.attempts)] == [0, 4]
    expected = [line["loss"] for line in undisturbed(1, options)["metrics"] if "loss" in line]
    losses = [line["loss"] for line in read_lines(run.metrics) if "loss" in line]
    assert losses[:4] == expected[:4] and losses == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_saves_beside_the_training(root: Path, device: str) -> None:
    """With a save after each step, written while the next steps change the state, each holds exactly its own step."""
    every = ("checkpoint.every_steps=1", "checkpoint.keep_last=20", "train.epochs=1", f"device={device}", EXACT)
    beside = train(config(root, f"beside-{device}", 1, (*EVERYTHING, *every)))
    waiting = train(config(root, f"waiting-{device}", 1, (*EVERYTHING, *every, "checkpoint.asynchronous=false")))
    assert list(hashes(beside)) == [1, 2, 3, 4, 5, 6, 7]
    assert hashes(beside) == hashes(waiting)


@needs_gpu
@pytest.mark.parametrize(
    "options", ["train.precision=bf16", "train.precision=fp16 train.accumulate=2 optim.clip_norm=1"]
)
def test_no_step_waits_for_the_gpu(root: Path, options: str) -> None:
    """Otherwise the GPU would idle after each step until Python has prepared the next."""
    skip_without(options.split())
    name = f"waits-{options.split()[0][-4:]}"
    more = ("task=tests.gpu.tasks.NeverWaits", "data.args.samples=48", "train.ema_decay=0.9", "optim.clip_norm=1")
    words = (*options.split(), *more, "train.digest_every=2", "device=cuda")
    run = train(config(root, name, 1, words))
    assert reasons(run) == ["finished"]


@pytest.mark.parametrize("device", DEVICES)
def test_out_of_memory(root: Path, device: str) -> None:
    """The record gives the reason, the log a setting that helps; the last complete step is kept. The run resumes."""
    run = befall(root, f"memory-{device}", "asks step 5 rank 0", (*FAULTY_ON_GPU, f"device={device}"))
    record = read_lines(run.attempts)[0]
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("failed", 4, 0)
    if device == "cuda":
        assert "CUDA out of memory" in record["error"]
        assert any("train.accumulate=2" in log.read_text() for log in run.logs.iterdir())
    else:
        assert "can't allocate memory" in record["error"]


def befall(root: Path, name: str, fault: str, options: tuple[str, ...]) -> RunDir:
    """Run an attempt in which `fault` hits a rank, and a second one, which must finish like an undisturbed run."""
    attempt = Attempt(config(root, name, 1, options), {"LASTSTEP_TEST_FAULT": fault})
    assert attempt.wait() == [1], attempt.output()
    run = train(config(root, name, 1, options))
    assert fingerprint(run) == undisturbed(1, options)
    return run
