"""`--from FILE`: a run begins with the weights and the optimiser that another tool has saved, with the same bits.

State in the wrong place would train, and be worse without a word: so all is matched by name, or said not to be.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from laststep.checkpoint import foreign
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.config.errors import ConfigError
from laststep.loops.initial_weights import apply_plan, plan_for
from laststep.ranks.group import Group
from tests.loops.foreign_loops import network
from tests.support.commands import refusal
from tests.support.ranks import reasons, train
from tests.support.records import a_world
from tests.support.runs import config

Saved = tuple[nn.Module, Optimizer]


def steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    """The same steps each time."""
    for step in range(count):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 8).view(2, 4) * (step + 1)).pow(2).mean().backward()
        optimizer.step()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture
def trained() -> Saved:
    """A model and its optimiser after some steps, anywhere else."""
    model = network()
    optimizer = adamw(model)
    steps(model, optimizer, 3)
    return model, optimizer


def dcp(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process is alone
        checkpoint.save(state, checkpoint_id=path, no_dist=True)


def a_file(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    torch.save(
        {"step": 3, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path
    )


def from_compiled_ddp(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    weights = {f"module._orig_mod.{name}": each for name, each in model.state_dict().items()}
    torch.save({"model": weights, "optim": optimizer.state_dict()}, path)


def lightning(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    weights = {f"net.{name}": each for name, each in model.state_dict().items()}
    rest = {"epoch": 0, "global_step": 3, "lr_schedulers": [{"last_epoch": 3}], "pytorch-lightning_version": "2.5"}
    torch.save({"state_dict": weights, "optimizer_states": [optimizer.state_dict()], **rest}, path)


def transformers(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save({"last_epoch": 3}, path / "scheduler.pt")


def dcp_by_number(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    dcp(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3})


def dcp_by_name(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    dcp(path, {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)})


def dcp_flat(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """As torchtitan: the weights at the top, the optimiser's names flattened."""
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp(path, {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(3)}})


FORMATS = [a_file, from_compiled_ddp, lightning, transformers, dcp_by_number, dcp_by_name, dcp_flat]


def begin(path: Path, modules: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> list[str]:
    """Begin with this checkpoint, on one rank; returns what is said."""
    said: list[str] = []
    group = Group(a_world(), dist.HashStore(), torch.device("cpu"))
    plan = plan_for(str(path), modules, optimizers, group, path.with_name("initial_weights.json"), said.append)
    apply_plan(plan, modules, optimizers, group)
    return said


@pytest.mark.parametrize("save", FORMATS)
def test_the_next_steps_have_the_same_bits(save: Callable[..., None], trained: Saved, tmp_path: Path) -> None:
    """Whatever has written it: the steps after the start are those that would have followed there."""
    path = tmp_path / "saved.pt"
    save(path, *trained)
    assert foreign.kind_of(path) is not None
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = adamw(model)
    said = begin(path, {"network": model}, {"adam": optimizer})
    assert said[0] == f"network: 4 of 4 tensors from {path}" and said[1].startswith("adam: the state of 4 of 4 param")
    for each in (trained, (model, optimizer)):
        steps(*each, 2)
    for one, other in zip(trained[0].parameters(), model.parameters()):
        assert torch.equal(one, other)


def test_what_does_not_fit_is_said(trained: Saved, tmp_path: Path) -> None:
    """A head of another size, a layer that is new: left as initialised, and named; so is what nothing takes."""
    path = tmp_path / "saved.pt"
    torch.save({"model": trained[0].state_dict(), "optimizer": trained[1].state_dict(), "rng": 1}, path)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 9))
    optimizer = adamw(model)
    said = begin(path, {"model": model}, {"optimizer": optimizer})
    assert torch.equal(model.state_dict()["0.weight"], trained[0].state_dict()["0.weight"])
    assert "2 of 4 tensors" in said[0] and "left as initialised: 2.weight, 2.bias" in said[0]
    assert said[1] == "optimizer: begins without state: its parameter 2 has another shape than this run's"
    assert not optimizer.state and "rng" in said[2]


def test_by_names_only_what_fits_is_taken(trained: Saved, tmp_path: Path) -> None:
    dcp_by_name(tmp_path / "dcp", *trained)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 9))
    optimizer = adamw(model)
    said = begin(tmp_path / "dcp", {"model": model}, {"optimizer": optimizer})
    assert said[1] == "optimizer: the state of 2 of 4 parameters, by their names"
    assert set(optimizer.state) == {model[0].weight, model[0].bias}
    steps(model, optimizer, 1)


def test_another_optimizer(trained: Saved, tmp_path: Path) -> None:
    """Momentum is not an average of squares."""
    a_file(tmp_path / "saved.pt", *trained)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said = begin(tmp_path / "saved.pt", {"model": model}, {"optimizer": optimizer})
    assert said[1].endswith("it keeps exp_avg, exp_avg_sq, step, and this run's SGD momentum_buffer")
    assert not optimizer.state


def test_other_groups(trained: Saved, tmp_path: Path) -> None:
    """By numbers alone, nobody knows which is which."""
    a_file(tmp_path / "saved.pt", *trained)
    model = network()
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    said = begin(tmp_path / "saved.pt", {"model": model}, {"optimizer": optimizer})
    assert said[1].endswith("it numbers 4 parameters, and this run's 1 + 3") and not optimizer.state


def test_two_of_each(trained: Saved, tmp_path: Path) -> None:
    """The second optimiser must not take the state of the first: each takes what has its name, or nothing."""
    first, second = trained, (network(), None)
    optimizer = adamw(second[0])
    steps(second[0], optimizer, 1)
    path = tmp_path / "saved.pt"
    states = {"generator": first[1].state_dict(), "critic": optimizer.state_dict()}
    torch.save({"models": {"g": first[0].state_dict(), "c": second[0].state_dict()}, "optimizers": states}, path)
    g, c = network(), network()
    optimizers = {"critic": adamw(c), "generator": adamw(g)}
    begin(path, {"c": c, "g": g}, optimizers)
    assert {name: each.state_dict()["state"][0]["step"] for name, each in optimizers.items()} == {
        "generator": 3, "critic": 1
    }  # fmt: skip
    torch.save({"models": {"g": first[0].state_dict(), "c": c.state_dict()}, "optimizer": states["generator"]}, path)
    optimizers = {"critic": adamw(c), "generator": adamw(g)}
    said = begin(path, {"c": c, "g": g}, optimizers)
    assert not any(each.state for each in optimizers.values())
    assert said[2] == "critic: begins without state: the checkpoint has optimizer"
    with pytest.raises(ConfigError, match=r"which of its models is model\? It holds g, c; register one by such a name"):
        begin(path, {"model": g}, {})


def test_another_model(trained: Saved, tmp_path: Path) -> None:
    a_file(tmp_path / "saved.pt", *trained)
    with pytest.raises(ConfigError, match="weights of another model: none of its 4 tensors fits model"):
        begin(tmp_path / "saved.pt", {"model": nn.Linear(2, 2)}, {})


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Saved) -> None:
    """A checkpoint is a stranger's file. torch reads .metadata, and what is no tensor, with all of pickle."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": trained[0].state_dict(), "config": Evil()}, "evil.pt")
    with pytest.raises(
        ConfigError, match=r"evil.pt: holds an object of \w+.system besides tensors, which is not loaded"
    ):
        foreign.read(Path("evil.pt"))
    dcp(Path("dcp"), {"model": trained[0].state_dict(), "config": Evil()})
    found = foreign.read(Path("dcp"))
    assert found.weights.keys() == {"model"} and "config" in found.left
    for evil in (Evil(), pickle.dumps):
        Path("dcp/.metadata").write_bytes(pickle.dumps([evil]))
        with pytest.raises(ConfigError, match=r"dcp: its .metadata is not torch's alone"):
            foreign.read(Path("dcp"))
    Path("dcp/.metadata").write_bytes(b"\x80\x04\x8c\x24torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    with pytest.raises(ConfigError, match=r"dcp: "):
        foreign.read(Path("dcp"))
    assert not Path("evil").exists()


def test_metadata_by_python_3_13(tmp_path: Path, trained: Saved) -> None:
    """There the classes of pathlib are in pathlib._local, as .metadata then says."""
    dcp(tmp_path / "dcp", {"model": trained[0].state_dict()})
    metadata = tmp_path / "dcp/.metadata"
    found = pickle.loads(metadata.read_bytes())
    found.storage_meta.checkpoint_id = tmp_path
    # Protocol 2 has the names of modules in lines of text.
    written = pickle.dumps(found, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\n" in written
    metadata.write_bytes(written)
    assert foreign.read(tmp_path / "dcp").weights.keys() == {"model"}


@pytest.mark.parametrize("content", [b"", b"PK", b"nothing", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_checkpoint(content: bytes, tmp_path: Path) -> None:
    """One line, no traceback."""
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad.pt: "):
        foreign.read(tmp_path / "bad.pt")


def test_ranks(root: Path, trained: Saved) -> None:
    """Rank 0 reads, and all begin with the same; the file may be gone by the time of a resume."""
    path = root / "saved.pt"
    root.mkdir(exist_ok=True)
    a_file(path, *trained)
    words = ("task=tests.loops.foreign_loops.one", f"checkpoint.start_from={path}", "train.max_steps=null")
    run = train(config(root, "started", 2, words))
    assert reasons(run) == ["finished"]
    store = CheckpointStore(run.checkpoints)
    newest = store.steps()[-1]
    state = load(store.path(newest), store.verify(newest))
    assert {each["step"].item() for each in state["optimizer"]["state"].values()} == {3 + newest}
    assert json.loads(run.initial_weights.read_text())["source"] == str(path)


def test_refused(here: Path, capfd: pytest.CaptureFixture[str], trained: Saved) -> None:
    """What cannot be is said before anything is submitted."""
    a_file(here / "saved.pt", *trained)
    (here / "folder").mkdir()
    sharded = "train.sharding=full device=cpu launch.tasks_per_node=2"
    for words, says in {
        "--from missing.pt": "--from missing.pt: no such file",
        "--from saved.pt model.weights=saved.pt": "checkpoint.start_from=saved.pt: has the weights already",
        f"--from saved.pt {sharded}": "checkpoint.start_from=saved.pt: not with train.sharding=full",
        "checkpoint.start_from=folder": "checkpoint.start_from=folder: no checkpoint that can be read: a file",
        "checkpoint.start_from=gone": "checkpoint.start_from=gone: no such file or folder",
        "--from folder": "folder",
    }.items():
        assert says in refusal(words.split(), capfd, here)
