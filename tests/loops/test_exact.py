"""A run that was stopped and resumed ends with exactly the weights and metrics of one that was not.

This is what the project exists for. A difference in the last bit means that something a step depends on was neither
saved nor a pure function of the seed, and an interrupted run would be another experiment.
"""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from laststep.records.metrics import read_lines
from tests.support.images import make_folder
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import EVERYTHING, config, stop_and_resume, undisturbed
from tests.support.tasks import note_decoding, share_nothing

STOP_AT_2 = "SIGTERM step 2 rank 1"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("SIGTERM step 1 rank 0", id="first-step"),
        pytest.param("SIGUSR2 step 4 rank 1", id="mid-epoch"),
        pytest.param("SIGTERM step 7 rank 1", id="last-step-of-an-epoch"),
        pytest.param("SIGTERM validation 3 rank 0", id="in-validation"),
        pytest.param("SIGINT step 8 rank 0,1", id="first-step-of-the-next-epoch"),
    ],
)
def test_stop_anywhere(root: Path, place: str, request: pytest.FixtureRequest) -> None:
    """A signal anywhere in an epoch, on one rank or on all, with every option on that carries state."""
    stop_and_resume(root, request.node.callspec.id, 2, tuple(EVERYTHING), place)


@pytest.mark.parametrize(
    "option",
    [
        "optim.schedule=step optim.warmup_steps=2 train.channels_last=true train.activation_checkpointing=true",
        "optim.schedule=constant optim.name=adamw optim.lr=0.001",
        "train.precision=bf16 train.max_steps=10 checkpoint.every_steps=2 checkpoint.asynchronous=false "
        "checkpoint.keep_last=1 checkpoint.keep_best=0 model.args.width=16",
        "train.precision=fp16 optim.clip_norm=0.5 model.args.width=16",
    ],
)
def test_each_option(root: Path, option: str, request: pytest.FixtureRequest) -> None:
    """Each of these options adds state: a scaler, a schedule, a memory layout. The network is small where a CPU takes
    long for its convolutions."""
    stop_and_resume(root, f"option-{abs(hash(option))}", 2, tuple(option.split()), "SIGTERM step 4 rank 1")


def test_own_optimizer_and_schedule(root: Path) -> None:
    """A task's own parameter groups and schedule, with an optimiser that keeps products of all its steps; the norm of
    the gradient is in metrics.jsonl."""
    options = ("task=tests.support.tasks.OwnOptimizer", "optim.clip_norm=.inf", "train.epochs=1")
    expected = fingerprint(train(config(root, "own-calm", 2, options)))
    assert all(line["grad_norm"] > 0 for line in expected["metrics"][:-1])
    stopped = Attempt(config(root, "own", 2, options), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 3 rank 1"})
    assert stopped.wait() == [128 + signal.SIGTERM] * 2, stopped.output()
    assert "grad norm " in stopped.output()
    assert fingerprint(train(config(root, "own", 2, options))) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled(root: Path, ranks: int) -> None:
    """A compiled graph is exact too. The ranks keep compiled code in the run's folder, so a requeue does not spend the
    minutes of the first start again. All batches have the same size here. A resume may still compile the validation,
    which the stopped attempt did not reach."""
    options = (
        "train.compile=true",
        "task=tests.support.tasks.SmallSignalled",
        "data.args.samples=48",
        "train.epochs=1",
    )
    small = config(root, f"compiled-{ranks}", ranks, options)
    stopping = Attempt(small, {"LASTSTEP_TEST_SIGNAL": f"SIGTERM step 4 rank {ranks - 1}"})
    assert stopping.wait() == [143] * ranks, stopping.output()
    run = train(small)
    compiled = [path.stat().st_mtime for path in run.compiled.rglob("*.so")]
    stopped, resumed = read_lines(run.attempts)[0]["end"], read_lines(run.metrics)[4]["time"]
    assert [time for time in compiled if time < stopped]
    assert not [time for time in compiled if stopped < time < resumed]
    (cache,) = (path for path in run.compiled.iterdir() if path.is_dir())  # a user's own cache serves as well
    whole = config(root, f"compiled-undisturbed-{ranks}", ranks, options)
    assert fingerprint(run) == fingerprint(train(whole, {"TORCHINDUCTOR_CACHE_DIR": str(cache)}))


@pytest.mark.parametrize(
    "place", ["step 1 rank 3", "step 3 rank 2", "step 7 rank 1", "validation 2 rank 0", "step 8 rank 1,2"]
)
def test_four_ranks(root: Path, place: str) -> None:
    """With three ranks or more the order of a sum depends on DDP's bucket layout, which changes after the first
    backward pass."""
    stop_and_resume(root, f"four-{place.replace(' ', '-').replace(',', '-')}", 4, tuple(EVERYTHING), f"SIGTERM {place}")


def test_four_ranks_plain(root: Path) -> None:
    """The same without accumulation, averaging and clipping: each of them could hide or cause a difference."""
    stop_and_resume(root, "four-plain", 4, (), "SIGTERM step 3 rank 2")


def test_digits_in_memory(root: Path) -> None:
    """Batches taken from memory at once draw their augmentation by other code."""
    options = ("data.name=mnist-5k", "train.max_steps=6", "train.batch_size=32", "model.args.width=16")
    stop_and_resume(root, "digits", 2, options, "SIGTERM step 3 rank 0")


def test_image_files_and_any_workers(root: Path) -> None:
    """Augmented photos. One run has two workers per rank; the other has one until its stop, and none after it."""
    photos = make_folder(root / "photos", train=24, val=8, classes=3)
    options = ("data.name=imagefolder", f"data.root={photos}", "data.args.image_size=16", "model.args.width=32")
    expected = undisturbed(2, (*options, "data.workers=2"))
    stopped = Attempt(config(root, "photos", 2, (*options, "data.workers=1")), {"LASTSTEP_TEST_SIGNAL": STOP_AT_2})
    assert stopped.wait() == [128 + signal.SIGTERM] * 2, stopped.output()
    assert fingerprint(train(config(root, "photos", 2, options))) == expected


def test_image_files_that_are_decoded_on_the_device(root: Path) -> None:
    """Workers hand over the JPEGs' bytes and the random draws of each; the rank decodes the batch."""
    photos = make_folder(root / "late", train=24, val=8, classes=3)
    options = ("data.name=imagefolder", f"data.root={photos}", "data.args.image_size=16", "model.args.width=32")
    late = (*options, "data.args.decode_on_device=true", "data.args.augment=true", "data.workers=1")
    stop_and_resume(root, "late-photos", 2, late, STOP_AT_2)


def test_image_files_that_are_decoded_once(root: Path, tmp_path: Path) -> None:
    """Once any rank or worker has decoded an image, both ranks use it in all epochs. The next attempt starts with an
    empty cache, and so does each rank when they share no disk. No bit differs."""
    photos = make_folder(root / "kept", train=24, val=8, classes=3)
    options = ("data.name=imagefolder", f"data.root={photos}", "data.args.image_size=16", "model.args.width=32")
    cached = (*options, "data.args.cache=true", "train.epochs=3")
    notes = {"LASTSTEP_TEST_NOTES": str(tmp_path / "decoded"), "TMPDIR": str(tmp_path / "node")}
    Path(notes["TMPDIR"]).mkdir()
    calm = train(config(root, "kept-calm", 2, (*cached, "data.workers=1")), notes, before=note_decoding)
    assert 32 <= Path(notes["LASTSTEP_TEST_NOTES"]).stat().st_size < 40, "32 images, each once except in a rare race"
    assert not list(Path(notes["TMPDIR"]).iterdir())
    stopped = Attempt(config(root, "kept-stopped", 2, cached), {"LASTSTEP_TEST_SIGNAL": STOP_AT_2})
    assert stopped.wait() == [128 + signal.SIGTERM] * 2, stopped.output()
    resumed = train(config(root, "kept-stopped", 2, (*cached, "data.workers=2")), before=share_nothing)
    assert fingerprint(resumed) == fingerprint(calm)


def test_torchvision_model(root: Path) -> None:
    """A network with many buckets, batch norms and residual blocks, not only the small one."""
    options = ("model.name=resnet18", "data.args.image_size=32", "train.epochs=1", "train.max_steps=5")
    stop_and_resume(root, "resnet", 2, options, "SIGTERM step 2 rank 0")


def test_other_arithmetic_is_reported(root: Path) -> None:
    """Threads split sums, and another version of torch may add in another order. A resume that may change the last
    bits must say so, and one that does not must not."""
    small, again = config(root, "threads", 1, ()), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 2 rank 0"}
    for threads in (1, 1, 2):
        attempt = Attempt(small, again, before=partial(torch.set_num_threads, threads))
        assert attempt.wait() == [128 + signal.SIGTERM], attempt.output()
        warnings = [line.partition("WARNING: ")[2] for line in attempt.output().splitlines() if "last bits" in line]
        if threads == 1:
            assert warnings == []
        else:
            assert warnings == [
                "resuming with threads 2 (was 1): the last bits may differ; set OMP_NUM_THREADS=1 to keep them"
            ]
    manifest = attempt.run.checkpoints / "step_000000006" / "manifest.json"
    said = json.loads(manifest.read_text())
    said["numerics"]["torch"] = "1.13.1"
    manifest.write_text(json.dumps(said))
    last = Attempt(small, before=partial(torch.set_num_threads, 2))
    assert last.wait() == [0], last.output()
    assert f"WARNING: resuming with torch {torch.__version__} (was 1.13.1): the last bits may differ\n" in last.output()


def test_stop_after_the_last_step_is_no_stop(root: Path) -> None:
    """A signal during the last unit of work is too late to stop the run: it must finish, not wait for another tick."""
    small = config(root, "late", 2, ())
    late = Attempt(small, {"LASTSTEP_TEST_SIGNAL": "SIGTERM validation 14 rank 1"})
    assert late.wait() == [0, 0], late.output()
    assert reasons(late.run) == ["finished"]
    assert fingerprint(late.run) == undisturbed(2, ())
