"""An exception of the user's code in the log: its own lines, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from laststep.attempt import user_error
from laststep.loops.registered import __file__ as ours
from tests.support.project import PROJECT

FRAMES = """
import sys
from laststep.attempt import user_error
def train(): raise ValueError("no luck")
try:
    train()
except ValueError as error:
    user_error.silence(error)
    raise
"""


def error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_users_own_lines_come_first(tmp_path: Path) -> None:
    """Five frames of ours above it would push the line that is wrong off the screen."""
    mine: dict[str, object] = {}
    exec(compile("def step(x): return int(x)\n", str(tmp_path / "mine.py"), "exec"), mine)
    (tmp_path / "mine.py").write_text("def step(x): return int(x)\n")
    engine: dict[str, object] = dict(mine)
    exec(compile("def run(): return step('x')\n", ours, "exec"), engine)
    shown = user_error.describe(error_of(lambda: engine["run"]())).splitlines()  # type: ignore[operator]
    assert "test_user_error.py" in shown[1], "this test is a user too"
    error = error_of(lambda: engine["run"]())  # type: ignore[operator]
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    shown = user_error.describe(error).splitlines()
    assert shown[0].startswith("Traceback") and f'"{tmp_path / "mine.py"}", line 1, in step' in shown[1]
    assert shown[-1].startswith("ValueError: invalid literal")


def test_an_error_of_ours_is_complete() -> None:
    """Without a line of the user's the cause is ours or another library's: every frame matters."""
    engine: dict[str, object] = {}
    exec(compile("def run(): raise ValueError('bug')\n", ours, "exec"), engine)
    error = error_of(engine["run"])  # type: ignore[arg-type]
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert "in run" in user_error.describe(error)


def test_python_does_not_print_it_again() -> None:
    """It would be in the log twice."""
    done = subprocess.run([sys.executable, "-c", FRAMES], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
