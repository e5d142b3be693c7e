"""The weights that a run gives away are those of its checkpoint, by the names that the user's own model has.

They are what the training was for: a wrong, half or silently older file would be published, and nobody would notice.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.optim.swa_utils import AveragedModel

from laststep import compat
from laststep.checkpoint import export
from laststep.checkpoint.export import (
    check_target,
    read_file,
    read_run,
    read_source,
    weights_sha256,
    write,
    write_folder,
)
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore, Manifest
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from tests.support.project import DEADLINE_S
from tests.support.states import save_alone


class Tied(nn.Module):
    """A model with two names for one tensor, and one that is not in C order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def state_of(model: nn.Module, average: AveragedModel | None = None) -> dict[str, Any]:
    """What the ready-made loop saves; the optimiser's tensors are none of the model's."""
    return {
        "position": {"step": 5, "metrics": {}},
        "model": model.state_dict(),
        "average": None if average is None else average.state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.full((999,), 7.0)}}, "param_groups": [{"lr": 0.1}]},
        "scaler": {},
    }


def save(run: RunDir, step: int, state: dict[str, Any], **metrics: float) -> Path:
    """Commit a checkpoint."""
    store = CheckpointStore(run.checkpoints)
    save_alone(store, CheckpointInfo(step, 1, 10 * step, metrics), state)
    return store.path(step)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run folder."""
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    return run


def equal(found: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    """Whether two sets of weights have the same names, in order, and the same bits."""
    return list(found) == list(expected) and weights_sha256(found) == weights_sha256(expected)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_names_and_bits(run: RunDir, suffix: str) -> None:
    """The plain model loads the file without any change, whatever its memory looked like, tied tensors included."""
    model = Tied()
    save(run, 5, state_of(model))
    path = run.path / f"out{suffix}"
    write(path, read_run(run).tensors, {"run": "first"})
    found = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert weights_sha256(found) == weights_sha256(model.state_dict())
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert equal(read_source(path), found)
    Tied().load_state_dict(found)
    if suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"run": "first"}


def test_large_weights(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's tools take no file above 5 GB: they read several by an index, and so does model.weights."""
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))  # 440 bytes each
    save(run, 5, state_of(model))
    path = run.path / "model.safetensors"
    write(path, {"old": torch.ones(3)}, {})
    monkeypatch.setattr(export, "FILE_BYTES", 1000)
    index, *files = write(path, read_run(run).tensors, {"run": "first"})
    assert [file.name for file in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index.name == "model.safetensors.index.json" and not path.exists(), "the old file would be taken instead"
    names = json.loads(index.read_text())
    assert names["metadata"] == {"total_size": 2200}
    assert all(torch.equal(load_file(run.path / names["weight_map"][k])[k], v) for k, v in model.state_dict().items())
    assert weights_sha256(read_source(index)) == weights_sha256(model.state_dict())
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ConfigError, match="names a file in another folder"):
        read_source(index)
    monkeypatch.setattr(export, "FILE_BYTES", 5000)
    assert write(path, read_run(run).tensors, {}) == [path]
    assert not index.exists(), "it would lead to the old files"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_for_torch_distributed_checkpoint(run: RunDir) -> None:
    """Its own reader loads the folder; test_sharded_ranks.py loads one into a model that is sharded."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    save(run, 5, state_of(model))
    out = run.path / "dcp"
    write_folder(out, read_run(run).tensors)
    assert {path.name for path in run.path.iterdir()} == {"checkpoints", "dcp"}
    with pytest.raises(ConfigError, match="exists already; name a new folder"):
        write_folder(out, {})
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    state = plain.state_dict()
    checkpoint.load(state, checkpoint_id=out, no_dist=True)
    plain.load_state_dict(state)
    assert weights_sha256(plain.state_dict()) == weights_sha256(model.state_dict())


def test_averaged_and_raw(run: RunDir) -> None:
    """The average is what was validated, so it is what one gets; the weights themselves remain within reach."""
    model = Tied()
    average = AveragedModel(model, use_buffers=True)
    for parameter in average.parameters():
        parameter.data.mul_(0.5)
    save(run, 5, state_of(model, average), val_loss=0.25)
    averaged, raw = read_run(run), read_run(run, raw=True)
    assert equal(averaged.tensors, average.module.state_dict()) and equal(raw.tensors, model.state_dict())
    assert (averaged.averaged, raw.averaged) == (True, False)
    assert averaged.metrics == {"val_loss": 0.25} and raw.metrics == {}  # nobody has validated the raw ones


def test_compiled_parts(run: RunDir) -> None:
    """torch.compile changes names, and the model that loads the weights is not compiled yet."""

    def compiled(module: nn.Module) -> nn.Module:
        wrapper = nn.Module()  # importing torch's compiler takes 10 s
        wrapper.add_module("_orig_mod", module)
        assert compat.compiled_original(wrapper) is module
        return wrapper

    inner = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    save(run, 5, state_of(compiled(nn.Sequential(compiled(inner[0]), inner[1]))))
    assert equal(read_run(run).tensors, inner.state_dict())


def test_custom_loop(run: RunDir) -> None:
    """Of what a custom loop has registered, modules are exported: one by its own names, several by theirs as well."""
    body, head = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    rest = {name: part for name, part in state_of(body).items() if name in ("position", "optimizer")}
    rest["best"] = {"loss": 0.5}
    save(run, 1, {**rest, "model": body.state_dict()})
    assert equal(read_run(run).tensors, body.state_dict())
    average = AveragedModel(body)
    save(run, 2, {**rest, "body": body.state_dict(), "head": head.state_dict(), "average": average.state_dict()})
    both = {f"body.{name}": tensor for name, tensor in body.state_dict().items()}
    both |= {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    both |= {f"average.{name}": tensor for name, tensor in average.module.state_dict().items()}
    assert equal(read_run(run).tensors, both)
    save(run, 3, rest)
    with pytest.raises(ConfigError, match=r"holds no model; register one with run\.restore\(model=\.\.\.\)"):
        read_run(run)


def test_which_checkpoint(run: RunDir) -> None:
    """The newest, a chosen one, or the best; a wrong wish gets the list of what is there."""
    with pytest.raises(ConfigError, match="first: no checkpoint yet"):
        read_run(run)
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
        save(run, step, state_of(nn.Linear(step, 1)), val_loss=loss)
    assert [read_run(run, **which).manifest.step for which in ({}, {"step": 1}, {"best": True})] == [3, 1, 2]
    assert read_source(run.checkpoints / "step_000000001")["weight"].shape == (1, 1)
    assert read_source(run.path, best=True)["weight"].shape == (1, 2)
    with pytest.raises(ConfigError, match="no checkpoint of step 4; these are kept: 1, 2, 3"):
        read_run(run, step=4)
    save(run, 4, state_of(nn.Linear(1, 1)))
    assert read_run(run, best=True).manifest.step == 2  # step 4 was saved in the middle of an epoch
    unmeasured = RunDir(run.path.parent / "other")
    unmeasured.path.mkdir()
    save(unmeasured, 1, state_of(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="no checkpoint has a val_loss; name one by --step: 1"):
        read_run(unmeasured, best=True)


@pytest.mark.parametrize("part", ["shard_0000-of-0001.bin", "structure.pt", "manifest.json"])
def test_damaged(run: RunDir, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit is found, and no older weights take the place of those that were asked for."""
    save(run, 1, state_of(nn.Linear(2, 2)))
    path = save(run, 2, state_of(nn.Linear(2, 2))) / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for step in (None, 2):
        with pytest.raises(ConfigError, match=r"first: the checkpoint of step 2 is damaged \(.+\); --step .+: 1$"):
            read_run(run, step)
    path.unlink()
    with pytest.raises(ConfigError, match=f"is damaged \\({part} is missing\\)"):
        read_run(run)


def test_while_it_trains(run: RunDir) -> None:
    """A run deletes checkpoints while they are read. None of them is damaged, and each that is read is whole."""
    stop, store, failed = threading.Event(), CheckpointStore(run.checkpoints), list[BaseException]()

    def trains() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            save(run, step, state_of(nn.Linear(40, step)))
            store.prune(step, keep_last=1, keep_best=0)

    def guarded() -> None:
        try:
            trains()
        except BaseException as error:
            failed.append(error)

    save(run, 1, state_of(nn.Linear(40, 1)))
    training = threading.Thread(target=guarded)
    training.start()
    try:
        for _ in range(30):
            weights = read_run(run)
            assert weights.tensors["weight"].shape[0] == weights.manifest.step
    finally:
        stop.set()
        training.join(DEADLINE_S)
    assert not failed and weights.manifest.step > 1


def test_deleted_while_it_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, at the worst moment: the newest takes its place, but not that of a step that was asked for."""
    save(run, 1, state_of(nn.Linear(1, 1)))
    verify = CheckpointStore.verify

    def deleted(store: CheckpointStore, step: int) -> Manifest:
        manifest = verify(store, step)
        save(run, step + 1, state_of(nn.Linear(1, 1)))
        shutil.rmtree(store.path(step))
        monkeypatch.setattr(CheckpointStore, "verify", verify)
        return manifest

    monkeypatch.setattr(CheckpointStore, "verify", deleted)
    assert read_run(run).manifest.step == 2
    monkeypatch.setattr(CheckpointStore, "verify", deleted)
    with pytest.raises(ConfigError, match="no checkpoint of step 2; these are kept: 3"):
        read_run(run, step=2)


def test_only_the_weights_are_loaded(run: RunDir) -> None:
    """The optimiser's state is twice the model's: with it, a model that fits into memory could not be exported."""
    state = state_of(Tied())
    folder = save(run, 5, state)
    manifest = CheckpointStore(run.checkpoints).manifest(5)
    seen: list[Any] = []
    found = load(folder, manifest, lambda layout: seen.append(layout.structure) or seen[0]["model"])  # type: ignore
    assert equal(found, state["model"])
    assert seen[0]["optimizer"]["state"][0]["exp_avg"].is_meta


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file from elsewhere may hold: weights as training scripts save them. Code in it is never run."""
    monkeypatch.chdir(tmp_path)
    weights = nn.Linear(2, 3).state_dict()
    torch.save({"epoch": 3, "state_dict": weights}, "nested.ckpt")
    assert equal(read_file(Path("nested.ckpt")), weights)
    torch.save({"model": weights, "evil": Evil()}, "evil.pt")
    torch.save(nn.Linear(2, 3), "whole.pt")
    torch.save([1, 2], "list.pt")
    Path("old.pt").write_bytes(pickle.dumps(Evil()))
    Path("text.safetensors").write_text("hello")
    Path("text.pt").write_text("hello")
    Path("empty.pt").touch()
    write(tmp_path / "cut.pt", weights, {})
    Path("cut.pt").write_bytes(Path("cut.pt").read_bytes()[:-300])
    says = {
        "evil.pt": "holds Python objects besides tensors",
        "whole.pt": "holds Python objects besides tensors",
        "old.pt": "holds Python objects besides tensors",
        "list.pt": r"holds no named tensors; save model.state_dict\(\)",
        "text.safetensors": "cannot be read as weights",
        "empty.pt": "cannot be read as weights: torch.save has not written this, or not whole",
        "text.pt": "cannot be read as weights: torch.save has not written this, or not whole",
        "cut.pt": "cannot be read as weights",
        "x.npz": "no such format; weights are in .safetensors, .pt,",
    }
    for name, line in says.items():
        with pytest.raises(ConfigError, match=f"{name}: {line}") as refused:
            read_file(Path(name))
        assert "\n" not in str(refused.value)
    assert not Path("evil").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_killed_while_it_writes(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of that name is the old one until the new one is whole; after an error nothing else is left."""
    path = tmp_path / f"out{suffix}"
    old, new = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
    write(path, old, {})
    replaced: list[Any] = []

    def die(_: int) -> None:
        replaced.append(path.read_bytes())
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(ConfigError, match=r"out.*: cannot be written: .*No space left"):
        write(path, new, {})
    assert replaced == [before] and [file.name for file in tmp_path.iterdir()] == [path.name]
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        write(path, new, {})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_others_may_read_it(tmp_path: Path, name: str) -> None:
    """Colleagues read the file as the user's umask allows. safetensors alone would keep it from everybody else."""
    before = os.umask(0o027)
    try:
        write(tmp_path / name, {"weight": torch.ones(3)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_targets(tmp_path: Path) -> None:
    """A name that cannot work is refused before the checkpoint is read, which may take minutes."""
    for name, says in {
        "out.bin": r"the name must end in \.safetensors or \.pt",
        "no/out.pt": "there is no folder",
        ".": "the name must end in",
    }.items():
        with pytest.raises(ConfigError, match=says):
            check_target(tmp_path / name)
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_target(tmp_path / "a.pt")
