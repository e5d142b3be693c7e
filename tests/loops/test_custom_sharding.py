"""A custom loop may register a model that it has sharded by FSDP2: the run resumes as exactly as any other.

A shard that is saved with another step's, or restored on another rank, still trains, only worse.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from laststep import Run
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.registered import Registered, place_of
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace
from laststep.records.metrics import read_lines
from tests.loops.sharded_loops import data, named, network
from tests.support.loops import run_function
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.records import a_world
from tests.support.runs import undisturbed_run, without_a_long_wait
from tests.support.states import pretended_rank

KILLED = -signal.SIGKILL


def config(root: Path, name: str, ranks: int, mesh: str, *options: str) -> Config:
    """A small run of tests/loops/sharded_loops.py."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}", f"args.mesh={mesh}"]
    for_all = ["device=cpu", "train.log_every=3", "launch.max_failures=9", "launch.hang_timeout_s=20"]
    for_all += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]
    return Config.load(None, ["task=tests.loops.sharded_loops.thorough", *for_all, *place, *options])


def strike(
    root: Path, name: str, ranks: int, mesh: str, place: str, *options: str, before: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The record of an attempt that received the signal at that place."""
    here = config(root, name, ranks, mesh, *options)
    attempt = Attempt(here, {"LASTSTEP_TEST_SIGNAL": place}, nodes(options), before)
    number, hit = signal.Signals[place.split()[0]], int(place.split()[-1])
    stopped = [128 + number] * ranks
    killed = [KILLED if rank == hit else 1 for rank in range(ranks)]
    assert attempt.wait() == (killed if number == signal.SIGKILL else stopped), attempt.output()
    (record,) = read_lines(attempt.run.attempts)
    return record


def nodes(options: Sequence[str]) -> int:
    """Each rank has a node of its own if it keeps copies of another's shard."""
    return 2 if COPIED[0] in options else 1


def resume(root: Path, name: str, ranks: int, mesh: str, *options: str) -> dict[str, Any]:
    """The record of the next attempt, which ends like an undisturbed run."""
    attempt = Attempt(config(root, name, ranks, mesh, *options), nodes=nodes(options))
    assert attempt.wait() == [0] * ranks, attempt.output()
    assert "WARNING" not in attempt.output()
    assert fingerprint(attempt.run) == undisturbed_run(config(root, "unused", ranks, mesh))
    return read_lines(attempt.run.attempts)[-1]


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("step 1 rank 0", 1),
        ("step 5 rank 1", 5),
        ("validation 3 rank 0", 8),  # other weights are in the place of the model's: the ranks stop once they are back
        ("validation 11 rank 1", 16),
    ],
)
def test_stop_anywhere(root: Path, place: str, step: int) -> None:
    """The state of the optimiser and the moving average are sharded too, though made in other ways."""
    name = place.replace(" ", "-")
    record = strike(root, name, 2, "2", f"SIGTERM {place}")
    assert (record["lost_steps"], record["end_step"]) == (0, step)
    assert resume(root, name, 2, "2")["start_step"] == step


def test_a_rank_is_killed(root: Path) -> None:
    """Nobody else has its shard. The run is back at its newest checkpoint, and the record says why."""
    saves = "checkpoint.every_steps=4"
    record = strike(root, "killed", 2, "2", "SIGKILL step 7 rank 1", saves, before=without_a_long_wait)
    assert (record["end_step"], record["lost_steps"]) == (6, 2)
    assert "shard 1 is held by no surviving rank; the run is back at step 4" in record["error"]
    assert resume(root, "killed", 2, "2", saves)["start_step"] == 4


COPIED = ("checkpoint.replicas=1", "launch.nodes=2", "launch.tasks_per_node=1")


@pytest.mark.parametrize(("place", "step"), [("step 7 rank 1", 6), ("validation 3 rank 0", 8)])
def test_a_copy_survives(root: Path, place: str, step: int) -> None:
    """With a copy of each shard in the memory of another node, no step is lost. In the first validation other weights
    are in the place of the model's, so the copy is all there is."""
    name = "copied-" + place.replace(" ", "-")
    record = strike(root, name, 2, "2", f"SIGKILL {place}", *COPIED)
    assert (record["end_step"], record["lost_steps"]) == (step, 0)
    assert resume(root, name, 2, "2", *COPIED)["start_step"] == step


@pytest.mark.parametrize("place", ["SIGKILL step 5 rank 0", "SIGKILL step 12 rank 3"])
def test_a_replica_survives(root: Path, place: str) -> None:
    """Each shard has two replicas, so no step is lost."""
    name = place.replace(" ", "-")
    record = strike(root, name, 4, "2x2", place)
    step = int(place.split()[2]) - 1
    assert (record["end_step"], record["lost_steps"]) == (step, 0)
    assert resume(root, name, 4, "2x2")["start_step"] == step


SIZES = ((2, "2", "SIGTERM step 3 rank 1"), (1, "none", "SIGTERM step 3 rank 0"), (4, "4", "SIGTERM step 3 rank 2"))


def test_other_sizes(root: Path) -> None:
    """Two ranks, one without sharding, four, two replicas of two: the state is carried from one to the next, the
    moving average too, and each sample is seen once."""
    for ranks, mesh, place in SIZES:
        attempt = Attempt(config(root, "resized", ranks, mesh), {"LASTSTEP_TEST_SIGNAL": place})
        assert attempt.wait() == [128 + signal.SIGTERM] * ranks, attempt.output()
    run = train(config(root, "resized", 4, "2x2"))
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0] * 4
    lines = read_lines(run.metrics)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 17))


# --- what is refused: nobody else would say which tensor, and why


def on_a_mesh(shape: tuple[int, ...], *placed: Placement, device: str = "cpu") -> Tensor:
    """A tensor of 8 rows, as FSDP2 would place it on a mesh of this shape."""
    mesh = init_device_mesh("cpu", shape)
    return DTensor.from_local(
        torch.zeros(2, 4, device=device), mesh, placed, run_check=False, shape=(8, 4), stride=(4, 1)
    )


def of_two_ranks() -> Tensor:
    """One that only some ranks have."""
    mesh = DeviceMesh("cpu", [0, 1])
    return DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)], run_check=False, shape=(8, 4), stride=(4, 1))


CUT, WHOLE = Shard(0), Replicate()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: on_a_mesh((4,), Shard(1)),
            r"weight is a DTensor placed as \(Shard\(dim=1\),\); a checkpoint holds those",
        ),
        (lambda: on_a_mesh((4,), WHOLE), r"weight is a DTensor placed as \(Replicate\(\),\)"),
        (lambda: on_a_mesh((2, 2), CUT, Shard(1)), "weight is a DTensor placed as"),
        (
            lambda: on_a_mesh((2, 2), CUT, WHOLE),
            r"weight is sharded over a mesh of the ranks \[\[0, 1\], \[2, 3\]\]; give fully_shard one",
        ),
        (of_two_ranks, r"weight is sharded over a mesh of the ranks \[0, 1\]; give fully_shard one of all 4 ranks"),
        (
            lambda: on_a_mesh((4,), CUT, device="meta"),
            "weight is on meta, and this run trains on cpu: call model.to_empty",
        ),
    ],
)
def test_tensors_that_no_checkpoint_holds(make: Callable[[], Tensor], said: str) -> None:
    """The tensor is named, and what to do."""
    with a_rank_of_four() as group, pytest.raises(ConfigError, match=rf"run.restore\(model=...\): {said}"):
        place_of({"model": {"weight": make()}}, group)


def test_two_meshes() -> None:
    """A state has one number of shards."""
    with a_rank_of_four() as group:
        full, hybrid = on_a_mesh((4,), CUT), on_a_mesh((2, 2), WHOLE, CUT)
        assert place_of({"model": {"a": full, "b": torch.ones(3)}}, group) == (1, 4, 0, 1)
        assert place_of({"model": [hybrid]}, group) == (1, 2, 0, 2)
        with pytest.raises(ConfigError, match=r"run.restore\(b=...\): 0 is cut into 2 shards, and a.0 into 4: give"):
            place_of({"a": [full], "b": [hybrid]}, group)


@contextmanager
def a_rank_of_four() -> Iterator[Group]:
    """Rank 1."""
    with pretended_rank(ShardPlace(1, 4, 0, 1)):
        yield Group(a_world(1, 4), dist.HashStore(), torch.device("cpu"), "gloo")


class OwnState(torch.optim.SGD):
    """An optimiser with a state_dict of its own."""

    def state_dict(self) -> Any:
        return super().state_dict()


FullyShardedDataParallel = type("FullyShardedDataParallel", (torch.nn.Linear,), {})


def test_objects_that_are_sharded_in_a_way_of_their_own() -> None:
    """FSDP's first version, and an optimiser made too early: it would update nothing."""
    with a_rank_of_four() as group:
        model = torch.nn.Linear(4, 8)
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        objects = {"model": model, "early": early, "late": torch.optim.SGD(model.parameters(), lr=0.1)}
        assert Registered(objects, group, torch.zeros(1)).unaveraged() == ["early"]
        with pytest.raises(ConfigError, match=r"run.restore\(own=...\): OwnState has a state_dict of its own"):
            Registered({"own": OwnState(model.parameters(), lr=0.1)}, group, torch.zeros(1))
        with pytest.raises(ConfigError, match=r"run.restore\(model=...\): FullyShardedDataParallel is not supported"):
            Registered({"model": FullyShardedDataParallel(1, 1)}, group, torch.zeros(1))


def one_rank(run: Run) -> None:
    """Keeps DTensors in a dict that is empty when it is registered, unless in shares."""
    model = network("1")
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), dict[str, Any]()
    run.restore(model=model, optimizer=optimizer, kept=kept)
    for x, y in run.steps(run.loader(data(), 8)):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.update(named(model))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), r"run.restore\(kept=...\): holds DTensors that were not there when it was registered"),
        (("train.shares=2",), "train.shares cannot be combined with a sharded model"),
    ],
)
def test_a_loop_that_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    """At the latest in its first step, not when it saves."""
    with pytest.raises(ConfigError, match=said):
        run_function(one_rank, tmp_path, "refused", *options)
