"""`launch.py logs`: all ranks in one stream, merged by time, across restarts and midnight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.rundir import RunDir
from laststep.runs.run_folders import PROJECT
from laststep.runs.run_logs import MergedLogs
from tests.support.commands import Screen
from tests.support.records import ended_attempt

HEAD = "[laststep {at}] attempt begins on 2026-11-21: rank {rank} of 2 on n1 (slurm, job 7, restart {restart})"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.config.write_text("{}\n")
    run.submissions.write_text('{"job_id": "7", "time": 0}\n')
    (run.logs / "8_0_log.out").write_text("[laststep 10:00:00] of another run of the same sweep\n")
    return run


def says(run: RunDir, rank: int, *lines: str, end: str = "\n") -> None:
    """A rank writes to its log."""
    with (run.logs / f"7_{rank}_log.out").open("a") as file:
        file.write("\n".join(lines) + end)


def texts(logs: MergedLogs, whole: bool = True) -> list[tuple[int, str]]:
    return [(line.rank, line.text.rpartition("] ")[2]) for line in logs.read(whole)]


def test_merged_in_time_order(run: RunDir) -> None:
    """A line without a time stays behind the line that it followed."""
    says(
        run,
        0,
        HEAD.format(at="10:00:00", rank=0, restart=0),
        "[laststep 10:00:05] a",
        "user's",
        "[laststep 10:00:09] d",
    )
    says(run, 1, HEAD.format(at="10:00:01", rank=1, restart=0), "[laststep 10:00:07] c", "Traceback")
    merged = texts(MergedLogs(run))[2:]
    assert merged == [(0, "a"), (0, "user's"), (1, "c"), (1, "Traceback"), (0, "d")]


def test_past_midnight_and_submitits_own_lines(run: RunDir) -> None:
    """Our lines have no date: the next day's first minutes must not come before the last of this day."""
    says(run, 0, "submitit INFO (2026-11-21 23:59:50,120) - Starting with JobEnvironment", "[laststep 23:59:59] a")
    says(run, 0, "[laststep 00:00:03] c")
    says(run, 1, "submitit INFO (2026-11-22 00:00:01,500) - b")
    assert [text.rpartition(" - ")[2] for _, text in texts(MergedLogs(run))][1:] == ["a", "b", "c"]


def test_read_on_and_on(run: RunDir) -> None:
    """Each line is read once and whole, and new files are found."""
    logs = MergedLogs(run)
    assert texts(logs, whole=False) == []
    says(run, 0, "[laststep 10:00:00] a", "[laststep 10:0", end="")
    assert texts(logs, whole=False) == [(0, "a")]
    says(run, 0, "0:01] b")
    says(run, 1, "[laststep 10:00:01] c", "half", end="")
    assert texts(logs, whole=False) == [(0, "b"), (1, "c")]
    assert texts(logs) == [(1, "half")]


@pytest.mark.parametrize("in_place", [False, True])
def test_one_rank_one_attempt(run: RunDir, in_place: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A requeued job appends to the same files, and so do ranks that start again in the same allocation; submitit's
    first line of a start belongs to the new attempt."""
    for restart in range(2):
        for rank in range(2):
            says(run, rank, f"submitit INFO (2026-11-21 1{restart}:00:00,1) - Starting with x")
            says(run, rank, HEAD.format(at=f"1{restart}:00:01", rank=rank, restart=restart), f"says {rank} {restart}")
    records = [ended_attempt(attempt=4 + n, restart=n * (not in_place), reason="failed") for n in range(2)]
    run.attempts.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["logs", str(run.path), "--rank", "1", "--attempt", "5", "--all"]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first == "  1 | submitit INFO (2026-11-21 11:00:00,1) - Starting with x" and last == "  1 | says 1 1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "3"], "--rank 3: no such log; logs so far: 0"),
        (["--attempt", "2"], "--attempt 2: no such attempt; attempts so far: none"),
        (["--rank", "x"], "argument --rank: invalid int value: 'x'"),
    ],
)
def test_nothing_of_that_kind(run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which ranks or attempts there are."""
    says(run, 0, "[laststep 10:00:00] a")
    assert main(["logs", str(run.path), *words]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_file_keeps_its_order(run: RunDir) -> None:
    """The lines of one rank keep their order when a clock is set back, or is slow on the next host."""
    says(run, 0, "submitit INFO (2026-11-21 10:00:09,000) - a", "submitit INFO (2026-11-21 10:00:01,000) - b")
    says(run, 1, "submitit INFO (2026-11-21 10:00:05,000) - c")
    assert [text.rpartition(" - ")[2] for _, text in texts(MergedLogs(run))] == ["c", "a", "b"]


def test_larger_than_memory(run: RunDir) -> None:
    """The logs of weeks of a large run are gigabytes: only a small part of each file is in memory at a time, and no
    part of a line that does not end, such as a progress bar's."""
    long = f"[laststep 10:00:00] {'.' * 100_000}"
    for rank in range(2):
        says(run, rank, *[long] * 60, "bar" * 2_000_000)
    tracemalloc.start()
    lengths = [len(line.text) for line in MergedLogs(run).read(whole=True)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lengths.count(len(long)) == 2 * 60 and sum(lengths) == 2 * (60 * len(long) + 6_000_000)
    assert peak < sum(lengths) / 5


def test_nobody_reads_on(run: RunDir) -> None:
    """`launch.py logs RUN | head` is what people type: it ends at once, however much there is, without a traceback."""
    says(run, 0, *(f"[laststep 10:00:00] {number}" for number in range(50_000)))
    os.truncate(run.logs / "7_0_log.out", 1 << 40)  # a terabyte, of which nothing is on the disk
    command = f"{sys.executable} {PROJECT / 'launch.py'} logs {run.path} | head -n 2"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\n") == 2 and done.stderr == ""


def test_status_is_watched(run: RunDir) -> None:
    """On a terminal the table is kept up to date until Ctrl-C."""
    command = [sys.executable, str(PROJECT / "launch.py"), "status", "--watch", f"launch.root={run.path.parent}"]
    screen = Screen(command, 80, 24, dict(os.environ))
    screen.shows("samples/s")
    run.metrics.write_text('{"step": 4711, "epoch": 1, "loss": 1.0, "samples_per_s": 9, "time": 1}\n')
    screen.shows("4711")
    screen.presses("\x03")
    lines, status = screen.left()
    assert status == 130 and any("4711" in line for line in lines), "the last table stays"


def test_only_a_terminal_is_watched(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file it would write control characters without end."""
    assert main(["status", "--watch", f"launch.root={run.path.parent}"]) == 2
    assert capsys.readouterr().err.startswith("error: --watch: keeps a table on a terminal")
