"""What `status` shows on a terminal: on a narrow one, the least important gives way, and never a run's state."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from laststep.cli.main import main
from laststep.cli.status_tables import Column, FittedTable
from laststep.records.progress import duration
from laststep.rundir import RunDir
from tests.support.commands import Screen, fake_squeue, plain, refusal
from tests.support.project import PROJECT
from tests.support.records import ended_attempt

LOSS = "ValueError: the loss of step 700 is not finite; lower optim.lr, or skip such steps with train.skip_bad_steps=3"


def make(name: str, job_id: str, *records: dict[str, Any], steps: int = 0, age_s: float = 0.0) -> RunDir:
    """A run in ./runs, so many seconds old, with these attempts and so many steps, 500 an epoch."""
    run = RunDir(Path("runs") / name)
    run.logs.mkdir(parents=True)
    run.config.touch()
    os.utime(run.config, 2 * (time.time() - age_s,))
    run.submissions.write_text(json.dumps({"job_id": job_id, "time": time.time() - 3600}) + "\n")
    for record in records:
        path = run.attempts if record["reason"] else run.attempt_now
        with path.open("a") as file:
            file.write(json.dumps({**record, "job_id": job_id}) + "\n")
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "epoch": 1 + step // 500, "loss": 0.5, "samples_per_s": 64.0, "time": time.time()})
        if step % 500 == 0:
            lines.append({"epoch": step // 500, "step": step, "val_loss": 1 / step, "val_accuracy": 0.9})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.plan.write_text('{"total_steps": 5000, "batch_size": 64}\n')
    return run


def attempt(number: int, reason: str | None, **fields: Any) -> dict[str, Any]:
    """An attempt of twenty minutes on two nodes."""
    start = time.time() - 3600 + 1200 * number
    begun = ended_attempt(attempt=number, start=start, hosts=["node01", "node02"], world_size=8, end_step=700)
    return {**begun, "end": start + 1200 if reason else None, "reason": reason, **fields}


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is between 12 and 13 h: a start of an hour ago has no date, which would take another column's place."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", f"TEST{time.gmtime().tm_hour - 12:+}")  # hours west of Greenwich
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def runs(slurm: Path, here: Path, noon: None) -> Path:
    """34 runs: one at work, the oldest; one that failed, with a long reason, the newest; the others are queued."""
    (slurm / "squeue").write_text(fake_squeue("1", **{f"_{job}": "Priority" for job in (2, *range(10, 40))}))
    make("baseline", "1", attempt(0, None), steps=1300, age_s=500)
    make("wide", "2", age_s=400)
    for number in range(10, 40):
        make(f"scan-lr_0.0{number}-weight_decay_0.0001-seed_{number}", str(number), age_s=300 - number)
    make("nan", "3", attempt(0, "failed", error=f"rank 1 on node02 failed:\nTraceback\n{LOSS}"), steps=700)
    gone = "rank 3 on node02: gone (killed)\nsocket closed"
    make("killed", "4", attempt(0, "lost", error=gone, lost_steps=12), age_s=1)
    return here / "runs"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """A function that types a command on a terminal of so many columns, and returns the lines that it prints."""

    def types(columns: int, *words: str) -> list[str]:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert main(["status", *words]) == 0
        lines = plain(capfd.readouterr().out)
        table = [line for line in lines if not line.startswith(("folder ", "log "))]
        assert max(map(len, table)) <= columns, "a line that wraps tears the table apart"
        return lines

    return types


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_every_state_is_shown(runs: Path, terminal: Any, columns: int) -> None:
    """The state is what the command is called for: it stands after the name, however narrow the terminal is."""
    header, *rows, _ = terminal(columns)
    assert header.split()[:2] == ["run", "state"]
    states = [row.split()[1] for row in rows]
    assert states == ["running", *["queued"] * 31, "failed", "lost"]


def test_the_least_important_gives_way(runs: Path, terminal: Any) -> None:
    """At 80 columns the progress of a run is kept, and its name and reason are cut rather than it is left out."""
    header, first, *_ = terminal(80, "baseline", "wide", "nan")
    assert header.split() == ["run", "state", "step", "epoch", "loss", "left", "job"]
    assert first.split() == ["baseline", "running", "1300/5000", "3", "0.5000", "1h", "01m", "1"]
    (row,) = [line for line in terminal(80) if "d_25" in line]
    assert row.startswith("scan-") and row.endswith("Priority")
    error = "rank 0 on n1 failed:\nTraceback\ntrainer.loops.loop.NotFinite: step 2: the loss is not finite"
    make("deep", "5", attempt(0, "failed", error=error))
    _, row, *_ = terminal(80, "deep", "nan")
    assert "  NotFinite: step 2" in row, "the module of an exception says less than its message"
    header, *_ = terminal(140, "baseline", "wide", "nan")
    assert header.split()[2:] == ["step", "epoch", "loss", "left", "samples/s", "attempts", "lost", "goodput", "job"]


def test_nothing_is_cut_off_in_a_pipe(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A script that reads the table must find whole names and reasons."""
    assert main(["status"]) == 0
    said = capfd.readouterr().out
    assert LOSS in said and "scan-lr_0.010-weight_decay_0.0001-seed_10 " in said and " goodput" in said


def test_which_come_first(runs: Path, terminal: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Among hundreds of queued runs, the few at work are seen at once; the totals say how many others there are."""
    *rows, more, totals = terminal(140, "-n", "2")[1:]
    assert [row.split()[0] for row in rows] == ["baseline", "scan-lr_0.039-weight_decay_0.0001-seed_39"]
    assert (more, totals) == ("... 32 more", "1 running, 31 queued, 1 failed, 1 lost")
    *rows, totals = terminal(80, "--state", "failed,lost")[1:]
    assert {row.split()[0] for row in rows} == {"nan", "killed"}
    assert totals == "1 running, 31 queued, 1 failed, 1 lost", "of all runs, not of those shown"
    assert terminal(80, "--state", "stopped")[0] == "no run is in this state"
    assert main(["status", "--json", "--state", "queued", "-n", "3"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert [one["state"] for one in said] == ["queued"] * 3
    assert all(list(one["time_s"]) == ["training", "queue", "restarts", "lost_steps", "saves"] for one in said)
    assert all(3600 <= one["time_s"]["queue"] < 3700 for one in said), "since they were submitted, an hour ago"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--state", "fialed"], "--state fialed: no such state as 'fialed'; choose from "),
        (["-n", "0"], "-n 0: give a number of runs"),
    ],
)
def test_refused(words: list[str], said: str, runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table without rows would look like an answer."""
    assert refusal(["status", *words], capfd, runs).startswith(said)


def test_one_run(runs: Path, terminal: Any) -> None:
    """Why each attempt failed, at full length, and everything that one would look for next."""
    run = RunDir(runs / "nan")
    run.config.write_text("launch: {gpus_per_node: 4}\n")
    for rank in range(2):
        (run.logs / f"3_{rank}_log.out").touch()
    lines = terminal(80, "nan")
    facts = {line[:13].strip(): line[13:] for line in lines}
    assert facts["log"] == str(run.logs / "3_1_log.out"), "of the rank that failed, not of rank 0"
    assert facts["epoch 1"] == "val_loss 0.0020, val_accuracy 0.9000"
    assert facts["GPU hours"] == "2.67", "twenty minutes on eight GPUs"
    assert facts["attempts"] == "1, no step lost", "goodput leaves out the queue: a second share beside `time`"
    assert facts["time"] == "training 5.8%, restarts 94.2%", "700 steps of 0.1 s in 20 minutes"
    assert facts["started"].endswith(", 1h 00m ago")
    assert facts["folder"] == str(run.path)
    assert f"rank 1 on node02: {LOSS}" in " ".join(line.strip() for line in lines)
    (row,) = [line for line in lines if "node01, node02" in line]
    assert row.split()[:5] == ["0", "failed", "0", "to", "700"] and "20m 00s" in row
    lines = terminal(140, "killed")
    assert any(line.startswith("rank hours") for line in lines), "without GPUs"
    assert any(line.strip() == "rank 3 on node02: gone (killed)" for line in lines)
    assert any("1, 12 steps lost" in line for line in lines)
    assert terminal(80, "baseline")[-1].split()[:2] == ["0", "running"], "an attempt that has not ended"


def test_a_sweep(slurm: Path, here: Path, terminal: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The values that vary and the metric are the reason to look at a sweep. The metric stands in the last line of an
    epoch, far from the end of the file once the next epoch is under way."""
    (slurm / "squeue").write_text("#!/bin/sh\n")
    sweep = RunDir(here / "runs" / "scan")
    sweep.path.mkdir(parents=True)
    varied = {f"scan-lr_{lr}-seed_{seed}": {"optim.lr": lr, "seed": seed} for seed, lr in enumerate((0.1, 0.01))}
    sweep.sweep.write_text("".join(json.dumps({"run": run, **change}) + "\n" for run, change in varied.items()))
    for number, name in enumerate(varied):
        make(name, f"7_{number}", attempt(0, "finished"), steps=900 + 500 * number)
    header, first, second, totals = terminal(80, "--sweep", "scan")
    assert header.split()[:5] == ["run", "state", "lr", "seed", "val_loss"]
    assert first.split()[1:5] == ["finished", "0.01", "1", "0.0010"], "the best one"
    assert second.split()[1:5] == ["finished", "0.1", "0", "0.0020"]
    assert totals == "2 finished"
    assert main(["status", "--sweep", "scan", "--json"]) == 0
    best, _ = json.loads(capfd.readouterr().out)
    assert (best["varied"], best["metric"]) == ({"optim.lr": 0.01, "seed": 1}, {"val_loss": 0.001})
    said = refusal(["status", "--sweep", "scan", "--by", "accuracy"], capfd, here)
    assert said == "--by accuracy: no run of this sweep has this metric; choose from val_loss, val_accuracy"


def test_watch(runs: Path) -> None:
    """The table stays within the screen, scrolls, and remains there at the end; the terminal is as it was before."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    screen = Screen([sys.executable, str(PROJECT / "launch.py"), "status", "--watch"], 80, 12, env)
    clock, _, header, first, *_, last = screen.shows("... 26 more")
    assert clock[2:6:3] == "::" and clock.endswith("  1 running, 31 queued, 1 failed, 1 lost")
    assert header.startswith("run ") and first.startswith("baseline ")
    assert last.endswith("arrows scroll, q ends")
    screen.presses("\x1b[B")
    assert screen.shows("... 1 above   ... 25 more")[3].startswith("scan-")
    screen.presses("G")
    assert screen.shows("... 26 above")[2] == header
    screen.presses("g")
    screen.shows("... 26 more")
    screen.presses("q")
    lines, status = screen.left()
    assert status == 0
    assert lines[2:4] == [header, first] and lines[-1] == "... 26 more"


def test_a_column_gives_way_before_a_cell_is_cut() -> None:
    """A name is cut in its middle: the runs of a sweep begin alike."""
    columns = [
        Column("run", [Text("scan-learning_rate_0.1-seed_12")], left=True, least=12, cut_middle=True),
        Column("state", [Text("queued")], left=True),
        Column("loss", [Text("0.5")], gives_way=1),
        Column("empty", [Text("")]),
    ]

    def line(width: int | None) -> str:
        (row,) = FittedTable(columns, width).rows()
        return row.plain

    assert line(None) == "scan-learning_rate_0.1-seed_12  queued   0.5"
    assert line(40) == "scan-learning…_0.1-seed_12  queued   0.5"
    assert line(24) == "scan-lea…seed_12  queued"
    assert line(14) == "sca…12  queued"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0s"), (59.7, "1m 00s"), (750, "12m 30s"), (3725, "1h 02m"), (273_601, "3d 04h")]
)
def test_elapsed_times(seconds: float, said: str) -> None:
    """1:02 could be a time of day, or minutes, or hours."""
    assert duration(seconds) == said
