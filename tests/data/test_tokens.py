"""Token files: what `prepare` makes of text, also after an interruption, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from laststep.cli.main import main
from laststep.config.errors import ConfigError
from laststep.data import token_writer
from laststep.data.token_writer import Piece, read_pieces
from laststep.data.tokens import TRAIN, VALIDATION, Bytes, TokenFolder
from tests.support.needs import require_package
from tests.support.project import PROJECT

DOCUMENTS = ["Alice was beginning", "", "to get\nvery tired", "é of sitting"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with texts."""
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").write_text("".join(f"line {number} é\n" for number in range(100)))
    Path("lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in DOCUMENTS))
    return tmp_path


def opened(name: str = "out") -> TokenFolder:
    return TokenFolder.open(Path(name), "data.root")


def text_of(folder: TokenFolder, part: str) -> str:
    stream = folder.stream(part)
    return folder.tokenizer("data.root").decode(stream.read(0, len(stream)).tolist())


def refusal(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which `prepare` refuses these words."""
    assert main(["prepare", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_every_byte_of_the_text(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every document is there once, in order, its end marked, and the end of each file is held out at a line's end."""
    assert main(["prepare", "plain.txt", "lines.jsonl", "out", "--validation", "0.3"]) == 0
    folder = opened()
    lines, train = Path("plain.txt").read_text(), text_of(folder, TRAIN)
    first, *others = train.split("\0")
    held, *others_held = text_of(folder, VALIDATION).split("\0")
    assert first + held == lines and first.endswith("\n") and 25 <= held.count("\n") <= 30
    assert [*others[:-1], *others_held[:-1]] == DOCUMENTS
    assert folder.stream(TRAIN).text_bytes + folder.stream(VALIDATION).text_bytes == len(
        (lines + "".join(DOCUMENTS)).encode()
    )
    assert folder.fingerprint[:12] in capfd.readouterr().out


def test_positions_restart_at_each_document(here: Path) -> None:
    """A mask between documents is made of these, so a wrong one lets a model see its neighbours."""
    assert main(["prepare", "lines.jsonl", "plain.txt", "out", "--validation", "0"]) == 0
    stream = opened().stream(TRAIN)
    ends = [len(text.encode()) + 1 for text in DOCUMENTS]
    expected = numpy.concatenate([numpy.arange(size) for size in (*ends, 50)])
    assert stream.positions(0, len(expected)).tolist() == expected.tolist()
    assert stream.positions(5, 25).tolist() == [*range(15), *expected[20:25]]


@pytest.mark.parametrize("moment", ["encode", "replace", "note"])
def test_an_interruption_leaves_nothing_that_looks_whole(
    here: Path, moment: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed at any moment, `prepare` continues when typed again: the finished source is not read again, the other one
    is made anew, and the result is that of an undisturbed start. Until then nobody can train on half of it."""
    words = ["prepare", "plain.txt", "lines.jsonl"]
    assert main([*words, "calm"]) == 0
    calls = 0

    def interrupted(call: Any) -> Any:
        def counted(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == {"encode": 3, "replace": 5, "note": 3}[moment]:
                raise KeyboardInterrupt
            return call(*args, **more)

        return counted

    with monkeypatch.context() as patched:
        if moment == "encode":
            patched.setattr(Bytes, "encode", interrupted(Bytes.encode))
        elif moment == "replace":
            patched.setattr(Path, "replace", interrupted(Path.replace))
        else:
            patched.setattr(os, "fsync", interrupted(os.fsync))
        assert main([*words, "out"]) == 130
    with pytest.raises(ConfigError, match="out is no complete folder of token files; make one: `"):
        opened()
    read: list[str] = []
    with monkeypatch.context() as patched:

        def noted(path: Path, held_out: float) -> Iterator[Piece]:
            read.append(path.name)
            return read_pieces(path, held_out)

        patched.setattr(token_writer, "read_pieces", noted)
        assert main([*words, "out"]) == 0
    assert read == (["lines.jsonl"] if moment != "note" else ["plain.txt", "lines.jsonl"])
    assert opened().fingerprint == opened("calm").fingerprint
    files = [sorted(path.name for path in Path(name).iterdir()) for name in ("out", "calm")]
    assert files[0] == files[1]
    assert main([*words, "out"]) == 0, "typed once more, it finds all done"


def test_a_tokenizer_and_parquet(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Text comes back as it was from the tokens of any tokenizer, which the folder keeps; another one is refused."""
    for package in ("tokenizers", "pyarrow"):
        require_package(package)
    from pyarrow import parquet, table
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet, end = pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=[end], show_progress=False)
    made.train_from_iterator(DOCUMENTS, trainer)
    made.save("mine.json")
    parquet.write_table(table({"text": DOCUMENTS}), "rows.parquet")
    assert main(["prepare", "--tokenizer", "mine.json", "plain.txt", "rows.parquet", "out", "--validation", "0"]) == 0
    folder = opened()
    assert text_of(folder, TRAIN) == Path("plain.txt").read_text() + "".join(DOCUMENTS)
    assert folder.vocabulary.dtype == numpy.uint16 and len(folder.stream(TRAIN)) < folder.stream(TRAIN).text_bytes
    assert "tokenizer mine.json (2" in capfd.readouterr().out

    text = json.loads(Path("out/tokenizer.json").read_text())
    Path("out/tokenizer.json").write_text(json.dumps(text | {"version": "1.0"}))
    with pytest.raises(ConfigError, match=r"out/tokenizer.json does not fit the data: they were made by another"):
        folder.tokenizer("data.root")
    parquet.write_table(table({"words": ["a"]}), "words.parquet")
    assert "words.parquet: has no column 'text', but words" in refusal(capfd, "words.parquet", "other")
    Path("no.parquet").write_text("PAR1")
    assert "no.parquet: is no parquet file, or a damaged one: " in refusal(capfd, "no.parquet", "third")


def test_prepare_imports_no_torch(here: Path) -> None:
    """Text is often prepared on machines without a GPU or much memory."""
    code = (
        "import sys; from laststep.cli.main import main; main(['prepare', 'plain.txt', 'out'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(PROJECT)})


def test_wrong_input(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, which names the file and what to do."""
    Path("bad.jsonl").write_text('{"text": "good"}\n{"words": 1}\n')
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    Path("wrong.json").write_text("{}")
    for name in ("tokenizers", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    wrong = {
        ("nowhere.txt", "out"): "nowhere.txt: cannot be read: No such file or directory",
        (".", "out"): ".: is a folder; name the files in it, e.g. ./*.txt",
        ("bad.jsonl", "out"): "bad.jsonl, line 2: must be a JSON object with a string 'text'",
        ("latin.txt", "out"): "latin.txt: is not UTF-8 text",
        ("plain.txt", "out", "--validation", "1"): "--validation 1: must be at least 0 and below 1",
        ("plain.txt", "plain.txt"): "plain.txt: cannot be written: File exists",
        ("plain.txt", "out", "--tokenizer", "wrong.json"): "needs the tokenizers library: pip install tokenizers",
        ("plain.txt", "out", "--tokenizer", "nowhere"): "--tokenizer nowhere: cannot be read: No such file",
        ("some.parquet", "out2"): "some.parquet: reading parquet needs pyarrow: pip install pyarrow",
        ("plain.txt",): "the following arguments are required: OUT",
    }
    Path("some.parquet").write_text("PAR1")
    for words, says in wrong.items():
        assert says in refusal(capfd, *words)
    assert main(["prepare", "plain.txt", "done"]) == 0
    capfd.readouterr()
    assert "done: holds token files of other texts or options" in refusal(capfd, "lines.jsonl", "done")
    file = next(Path("done").glob("*.train.tokens"))
    file.write_bytes(file.read_bytes()[:-1])
    assert "train.tokens is missing or not whole; prepare the texts again" in refusal(capfd, "plain.txt", "done")
