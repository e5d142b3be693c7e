"""Which parts of a model are cut, by default and by a task's own `shard`, and what is refused.

A part that is not cut as a checkpoint expects would be saved wrongly; one that is not cut at all fills the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.learner import Learner, prepare_model
from laststep.loops.sharded import shard
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace
from tests.support.images import Images
from tests.support.records import a_world
from tests.support.states import local, pretended_rank

FULL, HYBRID = ShardPlace(0, 2, 0, 1), ShardPlace(0, 2, 0, 2)
Cut = Callable[[Any, DeviceMesh], None]


class Residual(nn.Module):
    """A repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


def residual() -> Any:
    return nn.Sequential(nn.Linear(6, 6), Residual(), Residual(), Residual(), nn.Linear(6, 6))


def task_and_config(cut: Cut | None, place: ShardPlace, *words: str) -> tuple[Images, Config]:
    """A task, with this `shard` if one is given."""

    class Mine(Images):
        def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
            assert cut is not None
            cut(model, mesh)

    sharding = "full" if place.replicas == 1 else "hybrid"
    config = Config.load(None, ["device=cpu", "task=mine.Mine", f"train.sharding={sharding}", *words])
    return (Images if cut is None else Mine)(config, residual), config


def a_group(place: ShardPlace) -> Group:
    return Group(a_world(0, place.shards * place.replicas), HashStore(), torch.device("cpu"))


def cut_by(cut: Cut | None, model: nn.Module, place: ShardPlace = FULL) -> list[str]:
    """The parts of a model that are gathered one by one, once it is cut."""
    task, config = task_and_config(cut, place)
    with pretended_rank(place):
        shard([model], task, config, a_group(place), place)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_the_blocks_and_the_rest() -> None:
    """By default each repeated block is gathered by itself, and the root gathers what is left."""
    assert cut_by(None, residual()) == ["", "1", "2", "3"]


def test_a_tied_block_stays_with_the_rest() -> None:
    """FSDP2 gathers a parameter in one place only, so a block that shares one cannot be gathered by itself."""
    model = residual()
    model[4].weight = model[2].linear.weight
    assert cut_by(None, model) == ["", "1", "3"]
    assert model[4].weight is model[2].linear.weight, "still one parameter"


def test_an_encoder_of_torch() -> None:
    """In a validation with a padding mask it would hand nested tensors to its layers, which refuse them once FSDP2 has
    given them hooks."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)
    task, config = task_and_config(None, FULL)
    with pretended_rank(FULL), torch.no_grad():
        shard([model], task, config, a_group(FULL), FULL)
        assert isinstance(model.layers[0], FSDPModule)
        padding = torch.tensor([[False, False, True], [False, True, True]])
        assert model.eval()(torch.ones(2, 3, 6), src_key_padding_mask=padding).shape == (2, 3, 6)


def test_the_tasks_own_cut() -> None:
    """A task knows its model: the parts that it names are cut, and no others, in the averaged model too."""

    def cut(model: Any, mesh: DeviceMesh) -> None:
        assert mesh.mesh_dim_names == ("shard",)
        fully_shard([model[3], model[4]], mesh=mesh)
        fully_shard(model, mesh=mesh)

    task, config = task_and_config(cut, FULL, "train.ema_decay=0.9")
    with pretended_rank(FULL):
        model, average = prepare_model(task, config, a_group(FULL), FULL)
        assert average is not None
        for each in (model, average.module):
            assert [name for name, module in each.named_modules() if isinstance(module, FSDPModule)] == ["", "3", "4"]
            assert {tuple(local(p).shape) for p in each.parameters()} == {(3, 6), (3,)}


def blocks_and_root(model: Any, mesh: DeviceMesh) -> None:
    for part in (*model[1:4], model):
        fully_shard(part, mesh=mesh)


def test_a_tie_that_a_task_cuts() -> None:
    """Two groups cannot share a parameter: some versions of torch would make two of it, without a word."""
    model = residual()
    model[4].weight = model[2].linear.weight
    with pytest.raises(ConfigError, match=r"must cut 2.linear.weight and 4.weight, which are one parameter, together"):
        cut_by(blocks_and_root, model)


def root_first(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)
    fully_shard(model[1], mesh=mesh)


def by_columns(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))


def all_but_one(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, ignored_params={model[4].weight})


def over_all_ranks(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize(
    ("cut", "place", "said"),
    [
        (lambda model, mesh: None, FULL, "must call fully_shard on the model itself, last"),
        (lambda model, mesh: fully_shard(model[1], mesh=mesh), FULL, "must call fully_shard on the model itself, last"),
        (lambda model, mesh: [fully_shard(model, mesh=mesh) for _ in range(2)], FULL, "cannot be sharded: "),
        (root_first, FULL, "cannot be sharded: "),
        (by_columns, FULL, "must cut each parameter by rows over the mesh; 0.weight is not"),
        (all_but_one, FULL, "must cut each parameter by rows over the mesh; 4.weight is not"),
        (over_all_ranks, HYBRID, "must cut each parameter by rows over the mesh; 0.weight is not"),
    ],
)
def test_a_wrong_cut(cut: Cut, place: ShardPlace, said: str) -> None:
    """One line at the start, which names the task and the first parameter. Such a state could not be saved."""
    with pytest.raises(ConfigError, match=f"^train.sharding={'full' if place is FULL else 'hybrid'}: mine.Mine") as no:
        cut_by(cut, residual(), place)
    no.match(said)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("cut", [None, lambda model, mesh: fully_shard(model, mesh=mesh)])
def test_a_parameter_without_rows(cut: Cut | None) -> None:
    """Such as a learned temperature; torch's own message would come from deep inside."""
    model = residual()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(ConfigError, match=r"mine.Mine: scale has no rows to cut; give this parameter the shape \(1,\)"):
        cut_by(cut, model)


def with_a_double(trained: bool) -> nn.Module:
    model = residual()
    model[0].weight = nn.Parameter(model[0].weight.double(), requires_grad=trained)
    return model


def test_parameters_of_different_types() -> None:
    """torch's own message names no parameter, and comes after the data is prepared. Frozen ones may differ."""
    with pytest.raises(ConfigError, match=r"0.weight is torch.float64, 0.bias torch.float32, and are gathered"):
        cut_by(None, with_a_double(trained=True))
    cut_by(None, with_a_double(trained=False))


@pytest.mark.parametrize("words", [(), ("optim.clip_norm=1",)])
def test_gradients_are_freed_by_the_update(words: tuple[str, ...]) -> None:
    """Else a rank holds those of two steps at the next backward pass, when memory is fullest."""
    task, config = task_and_config(None, FULL, *words)
    batch = torch.randn(4, 6), torch.arange(4)
    with pretended_rank(FULL):
        learning = Learner(config, task, a_group(FULL), total_steps=10)
        for step in range(2):
            learning.learn(step, [batch], [4], 4)
            rows = [parameter for group in learning.optimizer.param_groups for parameter in group["params"]]
            gradients = [weakref.ref(each.grad) for each in rows]
            learning.update()
            assert all(gradient() is None for gradient in gradients)
