"""`prove` says "exact" of a script that is, and names the step and the rule of one that is not."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from laststep.cli.main import main
from tests.support.commands import begin, end, launch, refusal
from tests.support.needs import require_package
from tests.support.project import PROJECT, wait_until
from tests.support.runs import SMALL

HERE = ["device=cpu", "launch.hang_timeout_s=60"]
LOOPS = "tests.proof.broken_loops."


def proven(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit status of `prove`, and what it prints."""
    status = main(["prove", *HERE, *words])
    text = capfd.readouterr().out
    print(text)
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("folder")), text
    return status, " ".join(text.split())


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "words",
    [
        [f"task={LOOPS}exact", "--tasks-per-node", "1"],
        [f"task={LOOPS}times"],
        ["task=tests.support.custom_loops.example", "--steps", "10"],
        [*SMALL, "task=classification", "--steps", "10", "model.args.width=8", "train.accumulate=2"],
    ],
    ids=["one-rank", "times", "example", "task"],
)
def test_exact(words: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The example and a Task pass, struck in every kind of place; and so do a loop that finishes by itself, with a
    clock, an iterator and a generator that change nothing, and one that registers a clock's times: a proof that cries
    wolf is not believed. Nothing is left behind."""
    status, text = proven(capfd, *words)
    assert status == 0 and " EXACT " in text, text
    for place in ("the last step of an epoch", "of the validation after", "the first step of an epoch"):
        assert f" {place}" in text, f"no stop in {place}:\n{text}"
    assert "4 stops, 1 killed rank, 5 restarts" in text
    alone = "--tasks-per-node" in words
    assert ("; 0 steps done again" in text) == (not alone), "two ranks rescue every step"
    assert ("even between the undisturbed runs: clock" in text) == alone
    assert not list(tmp_path.glob("laststep-*"))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("accelerate_accumulates", "accelerate"),
        ("dpo", "trl"),
        ("fabric_accumulates", "lightning"),
        ("lightning_whole", "lightning"),
        ("transformers_whole", "transformers"),
    ],
)
def test_accumulation_is_exact(loop: str, package: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A step of two batches, as each framework writes it."""
    require_package(package)
    status, text = proven(capfd, f"task=tests.support.framework_loops.{loop}", "--steps", "8")
    assert status == 0 and " EXACT " in text, text
    assert "1 killed rank" in text and "; 0 steps done again" in text


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (
            "prefetches",
            ["first after a resume: another input of the model", "one that was taken one step earlier"],
        ),
        (
            "accumulates",
            ["step 1 left gradients without an optimizer.step(): where K iterations make one update, write "],
        ),
        ("cycles", ["step 1 drew a batch from an iteration over a DataLoader that goes beyond the step"]),
        ("differs_by_rank", ["the registered state differs between ranks at step 6: meter.loss (rank 1 against"]),
        ("draws", ["from a generator of the script's own", "not registered: noise "]),
        ("draws_in_shares", ["from a generator of the script's own", "not registered: noise "]),
        ("draws_anew", ["NOT DETERMINISTIC", "step 1: another input", "Two undisturbed runs differ"]),
        ("forgets", ["something that is not registered", "not registered: average "]),
        ("Forgetful", ["something that is not registered", "not registered: self.scale "]),
    ],
)
def test_broken_rules(loop: str, said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Each of these loops used to end with other weights and no word. The step and the rule are what a user needs,
    whether the training itself refuses the loop or only the comparison sees it."""
    more = {"Forgetful": ["train.batch_size=4", "optim.lr=0.01"], "draws_in_shares": ["train.shares=4"]}
    status, text = proven(capfd, f"task={LOOPS}{loop}", "--steps", "14", *more.get(loop, []))
    assert status == 1 and " EXACT " not in text.replace("NOT EXACT", ""), text
    for words in said:
        assert words in text, f"{words!r} is missing:\n{text}"


@pytest.mark.usefixtures("forked_ranks")
def test_what_no_weights_depend_on(capfd: pytest.CaptureFixture[str]) -> None:
    """A counter that begins again is another finding than other weights: each is said. Left out by name, the rest is
    exact, and the numbers that nobody registered are still named: a best accuracy that begins again chooses another
    best model."""
    status, text = proven(capfd, f"task={LOOPS}counts", "--steps", "14")
    assert status == 1
    assert "NOT EXACT: weights and inputs exact; seen in metrics, turn in metrics differ" in text
    assert "begin again in each attempt" in text and "--ignore NAME" in text
    status, text = proven(capfd, f"task={LOOPS}counts", "--steps", "14", "--ignore", "seen", "--ignore", "tur*")
    assert status == 0 and " EXACT " in text
    assert "left out by --ignore: seen, tur*" in text
    assert "another number after a resume: " in text and "best (inf instead of 0." in text
    assert "turn" not in text.rpartition("numbers ")[2], "it was left out"


@pytest.mark.usefixtures("forked_ranks")
def test_minutes(capfd: pytest.CaptureFixture[str]) -> None:
    """With no time at all, a run is still stopped and killed once each. What two undisturbed runs would have shown is
    found out when it matters: the clock in the metrics is no finding."""
    status, text = proven(capfd, f"task={LOOPS}exact", "--minutes", "0.01")
    assert status == 0 and " EXACT " in text, text
    assert "1 stop, 1 killed rank, 2 restarts" in text and "for which --minutes left no time" in text
    assert "even between the undisturbed runs: clock" in text


@pytest.mark.usefixtures("forked_ranks")
def test_a_script_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is not taken for an inexact resume: the line of the user's code is printed."""
    status, text = proven(capfd, f"task={LOOPS}fails")
    assert status == 1
    assert "FAILED: the script ends with an error undisturbed" in text and "ValueError: a bug of the user's" in text
    assert "broken_loops.py" in text and " EXACT" not in text


@pytest.mark.usefixtures("forked_ranks")
def test_json(capfd: pytest.CaptureFixture[str]) -> None:
    """For a CI job: the verdict, the first difference and the rule, on stdout alone."""
    assert main(["prove", *HERE, f"task={LOOPS}draws", "--steps", "10", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["verdict"], found["rule"], found["steps"], found["ranks"]) == ("not exact", "generator", 10, 2)
    assert found["first_difference"]["step"] > 1


def test_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the ranks of --local, of which there are two unless the command says otherwise."""
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = launch("prove", *HERE, f"task={LOOPS}draws", "--steps", "10")
    assert done.returncode == 1, done.stderr
    assert "ranks  2 on this machine" in done.stdout and "\nNOT EXACT\n" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, or the end of a CI job, leaves neither files nor ranks behind."""
    words = ["prove", *HERE, f"task={LOOPS}exact"]
    proving = begin(PROJECT, [sys.executable, "launch.py", *words], {"TMPDIR": str(tmp_path)})
    wait_until(lambda: list(tmp_path.glob("*/undisturbed/logs/*_1_log.out")), "no rank has started")
    proving.send_signal(number)
    end(proving, status=128 + number)
    assert not list(tmp_path.iterdir())
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path).encode() in command]


def test_wrong_input(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As for submit: one line, exit status 2, nothing left behind."""
    assert "--steps 3: must be at least 4" in refusal(["prove", "--steps", "3"], capfd, tmp_path)
    assert "--minutes 0: must be positive" in refusal(["prove", "--minutes", "0"], capfd, tmp_path)
    assert "task=nowhere.main" in refusal(["prove", "task=nowhere.main"], capfd, tmp_path)
