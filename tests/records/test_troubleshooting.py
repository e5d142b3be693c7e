"""docs/troubleshooting.md: each situation really logs the lines that the page quotes for it.

A user searches the page for a line of the log. A line that only the page has would help nobody.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from laststep.cli.verbs import VERBS
from laststep.config.config import Config
from laststep.config.keys import fields_of
from tests.attempt.deterministic import SCATTERS, like_on_a_gpu
from tests.support.commands import begin, end
from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.ranks import Attempt
from tests.support.runs import FAULTY, befall, config

PAGE = PROJECT / "docs" / "troubleshooting.md"


def quoted(heading: str) -> list[str]:
    """The log lines that the section with this heading quotes."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "".join(re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)).splitlines()


def pattern(line: str) -> str:
    """A pattern for the line with any times, numbers, hosts and paths, and with or without the module of an error."""
    words = re.split(r"(\bn\d\b|/[\w./-]+(?::\d+)?|\d+(?:[.:]\d+)*)", line)
    return r"^(?:[\w.]+\.)?" + "".join(
        re.escape(word) if number % 2 == 0 else r"[\d.:]+" if word[0].isdigit() else r"[^\s)]+"
        for number, word in enumerate(words)
    )


def fault(what: str, *options: str) -> Callable[[Path], str]:
    """A small run in which this happens to a rank, see tests.support.tasks.Faulty."""
    return lambda root: befall(root, "a", 2, what, *options)[0].output()


def attempt(*options: str, signals: tuple[int, ...] = (), **env: str) -> Callable[[Path], str]:
    """A small run with these options, in this environment."""

    def run(root: Path) -> str:
        ranks = Attempt(config(root, "a", 2, options), env)
        if signals:
            ranks.wait_for("fault: ", rank=1)
            ranks.signal(signal.SIGTERM, *signals)
        return _output(ranks)

    return run


def alone(rank: int) -> Callable[[Path], str]:
    """A rank whose only peer is never started, with shorter timeouts than in a run."""
    short = (
        "from laststep.ranks import group\ngroup.MEETING_S, group.SLOW_MEETING_S = 3.0, 1.0\n"
        "from laststep.trainer import Trainer\n"
    )
    train = "from laststep.config.config import Config\nTrainer(Config.load(None, sys.argv[1:]))()"

    def run(root: Path) -> str:
        words = [f"launch.root={root}", "launch.name=a", "launch.hang_timeout_s=3", "launch.tasks_per_node=2"]
        (root / "a" / "logs").mkdir(parents=True)
        place = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "2", "LOCAL_JOB_NUM_NODES": "1"}
        place |= {"LOCAL_NODEID": "0", "LOCAL_GLOBALID": str(rank), "LOCAL_LOCALID": str(rank)}
        command = [forked_python(), "-c", f"import sys\n{short}{train}", *words]
        said, errors = end(begin(root, command, {f"SUBMITIT_{key}": value for key, value in place.items()}), status=1)
        return said + errors

    return run


def _output(ranks: Attempt) -> str:
    ranks.wait()
    return ranks.output()


SITUATIONS: dict[str, list[Callable[[Path], str]]] = {
    "The start hangs: a rank does not join": [alone(rank=0)],
    "The start hangs: rank 0 does not join": [alone(rank=1)],
    "A rank was killed": [fault("kill step 5 rank 1")],
    "A loader process was killed": [fault("worker step 3 rank 1", "data.workers=1")],
    "The GPU is out of memory": [fault("gpu-memory step 5 rank 1")],
    "A node is out of memory": [fault("memory step 5 rank 1")],
    "Training is slow: it waits for data": [attempt("task=tests.support.tasks.SlowData")],
    "Training is slow: one rank is slower than the others": [
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
    "An operator has no deterministic form": [
        lambda root: _output(Attempt(config(root, "a", 2, (SCATTERS,)), before=like_on_a_gpu))
    ],
    "torch.compile meets many shapes": [attempt("task=tests.support.tasks.ManyShapes", "train.max_steps=12")],
    "The disk is full": [
        attempt("task=tests.support.tasks.FullDisk", "checkpoint.every_steps=2", LASTSTEP_TEST_FULL="4 7")
    ],
}  # fmt: skip


@pytest.mark.parametrize("heading", SITUATIONS)
def test_the_log_says_what_the_page_quotes(heading: str, tmp_path: Path) -> None:
    """Word for word, in the situation that the heading names."""
    log = ""
    for number, provoke in enumerate(SITUATIONS[heading]):
        folder = tmp_path / str(number)
        folder.mkdir()
        log += provoke(folder)
    for line in quoted(heading):
        assert re.search(pattern(line), log, re.MULTILINE), f"{line}\nnot in\n{log}"


def test_every_quoting_section_is_tested() -> None:
    """A section that quotes a log and has no situation here would be untested."""
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert [heading for heading in headings if quoted(heading)] == list(SITUATIONS)


def test_commands_and_keys_of_the_page_exist() -> None:
    """A typing error in a command that should help costs the user's trust."""
    page = PAGE.read_text()
    assert set(re.findall(r"launch\.py (\w+)", page)) <= set(VERBS)
    keys = {key for key, _, _ in fields_of(Config)}
    named = set(re.findall(r"\b(?:launch|train|data|optim|checkpoint)\.[a-z_]+", page)) - {"launch.py"}
    assert named <= keys, named - keys
