"""A run that changes its number of ranks again and again learns from the same samples, in the same steps, as any other.

A sample that is seen twice or never, or in another batch, would silently make it another experiment.
tests/data/test_order.py tests the arithmetic. Here real ranks are stopped in mid-epoch, and more or fewer continue.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.data.order import Order
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.ranks import Attempt, reasons, train
from tests.support.runs import check_samples

# 110 samples in batches of 24: 5 steps an epoch, the last of 14 samples, which 8 micro-batches share unevenly.
SAMPLES, BATCH, EPOCHS = 110, 24, 4
PLAIN = Order(SAMPLES, BATCH, seed=0)
SIZES = ((1, "SIGUSR2 step 7 rank 0"), (4, "SIGUSR2 step 5 rank 2"), (3, "SIGUSR2 step 5 rank 1"), (2, ""))


def config(root: Path, name: str, ranks: int, workers: int) -> Config:
    """A run without batch norm and dropout, which depend on how a batch is divided among the ranks."""
    words = [
        "task=tests.support.tasks.RecordedLinear", "device=cpu", "data.name=fake", f"data.args.samples={SAMPLES}",
        "data.args.classes=3", "data.args.image_size=8", "data.args.augment=true", f"data.workers={workers}",
        f"train.batch_size={BATCH}", "train.accumulate=2", f"train.epochs={EPOCHS}", "optim.lr=0.02",
        f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}",
    ]  # fmt: skip
    return Config.load(None, words)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_four_three_two_ranks(tmp_path: Path, workers: int) -> None:
    """Stopped in mid-epoch each time. Samples that workers had prefetched for the old size must not count as seen."""
    calm = train(config(tmp_path, "calm", 1, workers), {"LASTSTEP_TEST_NOTES": str(tmp_path / "calm.jsonl")})
    for ranks, place in SIZES:
        environment = {"LASTSTEP_TEST_NOTES": str(tmp_path / "notes.jsonl"), "LASTSTEP_TEST_SIGNAL": place}
        attempt = Attempt(config(tmp_path, "resized", ranks, workers), environment)
        codes = attempt.wait()
        assert len(set(codes)) == 1 and (codes[0] > 128) == bool(place), attempt.output()
    run = attempt.run

    ended = read_lines(run.attempts)
    assert reasons(run) == ["preempted"] * 3 + ["finished"]
    assert [record["world_size"] for record in ended] == [1, 4, 3, 2]
    assert [record["lost_steps"] for record in ended] == [0] * 4
    assert [record["end_step"] for record in ended] == [7, 12, 17, 20], "each but the last in mid-epoch"

    total = EPOCHS * PLAIN.steps_per_epoch
    check_samples(tmp_path / "calm.jsonl", PLAIN, total)
    check_samples(tmp_path / "notes.jsonl", PLAIN, total)
    assert metrics(run) == [{key: pytest.approx(x, rel=1e-4) for key, x in line.items()} for line in metrics(calm)]


def metrics(run: RunDir) -> list[dict[str, float]]:
    """All lines of metrics.jsonl without their times: each step once, each epoch once."""
    return [
        {key: value for key, value in line.items() if key not in ("time", "samples_per_s")}
        for line in read_lines(run.metrics)
    ]
