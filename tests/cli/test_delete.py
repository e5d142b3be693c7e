"""delete: asks, and removes a run as a whole or not at all."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from laststep.cli import cancel
from laststep.cli.main import main
from laststep.rundir import RunDir
from laststep.runs.run_status import RunStatus, StatusReader
from tests.support.commands import refusal


class Terminal(io.StringIO):
    """What a user types at a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.fixture
def runs(here: Path) -> Path:
    """The folder of all runs, with two that never started."""
    for name in ("first", "second"):
        (here / "runs" / name / "logs").mkdir(parents=True)
        (here / "runs" / name / "config.yaml").write_text(f"launch: {{name: {name}}}\n")
        (here / "runs" / name / "logs" / "log").write_bytes(b"x" * 1_500_000)
    return here / "runs"


def test_asks_first(runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What would go is shown with its size; anything but yes keeps it."""
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    assert main(["delete", "first"]) == 1
    said = capfd.readouterr().out
    assert "first: created, 1.5 MB in runs/first\n" in said or "1.5 MB in runs/first\n" in said
    assert said.endswith("nothing is deleted\n")
    assert (runs / "first" / "logs" / "log").exists()


def test_yes(runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the runs that were named go, with all that is in them."""
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["delete", "first"]) == 0
    assert capfd.readouterr().out.endswith("first: deleted\n")
    assert [path.name for path in runs.iterdir()] == ["second"]


def test_nobody_to_ask(runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In a script the question has no answer: it is refused, not taken as yes, and --yes is named."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["delete", "first"]) == 2
    assert "add --yes" in capfd.readouterr().err
    assert (runs / "first").exists()
    assert main(["delete", "f*", "second", "--yes"]) == 0
    assert not list(runs.iterdir())


def test_started_again_while_the_question_stood(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody resumes the run between the question and the answer: its job must end first, or the folder stays."""
    asked: list[object] = []

    def answer(_: str) -> str:
        asked.append(_)
        return "y"

    def read(self: StatusReader, of: list[RunDir]) -> list[RunStatus]:
        alive = replace(before(self, of)[0], state="running", job_id="7")
        return [alive if asked else before(self, [run])[0] for run in of]

    before = StatusReader.read
    monkeypatch.setattr(StatusReader, "read", read)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", answer)
    stopped: list[list[RunDir]] = []

    def stop(alive: list[RunDir], reader: StatusReader) -> int:
        stopped.append(alive)
        return 0

    monkeypatch.setattr(cancel, "stop_all", stop)
    assert main(["delete", "first"]) == 2
    assert [run.name for run in stopped[0]] == ["first"], "its job is asked to end"
    assert "first: has just been started again (running); nothing is deleted" in capfd.readouterr().err
    assert (runs / "first" / "logs" / "log").exists()


def test_no_such_run(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A typo deletes nothing, not even the other run that was named."""
    assert "secnd: no such run" in refusal(["delete", "first", "secnd", "--yes"], capfd, runs)


def test_a_run_alone_is_shown(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`laststep RUN` is what people type first: it shows that run, as `status RUN` does."""
    assert main(["status", "first"]) == 0
    shown = capfd.readouterr().out
    assert main(["first"]) == 0
    assert capfd.readouterr().out == shown
