"""Windows of token streams: every token is trained on, mixtures have their shares, and wrong data are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data.tokens import TRAIN, VALIDATION, Corpus, Mixture
from laststep.tasks import language
from laststep.tasks.language import Windows, open_windows
from tests.tasks.language_tasks import make_texts

SOURCES = "data.args.sources={web: 0.7, books: 0.3}"


def corpus(root: Path, *words: str) -> Corpus:
    return Corpus.open(Config.load(None, ["data.name=tokens", f"data.root={root}", *words]).data)


def test_every_token_is_predicted_once(tmp_path: Path) -> None:
    """Neighbouring windows share the one token that ends the first and begins the second."""
    folder = make_texts(tmp_path, web=500)["web"]
    train = open_windows(corpus(tmp_path / "web", "data.args.window=16"), TRAIN)
    predicted = torch.cat([sample[0][1:] for sample in train])  # type: ignore[attr-defined]
    stream = folder.stream(TRAIN)
    assert predicted.tolist() == stream.read(1, 1 + len(predicted)).tolist()
    assert len(stream) - 17 < len(predicted) < len(stream)


def test_a_mixture(tmp_path: Path) -> None:
    """Sources have the shares of their weights, and no window of any is left out; validation has each window once."""
    make_texts(tmp_path, web=2000, books=300)
    mixed = corpus(tmp_path, "data.args.window=16", SOURCES)
    web, books = mixed.windows(TRAIN)
    mixture = Mixture.of([web, books], mixed.weights)
    drawn = [mixture.window(sample) for sample in range(len(mixture))]
    assert set(drawn) == {(0, number) for number in range(web)} | {(1, number) for number in range(books)}
    assert sum(source == 1 for source, _ in drawn) == round(web / 0.7 * 0.3)
    assert len(Windows(mixed, VALIDATION)) == sum(mixed.windows(VALIDATION))
    assert len(Mixture.of([3, 0], [3, 1])) == 3


@pytest.mark.parametrize("mask", ["true", "false"])
def test_samples_are_the_same_from_memory_and_from_files(
    tmp_path: Path, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two is used depends on the size of the data, and may change nothing else."""
    make_texts(tmp_path, web=700, books=300)
    mixed = corpus(tmp_path, "data.args.window=16", f"data.args.mask_documents={mask}", SOURCES)
    in_memory: Any = open_windows(mixed, TRAIN)
    monkeypatch.setattr(language, "IN_MEMORY_BYTES", 0)
    from_files: Any = open_windows(mixed, TRAIN)
    assert (type(in_memory), type(from_files)) == (TensorDataset, Windows)
    assert len(in_memory) == len(from_files)
    for one, other in ((in_memory[number], from_files[number]) for number in range(len(from_files))):
        assert len(one) == (2 if mask == "true" else 1)
        assert all(map(torch.equal, one, other))


def test_data_that_do_not_fit(tmp_path: Path) -> None:
    """One line each: the key, the value and what to do."""
    make_texts(tmp_path, web=300, books=300)
    shutil.copytree(tmp_path / "books", tmp_path / "changed")
    file = next((tmp_path / "changed").glob("*.train.tokens"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    shutil.copytree(tmp_path / "books", tmp_path / "broken")
    (tmp_path / "broken" / "tokens.json").write_text("{")
    wrong = {
        ("data.args.window=999",): "data.args.window=999: longer than the data: data.root=",
        ("data.args.window=0",): "data.args.window=0: must be a positive integer, in tokens",
        ("data.args.windo=3",): "data.args.windo: tokens has no such option; did you mean window?",
        ("data.args.sources.wbe=1",): "data.args.sources.wbe: ",
        ("data.args.sources.web=0",): "data.args.sources.web=0: must be a weight above 0",
        ("data.name=mnist",): "data.name=mnist: holds images; task=language takes classics or tokens",
        ("data.name=classic",): "data.name=classic: no such data; did you mean classics?",
        (f"data.root={tmp_path}/changed",): "changed/00000-books.train.tokens was changed; prepare the texts again",
        (f"data.root={tmp_path}/broken",): "broken/tokens.json is damaged; prepare the texts again",
        (f"data.root={tmp_path}",): f"{tmp_path} is no complete folder of token files; make one: `",
    }
    for words, says in wrong.items():
        with pytest.raises(ConfigError) as refused:
            corpus(tmp_path / ("" if "sources" in words[0] else "web"), *words)
        assert says in str(refused.value) and "\n" not in str(refused.value)
    index = json.loads((tmp_path / "books" / "tokens.json").read_text())
    index["vocabulary"] |= {"name": "other.json", "sha256": "0" * 64}
    with pytest.raises(ConfigError, match="is damaged"):
        (tmp_path / "books" / "tokens.json").write_text(json.dumps(index))
        corpus(tmp_path, SOURCES, "data.args.window=16")


def test_the_text_that_ships() -> None:
    """A damaged or half-packaged copy would be somebody's first impression."""
    shipped = Corpus.open(Config.load("classics", []).data)
    assert sum(len(shipped.folders[0].stream(part)) for part in (TRAIN, VALIDATION)) == 730522
    assert shipped.folders[0].stream(TRAIN).read(16, 49).tobytes() == b"ALICE'S ADVENTURES IN WONDERLAND\n"
