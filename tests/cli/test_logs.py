"""`launch.py logs`: the lines that one is looking for, and why there are none yet."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from laststep.cli import logs
from laststep.cli.main import main
from laststep.rundir import RunDir
from laststep.runs.run_status import still_prints
from tests.support.commands import fake_squeue
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import ended_attempt

HEAD = "[laststep 10:00:00] attempt begins on 2026-11-21: rank 0 of 1 on n1 (slurm, job 4711, restart 0)"
LOG = [
    "submitit INFO (2026-11-21 09:59:59,1) - Starting with JobEnvironment",
    HEAD,
    "[laststep 10:00:05] step 1/9",
    "[laststep 10:20:00] WARNING: the disk is slow",
    "srun: error: n1: task 0: Killed",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0",
    "ValueError: bad",
]
PARTITIONS = "PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=1:00:00 State=UP TotalNodes=4"
SCONTROL = f"""#!/bin/sh
case "$2" in
job) echo "JobId=4711 Partition=main" ;;
partition) echo "{PARTITIONS}" ;;
*) echo "KillWait                = 30 sec" ;;
esac
"""


@pytest.fixture
def run(slurm: Path, here: Path) -> RunDir:
    """A run whose job is in the queue of a fake Slurm."""
    run = RunDir(here / "runs" / "first")
    run.logs.mkdir(parents=True)
    run.config.write_text("{}\n")
    run.submissions.write_text(json.dumps({"job_id": "4711", "time": time.time()}) + "\n")
    (slurm / "scontrol").write_text(SCONTROL)
    (slurm / "scontrol").chmod(0o755)
    return run


def writes(run: RunDir, rank: int, *lines: str) -> None:
    """A rank writes to its log."""
    with (run.logs / f"4711_{rank}_log.out").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def waits(slurm: Path, reason: str) -> None:
    """The job waits in the queue."""
    (slurm / "squeue").write_text(fake_squeue(_4711=reason))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], [1, 2, 3, 5, 6]),
        (["--all"], range(7)),
        (["--tail", "2"], [5, 6]),
        (["-n", "0"], []),
        (["--grep", "step [0-9]+/|WARN"], [2, 3]),
        (["--since", "2026-11-21T10:00:05"], [2, 3, 5, 6]),
        (["--since", "2026-11-21 10:10", "--grep", "(?i)warning", "-n9"], [3]),
        (["--since", "2026-11-22"], []),
    ],
)
def test_selected_lines(words: list[str], shown: list[int], run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A user looks for one line among thousands; Slurm's own are in the way, unless one says why the run died."""
    writes(run, 0, *LOG)
    assert main(["logs", "first", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [f"  0 | {LOG[number]}" for number in shown]


def test_that_each_rank_begins_is_said_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """With 256 ranks, 256 such lines stand before the first step. A rank's own log has its own; --all has all."""
    others = HEAD.replace("rank 0", "rank 1")
    writes(run, 0, HEAD, "[laststep 10:00:05] step 1/9")
    writes(run, 1, others)
    shown = []
    for words in ([], ["--rank", "1"], ["--all"], ["--grep", "begins"]):
        assert main(["logs", "first", *words]) == 0
        shown.append(capsys.readouterr().out.count("attempt begins"))
    assert shown == [1, 1, 2, 2]


def test_how_long_ago(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """The last minutes are what one asks for most often."""
    for name, minutes in (("old", 20), ("new", 5)):
        writes(run, 0, time.strftime(f"submitit INFO (%F %T,1) - {name}", time.localtime(time.time() - 60 * minutes)))
    assert main(["logs", "first", "--since", "10m", "--all"]) == 0
    assert capsys.readouterr().out.endswith("new\n")


def test_the_end_of_a_long_log(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last lines come at once, although a file of gigabytes takes minutes to read. Ranks that have written at about
    the same time are merged as ever, over midnight too."""
    step = "[laststep {}] step {} " + 80 * "x"
    writes(run, 0, HEAD, *(step.format("23:59:58", number) for number in range(100_000)), "[laststep 00:00:01] last")
    writes(run, 1, *(step.format("18:00:00", number) for number in range(2_000)), "[laststep 00:00:00] last but one")
    after_midnight = time.mktime((2026, 11, 22, 0, 0, 2, 0, 0, -1))
    for log in run.logs.iterdir():
        os.utime(log, (after_midnight, after_midnight))
    began = time.process_time()
    assert main(["logs", "first", "-n", "3"]) == 0
    assert time.process_time() - began < 0.5  # all of it takes 3 s
    shown = [line.replace(80 * "x", "") for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "  0 | [laststep 23:59:58] step 99999 ",
        "  1 | [laststep 00:00:00] last but one",
        "  0 | [laststep 00:00:01] last",
    ]
    assert main(["logs", "first", "-n", "2", "--grep", "attempt begins|last$"]) == 0, "found at the far end, too"
    assert capsys.readouterr().out.splitlines() == [f"  0 | {HEAD}", shown[-1]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--since", "yesterday"],
            "--since: yesterday: must be a time such as 14:30 or 2026-11-22T14:30, or a duration",
        ),
        (["--grep", "("], "--grep: (: not a regular expression: missing ), unterminated subpattern at position 0"),
        (["-n", "-3"], "-3: must be a number of lines"),
        (["-n", "x"], "x: must be a number of lines, such as 20"),
        (["--traceback"], "--traceback: first: no attempt has recorded an error; `"),
        (["--traceback", "--attempt", "3"], "--traceback: first: attempt 3 has recorded no error; `"),
        (["--traceback", "--rank", "0"], "--traceback: prints what is recorded, not the logs: only --attempt goes"),
    ],
)
def test_wrong_words(words: list[str], said: str, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the option and what it takes."""
    assert main(["logs", "first", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_colours(run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal warnings and errors catch the eye; NO_COLOR turns all colours off."""
    writes(run, 0, *LOG)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["logs", "first"])
    out = capsys.readouterr().out
    assert f"\x1b[33m{LOG[3]}\x1b[0m" in out and f"\x1b[31m{LOG[6]}\x1b[0m" in out and f" {LOG[2]}\n" in out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["logs", "first"])
    assert "\x1b" not in capsys.readouterr().out


def test_nothing_to_show_yet(run: RunDir, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty screen would leave open whether the run waits, and for what, or has printed nothing of its own."""
    waits(slurm, "PartitionNodeLimit")
    assert main(["logs", "first"]) == 0
    assert "first: no log yet; queued: PartitionNodeLimit, main has 4 nodes" in capsys.readouterr().err
    writes(run, 0, LOG[0], LOG[4], "slurmstepd-n1: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-11-21T10:20:01 ***")
    assert main(["logs", "first"]) == 0
    assert "3 lines, all of submitit and Slurm: --all shows them" in capsys.readouterr().err


def test_follow_waits_for_the_job(run: RunDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logs RUN -f --rank 0` right after the submission: it says what the job waits for, once, and then follows."""
    monkeypatch.setattr(logs, "POLL_S", 0.01)

    printed, said = io.StringIO(), io.StringIO()  # capsys would lose what is printed while it is read
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", said)
    waits(slurm, "PartitionTimeLimit")
    statuses: list[int] = []
    following = threading.Thread(target=lambda: statuses.append(main(["logs", "first", "-f", "--rank", "0"])))
    following.start()
    wait_until(lambda: "PartitionTimeLimit" in said.getvalue() or not following.is_alive(), "it does not say why")
    writes(run, 0, HEAD, "[laststep 10:00:01] done")
    run.attempts.write_text(json.dumps(ended_attempt(job_id="4711")) + "\n")
    following.join(DEADLINE_S)
    assert statuses == [0] and "[laststep 10:00:01] done" in printed.getvalue()
    assert said.getvalue().splitlines() == [
        "[laststep] first: queued: PartitionTimeLimit, main allows at most 1:00:00",
        "[laststep] first: finished",
    ]


def test_follow_prints_the_last_lines(run: RunDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run is recorded before anything else, so before rank 0 says what the run has come to."""
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    printed, said = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", said)
    writes(run, 0, HEAD, "[laststep 10:00:01] step 9/9")
    looked: list[bool] = []

    def look(folder: RunDir) -> bool:
        looked.append(still_prints(folder))
        return looked[-1]

    monkeypatch.setattr(logs, "still_prints", look)
    statuses: list[int] = []
    with run.lock.open("w") as lock:  # held by rank 0
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.attempts.write_text(json.dumps(ended_attempt(job_id="4711", end=time.time())) + "\n")
        following = threading.Thread(target=lambda: statuses.append(main(["logs", "first", "-f"])))
        following.start()
        wait_until(lambda: looked.count(True) > 2 or not following.is_alive(), "it does not look whether more may come")
        writes(run, 0, HEAD, "[laststep 10:00:01] step 9/9", "[laststep 10:00:02] finished: epoch 1")
    following.join(DEADLINE_S)
    assert statuses == [0] and "finished: epoch 1" in printed.getvalue()


def test_a_rank_that_never_comes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one rank has no rank 5: waiting for it would never end."""
    writes(run, 0, HEAD)
    run.attempt_now.write_text(json.dumps(ended_attempt(job_id="4711", reason=None)) + "\n")
    assert main(["logs", "first", "-f", "--rank", "5"]) == 2
    assert capsys.readouterr().err == "error: --rank 5: no such log; logs so far: 0\n"
