"""Weights that leave a run and enter another: `evaluate`, `load_weights` and model.weights on trained runs.

A measured accuracy that the weights do not have, or a run that starts from others than it was given, is a wrong result
that looks like any other.
"""

from __future__ import annotations

import json
import shutil
import signal
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torchvision import models

from laststep import load_weights
from laststep.checkpoint.export import read_run, weights_sha256, write
from laststep.cli.main import main
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.initial_weights import fit, read_initial_weights
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.tasks.models import build_model, model_names, pretrained_weights, weights_names
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import EVERYTHING, config, undisturbed_folder, undisturbed_run

UNCHANGED = ("optim.lr=1e-30", "optim.momentum=0")  # no step changes a weight


def trained(ranks: int) -> RunDir:
    """An undisturbed run with every option that carries state, the average of the weights among them."""
    return undisturbed_folder(config(Path("unused"), "unused", ranks, tuple(EVERYTHING)))


def network(classes: int = 3) -> nn.Module:
    """The plain model of these runs."""
    return build_model("convnet", 3, classes, 8, {"width": 160})


def evaluated(capfd: pytest.CaptureFixture[str], run: RunDir, *words: str) -> dict[str, Any]:
    """What `evaluate` prints as JSON."""
    assert main(["evaluate", str(run.path), "--json", "data.workers=0", *words]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_evaluated_as_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    """On the same data the metrics are those of the run's own validation, of one rank to the last bit."""
    for ranks in (1, 2):
        run = trained(ranks)
        recorded = [line for line in read_lines(run.metrics) if "val_loss" in line]
        for which, line in ((["--step", "7"], recorded[0]), ([], recorded[1])):
            found = evaluated(capfd, run, *which)
            expected = {name: value for name, value in line.items() if name.startswith("val_")}
            assert found["recorded"] == expected and found["averaged"]
            if ranks == 1:
                assert found["metrics"] == expected
            assert found["metrics"] == pytest.approx(expected, rel=1e-6)
    raw = evaluated(capfd, run, "--raw")
    assert raw["recorded"] is None and raw["metrics"] != found["metrics"]
    assert main(["evaluate", str(trained(1).path), "data.workers=0"]) == 0
    assert capfd.readouterr().out.endswith(" (as the run itself has measured)\n")


def test_evaluated_without_what_only_training_needs(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that was trained on GPUs, with keys that only they can obey, is evaluated anywhere."""
    run = RunDir(root / "graphs")
    shutil.copytree(trained(1).path, run.path)
    text = run.config.read_text()
    for before, after in (
        ("device: cpu", "device: auto"),
        ("  compile: false", "  compile: true\n  cuda_graphs: true"),
    ):
        assert before in text
        text = text.replace(before, after)
    run.config.write_text(text.replace("  cuda_graphs: false\n", ""))
    assert evaluated(capfd, run, "device=cpu") == {**evaluated(capfd, trained(1)), "run": "graphs"}


def test_evaluated_on_other_data(capfd: pytest.CaptureFixture[str]) -> None:
    """Other data give other metrics, by hand the same; what the checkpoint was trained with cannot be changed."""
    run = trained(1)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = evaluated(capfd, run, "data.args.samples=20", "train.batch_size=20")
    assert found["metrics"] != found["recorded"]
    assert evaluated(capfd, run, "data.args.samples=20", "train.batch_size=5")["metrics"] == pytest.approx(
        found["metrics"]
    )
    for word, says in (
        ("model.name=resnet18", "evaluate changes only data.*, train.batch_size and device"),
        ("data.args.classes=4", f"data.name=fake: 4 classes, but {run.name} was trained on 3"),
    ):
        assert main(["evaluate", str(run.path), "data.workers=0", word]) == 2
        assert says in capfd.readouterr().err
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_custom_loop_evaluates_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """Its validation is in the user's own code, so one line shows how to get the weights there."""
    words = ["task=tests.support.custom_loops.careless", "device=cpu", "launch.tasks_per_node=2"]
    run = undisturbed_folder(Config.load(None, words))
    assert main(["evaluate", str(run.path)]) == 2
    says = f"validates in its own code; load the weights there, by laststep.load_weights('{run.path}')"
    assert says in capfd.readouterr().err
    nn.Linear(2, 1).load_state_dict(load_weights(run.path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loaded_into_the_plain_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By name, folder or file, from one rank or from two: what `export` has written is what `load_weights` returns."""
    for ranks in (1, 2):
        run = trained(ranks)
        for options, suffix in (([], ".safetensors"), (["--raw"], ".pt")):
            out = tmp_path / f"{ranks}{suffix}"
            words = ["export", run.name, str(out), f"launch.root={run.path.parent}", *options]
            assert main(words) == 0
            said = capfd.readouterr().out
            assert said.startswith(f"{out}: {run.name}, step 14, epoch 2") and "tensors" in said
            network().load_state_dict(load_weights(out))
        assert weights_sha256(load_weights(run.path, raw=True)) == fingerprint(run)["weights"]
        assert weights_sha256(load_weights(tmp_path / f"{ranks}.pt")) == fingerprint(run)["weights"]
        averaged = weights_sha256(load_weights(tmp_path / f"{ranks}.safetensors"))
        assert averaged == weights_sha256(load_weights(run.path)) != fingerprint(run)["weights"]
    words = ["export", run.name, str(tmp_path / "folder"), "--format", "dcp", f"launch.root={run.path.parent}"]
    assert main(words) == 0
    assert capfd.readouterr().out.startswith(f"{tmp_path / 'folder'}: {run.name}, step 14, epoch 2")
    checkpoint.load(state := network().state_dict(), checkpoint_id=tmp_path / "folder", no_dist=True)
    assert weights_sha256(state) == averaged
    with pytest.raises(ConfigError, match="nowhere: no such run in"):
        load_weights("nowhere")
    with pytest.raises(ConfigError, match=r"nowhere\.pt: no such file"):
        load_weights("nowhere.pt")
    with pytest.raises(ConfigError, match="a step can be chosen of a run only"):
        load_weights(tmp_path / "1.pt", best=True)


@pytest.mark.parametrize("classes", [3, 5])
def test_a_run_starts_from_weights(root: Path, classes: int) -> None:
    """Every rank starts from them, and so does the average. Of another number of classes, the last layer is new."""
    source = trained(1)
    words = [f"model.weights={source.path}", f"data.args.classes={classes}", "train.ema_decay=0.9", "train.max_steps=3"]
    attempt = Attempt(config(root, f"from-{classes}", 2, (*words, *UNCHANGED)))
    assert attempt.wait() == [0, 0], attempt.output()
    said = f"weights: {16 if classes == 3 else 14} of 16 tensors from {source.path}"
    assert said in attempt.output()
    assert ("13.weight, 13.bias left as initialised (classes 3 -> 5)" in attempt.output()) == (classes == 5)
    assert "weights: " not in attempt.logs[1].read_text()  # rank 0 alone says so
    before, after = load_weights(source.path), load_weights(attempt.run.path, raw=True)
    parameters = [name for name, _ in network().named_parameters()]
    equal = [name for name in parameters if torch.equal(before[name], after[name])]
    assert equal == parameters if classes == 3 else equal == parameters[:-2]


def test_a_resumed_run_needs_no_file(root: Path) -> None:
    """The state of a resumed run is in its checkpoint: a file that was moved since then must not end it."""
    path = root / "start.pt"
    write(path, load_weights(trained(1).path), {})
    small = config(root, "moved", 2, (f"model.weights={path}",))
    expected = undisturbed_run(small)
    stopped = Attempt(small, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 2 rank 1"})
    assert stopped.wait() == [128 + signal.SIGTERM] * 2, stopped.output()
    path.unlink()
    assert fingerprint(train(small)) == expected


def test_the_file_has_changed(root: Path) -> None:
    """An attempt that died before its first checkpoint is followed by one that reads the file again. If that is another
    file by then, the log says so."""
    path, record, model = root / "changing.pt", root / "record.json", nn.Linear(2, 3)
    small = Config.load(None, [f"model.weights={path}"])
    write(path, model.state_dict(), {})
    said = [f"weights: 2 of 2 tensors from {path}"]
    for _ in range(2):
        assert read_initial_weights(small, model, record).lines == said
    write(path, nn.Linear(2, 3).state_dict(), {})
    warned = read_initial_weights(small, model, record).lines
    assert warned[0] == said[0] and "WARNING" in warned[1] and "has changed since this run first started" in warned[1]


def test_an_unreadable_file(root: Path) -> None:
    """The line names the key: the user may have typed it long ago, in a file."""
    path = root / "cut.pt"
    path.write_bytes(b"")
    small = config(root, "unreadable", 1, (f"model.weights={path}",))
    with pytest.raises(ConfigError, match=f"^model.weights={path}: cannot be read as weights: "):
        read_initial_weights(small, nn.Linear(2, 3), root / "record.json")


def test_weights_of_another_model() -> None:
    """Only the number of classes may differ: a model that is half random by mistake would train without any error."""
    wanted = network(5).state_dict()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        given = {prefix + name: tensor for name, tensor in network(3).state_dict().items()}
        assert fit(wanted, given, "x").left_out == ["13.weight", "13.bias"]
    good = network(3).state_dict()
    without_count = {name: tensor for name, tensor in good.items() if not name.endswith("num_batches_tracked")}
    assert fit(wanted, without_count, "x").classes == (3, 5)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({name: t for name, t in good.items() if name != "0.weight"}, "this model's 0.weight is not among them"),
        ({}, r"this model's 0\.weight, 1\.weight, 1\.bias and 11 more are not among them"),
        ({**good, "extra": torch.ones(1)}, "extra is not in this model"),
        (build_model("convnet", 3, 5, 8, {"width": 8}).state_dict(), r"0.weight is \(8, 3, 3, 3\) there, \(160, 3, 3"),
        ({**good, "0.weight": torch.ones(161, 3, 3, 3)}, r"0.weight is \(161, 3, 3, 3\) there"),
    ]
    for given, says in wrong:
        with pytest.raises(ConfigError, match=f"x: weights of another model: {says}"):
            fit(wanted, given, "x")
    for given, kind in (({**good, "0.weight": good["0.weight"].long()}, "int64"),
                        ({**good, "0.weight": good["0.weight"].to(torch.complex64)}, "complex64"),
                        ({**good, "0.weight": good["0.weight"].to_sparse()}, "sparse float32")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"x: 0.weight is {kind} there, float32 in this model; convert it"):
            fit(wanted, given, "x")
    assert fit(wanted, {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in good.items()},
               "x").classes == (3, 5)  # fmt: skip
    with pytest.raises(ConfigError, match="weights of another model"):
        fit(nn.Linear(2, 3).state_dict(), nn.Linear(2, 4).state_dict(), "x")  # nothing would be left of it


def test_torchvisions_names() -> None:
    """The names are read from torchvision's source, without importing it: they must be torchvision's own."""
    for name in model_names():
        expected = [] if name == "convnet" else list(models.get_model_weights(name).__members__)
        assert sorted(weights_names(name)) == sorted(expected), name


def test_torchvisions_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, one line says which file to put where; and from there it is taken."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))

    def offline(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ConfigError) as refused:
        pretrained_weights("squeezenet1_1", "DEFAULT", {})
    url = "https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth"
    says = f"put squeezenet1_1-b8a52dc0.pth, from {url}, into {tmp_path}/checkpoints/"
    assert says in str(refused.value) and "\n" not in str(refused.value)
    there = models.squeezenet1_1().state_dict()
    torch.save(there, tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth")
    found = pretrained_weights("squeezenet1_1", "DEFAULT", {})
    fitted = fit(build_model("squeezenet1_1", 3, 10, 32, {}).state_dict(), found, "DEFAULT")
    assert (fitted.left_out, fitted.classes) == (["classifier.1.weight", "classifier.1.bias"], (1000, 10))
    assert weights_sha256(found) == weights_sha256(there)


def test_read_run_and_load_weights_agree() -> None:
    """The folder of one checkpoint is a source too."""
    run = trained(1)
    one = load_weights(run.checkpoints / "step_000000007")
    assert weights_sha256(one) == weights_sha256(read_run(run, step=7).tensors)
