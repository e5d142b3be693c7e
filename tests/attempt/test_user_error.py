"""An exception of the user's code in the log: its own lines, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from laststep.attempt import user_error
from laststep.loops.registered import __file__ as ours
from laststep.records.attempt_record import reason_in
from tests.support.project import PROJECT

HEADER = "Traceback (most recent call last):\n"
CUDA = (
    "RuntimeError: CUDA error: launch failed\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `X`"
)
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


def test_frames_of_others_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine of ten frames are torch's, and push the lines of the user's code off the screen; in each of two tracebacks,
    also that which a loader worker has sent. What has no line of the user's is shown as it is."""
    torch, mine = "/opt/lib/site-packages/torch/nn/module.py", Path(__file__)
    frames = f'  File "{torch}", line 1, in call\n    f()\n  File "{mine}", line 2, in load\n    g()\n    ^^^\n'
    folded = f'  File "{mine}", line 2, in load\n    g()\n    ^^^\n  (1 frame of torch: `'
    user_error.say_error(
        f"rank 1 on n1 failed:\n{HEADER}{frames}KeyError: Caught KeyError in DataLoader worker process 0.\n"
        f"Original {HEADER}{frames}KeyError: 'age'\n"
    )
    said = capsys.readouterr().out
    assert said.count(folded) == 2 and torch not in said and said.endswith("KeyError: 'age'\n"), said
    library = f'{HEADER}  File "{torch}", line 1, in call\n    f()\nOSError: no room\n'
    user_error.say_error(library)
    assert library in capsys.readouterr().out, "an error of a library alone: every frame matters"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            f'rank 0 on n1 failed:\n{HEADER}  File "a.py", line 1, in f\n{CUDA}',
            "RuntimeError: CUDA error: launch failed",
        ),
        (
            f"{HEADER}  a\nKeyError: 1\n\nThe above exception was the direct cause ...\n\n{HEADER}  b\nOSError: 2",
            "OSError: 2",
        ),
        ("rank 0 on n1 failed:\noptim.lr=-1: must be positive", "optim.lr=-1: must be positive"),
        ("rank 2 on n1: gone (killed)\nrank 0 on n1 lost contact: closed", "rank 2 on n1: gone (killed)"),
        (
            "rank 0 on n1 failed:\n" + HEADER + "  a\nValueError: bad\nstep 9 cannot be saved: no rank holds it",
            "ValueError: bad",
        ),
        (None, ""),
    ],
)
def test_the_first_line_that_matters(error: str | None, reason: str) -> None:
    """`status` has one line for it. The last line of CUDA's text is advice about an environment variable."""
    assert reason_in(error) == reason


def test_torchrun_ends_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last screen names the rank that failed first, and without a file of ours says only `exitcode: 1`."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    user_error.write_for_torchrun(f'rank 1 on n1 failed:\n{HEADER}  File "/me/own.py", line 3, in f\nKeyError: 1')
    first, later = ProcessFailure(1, 11, 1, str(tmp_path / "error.json")), ProcessFailure(0, 10, 1, "")
    later.timestamp += 1
    root_cause = str(ChildFailedError("train", {0: later, 1: first})).partition("Root Cause")[2]
    assert "rank 1 on n1 failed: KeyError: 1 (own.py, line 3, in f)" in root_cause


def test_python_does_not_print_it_again() -> None:
    """It would be in the log twice."""
    done = subprocess.run([sys.executable, "-c", FRAMES], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
