"""docs/troubleshooting.md: each log line that it quotes is one that the situation really leaves.

A user searches for the line that stands in the log. One that only the documentation has sends nobody anywhere.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attempt.test_rescue import FAULTY, befall
from tests.doctor.test_hello import begin, end
from tests.loops.test_exact import config
from tests.support.project import PROJECT
from tests.support.ranks import Attempt
from trainer.commands.verbs import VERBS
from trainer.config.config import Config
from trainer.config.keys import fields_of

PAGE = PROJECT / "docs" / "troubleshooting.md"


def quoted(heading: str) -> list[str]:
    """The log lines in the section of that heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "".join(re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)).splitlines()


def pattern(line: str) -> str:
    """That line, with any other times, numbers, hosts and paths; an error's name may have its module's before it."""
    words = re.split(r"(\bn\d\b|/[\w./-]+(?::\d+)?|\d+(?:[.:]\d+)*)", line)
    return r"^(?:[\w.]+\.)?" + "".join(
        re.escape(word) if number % 2 == 0 else r"[\d.:]+" if word[0].isdigit() else r"[^\s)]+"
        for number, word in enumerate(words)
    )


def fault(what: str, *options: str) -> Callable[[Path], str]:
    """What befalls a rank of a small run, see tests.support.tasks.Faulty."""
    return lambda root: befall(root, "a", 2, what, *options)[0].output()


def attempt(*options: str, signals: tuple[int, ...] = (), **env: str) -> Callable[[Path], str]:
    """A small run with these options, in this environment."""

    def run(root: Path) -> str:
        ranks = Attempt(config(root, "a", 2, options), env)
        if signals:
            ranks.wait_for("fault: ", rank=1)
            ranks.signal(signal.SIGTERM, *signals)
        ranks.wait()
        return ranks.output()

    return run


def alone(rank: int) -> Callable[[Path], str]:
    """A rank whose only peer is never started, and which has less patience than in a run."""
    short = (
        "from trainer.world import meet\nmeet.MEETING_S, meet.LATE_S = 3.0, 1.0\nfrom trainer.trainer import Trainer\n"
    )
    train = "from trainer.config import Config\nTrainer(Config.load(None, sys.argv[1:]))()"

    def run(root: Path) -> str:
        words = [f"launch.root={root}", "launch.name=a", "launch.hang_timeout_s=3", "launch.tasks_per_node=2"]
        (root / "a" / "logs").mkdir(parents=True)
        place = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "2", "LOCAL_JOB_NUM_NODES": "1"}
        place |= {"LOCAL_NODEID": "0", "LOCAL_GLOBALID": str(rank), "LOCAL_LOCALID": str(rank)}
        command = [sys.executable, "-c", f"import sys\n{short}{train}", *words]
        said, errors = end(begin(root, command, {f"SUBMITIT_{key}": value for key, value in place.items()}), status=1)
        return said + errors

    return run


SITUATIONS: dict[str, list[Callable[[Path], str]]] = {
    "The start hangs: a rank does not come": [alone(rank=0)],
    "The start hangs: rank 0 does not come": [alone(rank=1)],
    "A rank was killed": [fault("kill step 5 rank 1")],
    "A loader process was killed": [fault("worker step 3 rank 1", "data.workers=1")],
    "The GPU's memory is full": [fault("gpu-memory step 5 rank 1")],
    "A node's memory is full": [fault("memory step 5 rank 1")],
    "Training is slow: it waits for data": [attempt("task=tests.support.tasks.SlowData")],
    "Training is slow: one rank holds the others up": [
        attempt("task=tests.support.tasks.Slow", "train.max_steps=12", LASTSTEP_TEST_SLOW="0.1 1.0")
    ],
    "A collective does not end: a rank is stuck": [fault("sleep step 4 rank 1")],
    "scancel, preemption or Ctrl-C while a rank waits in a collective": [
        attempt(LASTSTEP_TEST_SIGNAL="SIGTERM step 5 rank 1"),
        attempt(
            *FAULTY, "launch.grace_s=8", "launch.hang_timeout_s=60", signals=(0, 1),
            LASTSTEP_TEST_FAULT="sleep step 5 rank 1",
        ),
    ],
    "The loss is not finite": [attempt("task=tests.support.tasks.Poisoned")],
    "The disk is full": [
        attempt("task=tests.support.tasks.FullDisk", "checkpoint.every_steps=2", LASTSTEP_TEST_FULL="4 7")
    ],
}  # fmt: skip


@pytest.mark.parametrize("heading", SITUATIONS)
def test_the_log_says_what_the_page_quotes(heading: str, tmp_path: Path) -> None:
    """In the situation that the heading names, and word for word."""
    log = ""
    for number, provoke in enumerate(SITUATIONS[heading]):
        folder = tmp_path / str(number)
        folder.mkdir()
        log += provoke(folder)
    for line in quoted(heading):
        assert re.search(pattern(line), log, re.MULTILINE), f"{line}\nnot in\n{log}"


def test_every_quoted_line_is_provoked() -> None:
    """A section that quotes a log and has no situation would be hearsay."""
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert [heading for heading in headings if quoted(heading)] == list(SITUATIONS)


def test_what_the_page_tells_to_type() -> None:
    """Nobody forgives a typing error in the line that was to help."""
    page = PAGE.read_text()
    assert set(re.findall(r"launch\.py (\w+)", page)) <= set(VERBS)
    keys = {key for key, _, _ in fields_of(Config)}
    named = set(re.findall(r"\b(?:launch|train|data|optim|checkpoint)\.[a-z_]+", page)) - {"launch.py"}
    assert named <= keys, named - keys
