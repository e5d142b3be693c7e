"""The live log of --local and --follow: every line for a pipe, a few progress lines a second for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laststep.rundir import RunDir
from laststep.runs.run_logs import LiveLog, LogFilter


def step(number: int) -> bytes:
    """A progress line, as rank 0 writes it."""
    return f"[laststep 10:00:00] step {number}/1000  epoch 1  loss 0.5000  9 samples/s  0:01 left\n".encode()


EPOCH = b"[laststep 10:00:00] epoch 1  step 100  train_loss 0.5000\n"


def numbers(lines: list[bytes]) -> list[int]:
    """The steps of progress lines."""
    return [int(line.split(b"] step ")[1].split(b"/")[0]) for line in lines]


def test_a_few_progress_lines_a_second() -> None:
    """1,000 steps in ten seconds, a line each, read twenty times a second: four a second are shown, the last too."""
    progress = LogFilter(lambda: 80)
    shown: list[bytes] = []
    for poll in range(200):
        new = b"".join(step(number) for number in range(5 * poll + 1, 5 * poll + 6))
        shown += progress.pass_on(new, now=100 + poll / 20)
    shown += progress.rest()
    assert 38 <= len(shown) <= 42
    assert numbers(shown) == sorted(numbers(shown))
    assert shown[-1] == step(1000)
    assert progress.rest() == []


def test_no_other_line_is_dropped() -> None:
    """Warnings, epochs and the user's own lines, in the order of the log, each after the newest progress line."""
    progress = LogFilter(lambda: 80)
    assert list(progress.pass_on(step(1), now=100)) == [step(1)]
    others = [EPOCH, b"loss step 3/4\n", b"[laststep 10:00:00] saved step 7\n", b"Traceback\n", b"error: bad\n"]
    log = b"".join([step(2), step(3), others[0], step(4), *others[1:], step(5)])
    shown = [*progress.pass_on(log, now=100.1), *progress.rest()]
    assert shown == [step(3), others[0], step(4), *others[1:], step(5)]


def test_a_slow_run_shows_every_line() -> None:
    """A line that is due is shown at once, not with the next one."""
    progress = LogFilter(lambda: 80)
    for number in range(5):
        assert list(progress.pass_on(step(number), now=100.0 + number)) == [step(number)]


def test_a_held_line_is_shown_when_it_is_due() -> None:
    """Also when nothing follows it: the next step may take minutes."""
    progress = LogFilter(lambda: 80)
    assert list(progress.pass_on(step(1) + step(2), now=100)) == [step(2)]
    assert list(progress.pass_on(step(3), now=100.1)) == []
    assert list(progress.pass_on(b"", now=100.3)) == [step(3)]


def test_lines_of_others_are_dropped() -> None:
    """The first error is what --follow ends with, not srun's, submitit's or a peer's complaint of it."""
    others = (
        b"submitit INFO (2026-11-21 09:59:59,1) - Starting with JobEnvironment\n"
        b"[laststep 10:00:00] rank 0 on n1 lost contact: Connection closed by peer\n"
        b"srun: error: n1: task 0: Exited with exit code 1\n"
        b"[rank1]:[W1125 19:08:40.190255979 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=5): reset\n"
        b"Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:783:\n"
        b"frame #0: c10::Error::Error(std::string) + 0x9d (0x7f1a67d5c13d in /lib/libc10.so)\n"
        b"<omitting python frames>\n"
    )
    oom = b"slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0\n"
    for columns in (None, lambda: 80):
        shown = LogFilter(columns)
        assert [*shown.pass_on(others + oom + others[:9], now=100), *shown.pass_on(others[9:], now=101)] == [oom]


def test_half_a_line() -> None:
    """The log may be read while a line is written; a user's unfinished line is shown at once, ours when it is whole."""
    progress = LogFilter(lambda: 80)
    assert list(progress.pass_on(b"10%", now=100)) == [b"10%"]
    assert list(progress.pass_on(step(1)[:30], now=101)) == []
    assert list(progress.pass_on(step(1)[30:], now=102)) == [step(1)]
    assert [*progress.pass_on(step(2)[:30], now=103), *progress.rest()] == [step(2)[:30]]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (150, "epoch 10  loss 0.1234  lr 0.05  grad norm 1.25  12,345 samples/s  1h 02m left"),
        (80, "epoch 10  loss 0.1234  lr 0.05"),
        (50, "loss 0.1234"),
        (20, "loss 0.1234"),
    ],
)
def test_a_progress_line_fits_the_terminal(columns: int, shown: str) -> None:
    """At 80 columns a wrapped line per step would double the log. What is left out stands in the bar; the step and the
    loss stay on any terminal."""
    whole = "epoch 10  loss 0.1234  lr 0.05  grad norm 1.25  12,345 samples/s  1h 02m left"
    begin = "[laststep 10:00:00] step 1234/5678  "
    lines = list(LogFilter(lambda: columns).pass_on(f"{begin}{whole}\n".encode(), now=100))
    assert lines == [f"{begin}{shown}\n".encode()]


ERROR = (
    b"[laststep 10:00:01] rank 1 on n1 failed:\nTraceback (most recent call last):\n"
    b'  File "own.py", line 7, in step\n    raise ValueError("bad")\nValueError: bad\n'
)


@pytest.mark.parametrize("columns", [None, lambda: 80])
def test_the_error_of_the_last_attempt_comes_last(columns: Callable[[], int] | None) -> None:
    """Below it stand only the commands that go on from it; above it nobody looks. One that a restart follows is shown
    before what the next attempt prints."""
    shown = LogFilter(columns)
    saved, begins = b"[laststep 10:00:02] rank 0 saved step 4 alone\n", b"[laststep 10:00:03] attempt begins on "
    begins += b"2026-11-25: rank 0 of 2 on n1\n"
    log = ERROR + saved + begins + ERROR + saved
    lines = [*shown.pass_on(log[:30], now=100), *shown.pass_on(log[30:], now=101)]
    assert b"".join(lines) == saved + ERROR + begins + saved
    assert b"".join(shown.rest()) == ERROR and shown.rest() == []
    said = b"error: step 5: the loss is not finite\n"
    lines = [*shown.pass_on(said + saved + said, now=102), b"|", *shown.rest()]
    assert b"".join(lines) == said + saved + b"|" + said, "one that explains itself in one line"


@pytest.mark.parametrize("terminal", [False, True])
def test_pipe_and_terminal(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets the whole log; a terminal misses progress lines only, and sees the last one."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    path = run.logs / "0_log.out"
    with LiveLog(run, path) as log:
        log.update()
        for number in range(1, 101):
            with path.open("ab") as file:
                file.write(step(number) + (EPOCH if number == 50 else b""))
            log.update()
    shown = capsys.readouterr().out
    assert "epoch 1  step 100" in shown and "step 100/1000" in shown and "step 50/1000" in shown
    assert shown.count("/1000") < 60 if terminal else shown.count("/1000") == 100
