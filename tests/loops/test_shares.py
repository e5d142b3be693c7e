"""With train.shares, a run ends with the same bits on any number of ranks that fits, also if that number changes.

A difference in the last bit means that something depends on which rank computes a share, or in which order sums are
formed: after a resume on fewer nodes it would be another experiment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laststep.cli.main import main
from laststep.config.checks import nodes_for
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data.order import Order
from laststep.loops import gradients as gradients_module
from laststep.loops.learner import Learner
from laststep.loops.shares import ShareSum
from laststep.ranks.device import set_up_device
from laststep.ranks.group import Group, tree_sum
from laststep.records.metrics import read_lines
from laststep.submission.sbatch import rank_count
from tests.loops.test_learner import blocks, learner
from tests.support.images import IMAGES, LABELS
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.records import a_world
from tests.support.runs import EVERYTHING, KILLED, SMALL

TWELVE = torch.randn(12, 1000, generator=torch.Generator().manual_seed(3))  # gradients of twelve shares


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


def of_rank(gradients: Tensor) -> Tensor:
    """What a rank that has these shares passes on to the sum over the ranks."""
    parameter = nn.Parameter(torch.zeros(gradients.shape[1]))
    sums = ShareSum([parameter], len(gradients))
    for number, gradient in enumerate(gradients):
        for last in (False, True):  # two micro-batches
            if last:
                sums.end_share(number)
            (parameter * gradient * (0.25 if last else 0.75)).sum().backward()
        sums.end_backward()
    assert parameter.grad is not None
    return parameter.grad


def test_the_order_of_a_sum_does_not_depend_on_the_number_of_ranks() -> None:
    """A sum in another order has other last bits, so these numbers show it."""
    for shares in (1, 2, 3, 6, 8, 12):
        given = TWELVE[:shares]
        sums = []
        for size in range(1, shares + 1):
            if shares % size == 0 and (shares // size).bit_count() == 1:
                sums.append(bits(tree_sum(torch.stack([of_rank(part) for part in given.chunk(size)]))))
        assert len(sums) == {1: 1, 2: 2, 3: 1, 6: 2, 8: 4, 12: 3}[shares]
        assert all(one == sums[0] for one in sums), f"{shares} shares"
    assert bits(given.sum(0)) != sums[0], "the order matters for these numbers"


def test_a_parameter_that_some_shares_do_not_use() -> None:
    """A branch of the model that only some samples take: its gradient is summed over the shares that have one."""
    parameter = nn.Parameter(torch.ones(1))
    for used in range(1, 16):
        sums = ShareSum([parameter], 4)
        for number in range(4):
            sums.end_share(number)
            if used >> number & 1:
                (parameter * 10**number).sum().backward()
            sums.end_backward()
        assert parameter.grad is not None
        assert parameter.grad.item() == sum(10**number for number in range(4) if used >> number & 1)
        parameter.grad = None


@pytest.mark.parametrize("count", [48, 29, 3], ids="batch-of-{}".format)
def test_twelve_shares(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """3, 6 and 12 ranks get the same gradient, loss and statistics of batch norm, for a short last batch too. Each
    rank's gradient is summed by hand, as DDP's hook does."""
    monkeypatch.setattr(gradients_module, "data_parallel", lambda model, *_: model)
    monkeypatch.setattr(Group, "broadcast", lambda *_: None)
    order = Order(count, 48, 0)
    results = []
    for size in (3, 6, 12):
        ranks = [one_of_twelve(rank, size, order) for rank in range(size)]
        rows = [torch.cat([p.grad.flatten() for p in tensors(rank) if p.grad is not None]) for rank in ranks]
        ranks[0].update()
        results.append((bits(tree_sum(torch.stack(rows))), bits(torch.cat(statistics(ranks[0])))))
    assert results[0] == results[1] == results[2]


def one_of_twelve(rank: int, size: int, order: Order) -> Learner:
    """One of `size` ranks that has computed its part of twelve shares."""
    words = ("train.shares=12", "train.batch_size=48", "train.accumulate=2", "train.activation_checkpointing=true")
    learning = learner(blocks, *words, f"launch.tasks_per_node={size}", rank=rank, size=size)
    learning.train(True)
    cuts = order.micro_batches(0, rank, size, 24 // size)
    taken = [torch.tensor(cut if len(cut) else order.batch(0)[:2]) % len(IMAGES) for cut in cuts]
    learning.learn(0, [(IMAGES[rows], LABELS[rows]) for rows in taken], list(map(len, cuts)), order.count(0))
    return learning


def tensors(learning: Learner) -> Sequence[nn.Parameter]:
    assert isinstance(learning.gradients, gradients_module.Replicated)
    return learning.gradients.summed


def statistics(learning: Learner) -> list[Tensor]:
    return [buffer.flatten() for buffer in learning.model.buffers() if buffer.is_floating_point()]


# --- real ranks


def config(root: Path, name: str, ranks: int, *options: str) -> Config:
    """A run in four shares. 52 samples in batches of 16: the last of four batches an epoch has one sample a share."""
    words = ["model.args.width=32"] if not any(option.startswith("model.name") for option in options) else []
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    return Config.load(None, [*SMALL, "train.batch_size=16", "train.shares=4", *words, *options, *place])


def test_four_two_one_four_ranks(tmp_path: Path) -> None:
    """Killed or stopped in mid-epoch or in a validation each time, with every option on that carries state. It ends
    like a run that one rank has trained undisturbed."""
    expected = fingerprint(train(config(tmp_path, "calm", 1, *EVERYTHING)))
    places: tuple[tuple[int, str, dict[str, str], bool], ...] = (
        (4, "Faulty", {"LASTSTEP_TEST_FAULT": "kill step 3 rank 2"}, True),
        (2, "Signalled", {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 1 rank 1"}, False),
        (1, "Signalled", {"LASTSTEP_TEST_SIGNAL": "SIGUSR2 validation 2 rank 0"}, False),
        (4, "Signalled", {}, False),
    )
    for ranks, task, environment, kills in places:
        words = (*EVERYTHING, f"task=tests.support.tasks.{task}", "launch.hang_timeout_s=20")
        attempt = Attempt(config(tmp_path, "resized", ranks, *words), environment)
        codes = attempt.wait()
        assert (KILLED in codes) == kills, attempt.output()
        assert "last bits may differ" not in attempt.output()
    records = read_lines(attempt.run.attempts)
    assert [record["world_size"] for record in records] == [4, 2, 1, 4]
    assert [record["end_step"] for record in records] == [2, 3, 4, 8]
    assert [record["lost_steps"] for record in records] == [0] * 4
    assert reasons(attempt.run)[1:] == ["cancelled", "preempted", "finished"]
    assert fingerprint(attempt.run) == expected


@pytest.mark.parametrize(
    "options",
    [
        "task=tests.support.tasks.Tokens train.nonfinite=skip train.precision=bf16 "
        "optim.name=adamw optim.lr=0.001 optim.clip_norm=.inf train.accumulate=2",
        "model.name=resnet18 data.args.image_size=32 train.channels_last=true train.max_steps=2 data.args.samples=32",
        "data.name=mnist-5k data.args={augment:true} train.max_steps=4 train.batch_size=32 model.args.width=8 "
        "train.precision=fp16 optim.clip_norm=0.5",
        "task=tests.support.tasks.SmallSignalled data.args.samples=32 train.compile=true train.max_steps=2",
    ],
    ids=["transformer", "resnet", "in-memory", "compiled"],
)
def test_one_and_two_ranks(tmp_path: Path, options: str) -> None:
    """Each of these computes a share by other code. Two ranks compute one share each, one rank both."""
    words = ("train.shares=2", *options.split(), "train.epochs=1")
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}  # the graphs are the same, so once is enough
    one, two = (train(config(tmp_path, f"on-{n}", n, *words), compiled) for n in (1, 2))
    assert fingerprint(one) == fingerprint(two)
    skipped = [line.get("skipped", False) for line in read_lines(one.metrics)]
    assert any(skipped) == ("nonfinite=skip" in options) and not all(skipped[:-1])


def test_eight_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three levels of the tree lie between the ranks, or all of them within one rank. So do they in `evaluate`."""
    words = ("train.shares=8", "train.max_steps=3", "train.epochs=1")
    eight, one = (train(config(tmp_path, f"on-{n}", n, *words)) for n in (8, 1))
    assert fingerprint(eight) == fingerprint(one)
    assert main(["evaluate", str(eight.path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["metrics"] == found["recorded"]


def test_a_compiled_model_has_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within DistributedDataParallel torch compiles a model into other graphs, one for each bucket, whose sums have
    other last bits. So one rank uses it too."""
    monkeypatch.setattr(Group, "connect_alone", connect_alone)
    words = ("train.shares=4", "train.compile=true")
    try:
        assert isinstance(learner(blocks, *words).gradients.parallel, DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    assert not isinstance(learner(blocks, *words[1:]).gradients.parallel, DistributedDataParallel)


def connect_alone(_: Group) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_number_of_threads_does_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine two ranks would otherwise get half of the cores each, and threads split sums."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for size in (1, 2):
        words = ("device=cpu", "train.shares=2", "launch.cpus_per_task=3", f"launch.tasks_per_node={size}")
        set_up_device(Config.load(None, words), a_world(0, size))
    assert threads == [3, 3]


# --- sizes that do not fit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.shares=4 launch.tasks_per_node=3", "among 3 ranks; these numbers of ranks fit: 1, 2, 4"),
        ("train.shares=4 launch.tasks_per_node=8", "among 8 ranks; these numbers of ranks fit: 1, 2, 4"),
        ("train.shares=12", "among 1 rank; these numbers of ranks fit: 3, 6, 12"),
        ("train.shares=12 launch.nodes=2-4", "among 2 ranks; these numbers of ranks fit: 3, 6, 12"),
        ("train.shares=4 launch.nodes=3", "among 3 ranks; these numbers of ranks fit: 1, 2, 4"),
        ("train.shares=6 train.batch_size=64 launch.nodes=3", "train.batch_size=64: not divisible by train.shares=6"),
        ("train.shares=4 train.batch_size=60 train.accumulate=2", "train.shares=4 x train.accumulate=2; 64 would be"),
    ],
)
def test_refused(words: str, message: str) -> None:
    """Before anything is submitted, with the sizes that fit."""
    with pytest.raises(ConfigError, match=message):
        Config.load(None, ["train.batch_size=48", *words.split()])


@pytest.mark.parametrize(("granted", "used"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_a_range_of_nodes(granted: int, used: int) -> None:
    """Eight shares do not divide among the ranks of three nodes: a start that gets three uses two of them."""
    launch = Config.load(None, ["train.shares=8", "launch.nodes=1-5", "launch.tasks_per_node=2"]).launch
    lines = [f"SLURM_JOB_NUM_NODES={granted}", *rank_count(launch, nodes_for(8, launch))]
    script = "\n".join([*lines, "echo $trained $SLURM_NTASKS"])
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[-1] == f"{used} {2 * used}"
    assert said[:-1] == ([] if used == granted else [f"train.shares: training on {used} of {granted} nodes"])


def test_a_rank_refuses_too(tmp_path: Path) -> None:
    """Another launcher may start any number of ranks."""
    small = config(tmp_path, "two", 2)
    small.train.shares = 3
    attempt = Attempt(small)
    assert 0 not in attempt.wait()
    assert "train.shares=3: cannot be divided among 2 ranks; these numbers of ranks fit: 3" in attempt.output()
