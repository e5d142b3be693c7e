"""The commands that messages tell the user to type: they must work as they are printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laststep import say
from laststep.records.progress import duration


@pytest.mark.parametrize(
    ("started", "typed", "program"),
    [
        ("launch.py", "python launch.py", "launch.py"),
        ("./launch.py", "python launch.py", "launch.py"),
        ("../my code/launch.py", "python '../my code/launch.py'", "launch.py"),
        ("{bin}/laststep", "laststep", "laststep"),
        ("env/bin/laststep", "env/bin/laststep", "laststep"),  # the environment is not activated
        ("laststep/__main__.py", "python launch.py", "launch.py"),  # python -m laststep, in a clone
    ],
)
def test_as_it_was_started(
    started: str, typed: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user copies the command from the message: another name, or a script that is not there, would fail."""
    (tmp_path / "laststep").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(say.COMMAND, raising=False)
    monkeypatch.setattr(sys, "argv", [started.format(bin=tmp_path)])
    assert say.command("status first") == f"{typed} status first"
    assert say.program() == program


def test_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hints in a rank's log name the command with which the user started the run."""
    monkeypatch.setattr(sys, "argv", ["/submitit/core/_submit.py"])
    monkeypatch.setenv(say.COMMAND, "laststep")
    assert say.command("resume first") == "laststep resume first"
    assert say.program() == "laststep"


@pytest.mark.parametrize(
    ("active", "typed", "said"),
    [(True, "python3", "python"), (False, "python3", "python3"), (False, ".venv/bin/python", ".venv/bin/python")],
)
def test_the_same_python(active: bool, typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that is not active, `python` is another one, without torch."""
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    monkeypatch.setattr(sys, "orig_argv", [typed, "launch.py"])
    monkeypatch.setattr(sys, "executable", str((tmp_path if active else tmp_path / "other") / "python3"))
    assert say.command("status") == f"{said} launch.py status"


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), ("1-4", "1-4 ranks"), ("1,000", "1,000 ranks")]
)
def test_counts(number: object, said: str) -> None:
    """ "1 ranks" looks like a bug, and makes the reader doubt the number."""
    assert say.counted(number, "rank") == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0s"), (59.6, "1m 00s"), (250, "4m 10s"), (3600, "1h 00m"), (3899, "1h 04m"), (90_000, "1d 01h")],
)
def test_durations(seconds: float, said: str) -> None:
    """`1:04` may be a minute, an hour or a time of day."""
    assert duration(seconds) == said


def test_a_long_line_on_a_narrow_terminal() -> None:
    """A word that is broken at the edge reads badly, and a command that is broken cannot be copied."""
    said = say.wrapped("error: first: no such run here; `laststep list` shows them, under /a/rather/long/path", 32, 7)
    assert said.splitlines() == [
        "error: first: no such run here;",
        "       `laststep list` shows",
        "       them, under",
        "       /a/rather/long/path",
    ]
    assert say.wrapped("\na\nb", 80) == "\na\nb"
