"""task=language: it resumes exactly, on the data that it began with, and its figures mean what they say."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.tasks.language import Language
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.tasks.language_tasks import TINY, make_texts

CLASSICS = ("task=language", "data.name=classics", "data.args.window=32", *TINY)


def config(tmp_path: Path, name: str, *words: str) -> Config:
    """A small model on a mixture of two sources, on two ranks: about ten steps an epoch."""
    size = ("data.args={window: 16, mask_documents: true, sources: {web: 0.6, books: 0.4}}", "train.batch_size=8")
    optim = ("optim.name=adamw", "optim.lr=0.003", "optim.schedule=wsd", "optim.decay_norms_and_biases=false")
    more = ("optim.clip_norm=1", "args.z_loss=0.001", "train.epochs=2", "train.accumulate=2", "train.log_every=3")
    place = (f"launch.root={tmp_path}", f"launch.name={name}", "launch.tasks_per_node=2", f"data.root={tmp_path}/data")
    return Config.load(None, ["data.name=tokens", "task=language", *TINY, *size, *optim, *more, *place, *words])


def test_exact_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Stopped within an epoch, then killed within one: the same weights, and the same line for each step. Then the data
    are made anew from changed text, which neither the command nor a rank accepts."""
    make_texts(tmp_path / "data", web=900, books=400)
    calm = train(config(tmp_path, "calm"))
    expected = fingerprint(calm)
    disturbed = "task=tests.tasks.language_tasks.Disturbed"
    for words, codes in (("SIGTERM 4", [143, 143]), ("SIGKILL 5", None)):
        attempt = Attempt(config(tmp_path, "disturbed", disturbed), {"LASTSTEP_TEST_SIGNAL": words})
        found = attempt.wait()
        assert found == codes or (codes is None and found[1] == -signal.SIGKILL), attempt.output()
    run = train(config(tmp_path, "disturbed"))
    assert fingerprint(run) == expected
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0, 0, 0], attempt.output()
    assert reasons(run)[-1] == "finished"

    steps = [line for line in read_lines(run.metrics) if "time" in line]
    assert all(math.isclose(line["perplexity"], math.exp(line["loss"])) for line in steps)
    epoch = len(steps) // 2
    assert steps[0]["tokens"] == 8 * 16 and steps[epoch - 1]["tokens"] * 2 == steps[-1]["tokens"]

    capfd.readouterr()
    assert main(["generate", str(calm.path), "--prompt", "abc", "--tokens", "20"]) == 0
    written = capfd.readouterr().out
    assert written.startswith("abc") and len(written) > 5

    web = tmp_path / "data" / "web.jsonl"
    web.write_text(web.read_text().replace("a", "b"))
    for file in (tmp_path / "data" / "web").iterdir():
        file.unlink()
    main(["prepare", str(web), str(tmp_path / "data" / "web"), "--validation", "0.3"])
    capfd.readouterr()
    assert main(["resume", str(calm.path), "train.epochs=3", "--local"]) == 2
    says = "data.name=tokens: the data have changed since the run began (fingerprint "
    assert capfd.readouterr().err.startswith(f"error: {says}")
    refused = Attempt(config(tmp_path, "calm", "train.epochs=3"))
    assert refused.wait() == [1, 1] and says in refused.output()


def test_no_text_from_other_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, not a traceback of tensors that do not fit."""
    folder = tmp_path / "digits"
    folder.mkdir()
    Config.load("mnist", [f"launch.root={tmp_path}", "launch.name=digits"]).save(folder / "config.yaml")
    assert main(["generate", str(folder)]) == 2
    says = "error: digits: task=classification is no language model; generate needs task=language\n"
    assert capfd.readouterr().err == says


def task(*words: str) -> Language:
    return Language(Config.load(None, [*CLASSICS, *words]))


def test_bits_per_byte() -> None:
    """What a uniform guess needs: 8 bits for each byte, whatever a token is."""
    language = task()
    line = {"epoch": 1, "step": 5, "val_loss": math.log(256)}
    found = language.derived(line, 40, 1)
    assert math.isclose(found["val_perplexity"], 256)
    # The end of a document costs bits, and is no byte of the text.
    assert math.isclose(found["val_bits_per_byte"], 8 * 36501 / 36498)
    step = language.derived({"step": 5, "loss": None, "samples_per_s": 10.0, "time": 1.0}, 40, 1)
    assert step == {"tokens": 1280, "tokens_per_s": 320.0}, "a loss that is not finite has no perplexity"


def test_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the peak of all GPUs; none without a GPU that is known."""
    language = task()
    line = {"step": 1, "loss": 1.0, "samples_per_s": 1e6, "time": 1.0}
    assert "mfu" not in language.derived(line, 8, 2)
    language._peak_flops = 1e14
    assert language.derived(line, 8, 2)["mfu"] == round(32e6 * language.size.flops_per_token(32) / 2e14, 4)


def test_a_step() -> None:
    """An untrained model guesses uniformly; the z-loss is part of what is minimised, not of what is validated; weight
    decay spares norms and the embedding."""
    plain, with_z = task("optim.decay_norms_and_biases=false", "optim.weight_decay=0.1"), task("args.z_loss=0.01")
    torch.manual_seed(0)
    model = plain.model()
    train_set, _ = plain.datasets()
    batch = plain.on_device([train_set[99][0][None]])
    loss = plain.step(model, batch)["loss"]
    assert abs(float(loss.detach()) - math.log(256)) < 0.1
    z_loss = with_z.step(model, batch)["loss"] - loss
    assert abs(float(z_loss.detach()) - 0.01 * math.log(256) ** 2) < 0.02
    assert torch.equal(with_z.step(model.eval(), batch)["loss"], loss)
    decayed, spared = plain.optimizer(model).param_groups
    assert spared["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    assert {tuple(p.shape) for p in spared["params"]} == {(256, 32), (32,)}
    assert {p.ndim for p in decayed["params"]} == {2} and len(decayed["params"]) == 2 * 7
    assert plain.fingerprint() == task("data.args.window=64").fingerprint()


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"args\.zloss: task=language does not read it; did you mean z_loss"):
        task("args.zloss=0.1")
    with pytest.raises(ConfigError, match=r"args\.z_loss=2: must be at least 0 and below 1"):
        task("args.z_loss=2")
