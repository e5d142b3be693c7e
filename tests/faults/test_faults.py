"""A short selection of faults on real runs, and tests that each check of the harness can fail."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from laststep.records.tensorboard_writer import TensorBoard
from laststep.rundir import RunDir
from tests.faults.checks import Attempt, Seen, Undisturbed, check_curves, check_loss, check_run, lost_steps
from tests.faults.faults import FAULTS, PROCESSES
from tests.faults.local import KINDS as KINDS_HERE
from tests.faults.local import shots_in_turn
from tests.faults.plan import Loss, Moment, make_plan
from tests.faults.processes import plan_in_turn
from tests.faults.report import Hit, Report
from tests.faults.site import compile_library
from tests.slurm.cluster import missing
from tests.support.needs import require, require_program
from tests.support.project import PROJECT

HARNESS_DEADLINE_S = 600.0
# A kind of each family.
KINDS = ("requeue", "preempt", "usr2", "usr2-rank", "scancel", "bit-flipped", "resume-twice", "slurmctld-restart")
WEIGHTS = "0f0f"
FIRST, SECOND = Attempt("7", 0), Attempt("7", 1)


@pytest.mark.slurm
@pytest.mark.parametrize("count", [2, 8])
def test_runs_come_back_from_faults(count: int) -> None:
    """The project's promise, in short: `make chaos N=200` is the long form."""
    require(missing())
    only = [word for kind in KINDS for word in ("--only", kind)]
    # Not a forked Python: the harness tells the ranks from their supervisors, which a process forked for it hides.
    command = [sys.executable, "-m", "tests.faults", "--faults", str(count), "--seed", "1", "--at-once", "2", *only]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=HARNESS_DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} faults of {count} planned" in done.stdout and "0 violations" in done.stdout


class Folder:
    """A run of 10 steps, 5 an epoch, that was stopped once after the 6th, and all that is known of it."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        steps = [{"step": step, "epoch": (step + 4) // 5, "loss": 1 / step, "lr": 0.1} for step in range(1, 11)]
        epochs = [{"epoch": 1, "step": 5, "val_loss": 0.5}, {"epoch": 2, "step": 10, "val_loss": 0.25}]
        self.metrics: list[dict[str, Any]] = [*steps[:5], epochs[0], *steps[5:], epochs[1]]
        self.undisturbed = Undisturbed(WEIGHTS, [{**line, "time": 1.0} for line in self.metrics])
        self.verified: list[dict[str, Any]] = [
            {"step": 6, "ok": True, "error": None, "weights_sha256": "abab"},
            {"step": 10, "ok": True, "error": None, "weights_sha256": WEIGHTS},
        ]
        stopped = {"start_step": 0, "end_step": 6, "reason": "preempted", "lost_steps": 0}
        finished = {"start_step": 6, "end_step": 10, "reason": "finished", "lost_steps": 0}
        self.attempts: list[dict[str, Any]] = [
            {"attempt": 0, "job_id": "7", "restart": 0, **stopped},
            {"attempt": 1, "job_id": "7", "restart": 1, **finished},
        ]
        self.begun = {FIRST: 6, SECOND: 4}
        self.resumed = [0, 6]
        self.damaged: set[int] = set()
        self.set_back: set[Attempt] = set()
        self.unwritten: set[Attempt] = set()

    def wrong(self, unwritten: int = 0) -> str:
        """The violations that the harness finds in it."""
        self.run.path.mkdir(exist_ok=True)
        for path, lines in ((self.run.metrics, self.metrics), (self.run.attempts, self.attempts)):
            path.write_text("".join(json.dumps({**line, "time": 2.0}) + "\n" for line in lines))
        seen = Seen(self.begun, self.resumed, self.damaged, self.set_back, self.unwritten)
        return "; ".join(check_run(self.run, self.verified, self.undisturbed, seen, unwritten))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def test_a_run_as_it_must_be(folder: Folder) -> None:
    """An intact folder has no violations: people would learn to ignore a check that always fails."""
    assert folder.wrong() == ""


def test_a_doubled_step_line_is_found(folder: Folder) -> None:
    """A resume that did not rewind metrics.jsonl would leave this."""
    folder.metrics.insert(3, folder.metrics[2])
    assert folder.wrong() == "metrics.jsonl has more than one line of steps 3"


def test_a_missing_step_line_is_found(folder: Folder) -> None:
    """A resume that rewound metrics.jsonl too far would leave this."""
    del folder.metrics[7]
    assert folder.wrong() == "metrics.jsonl has no line of steps 7"


def test_step_lines_out_of_order_are_found(folder: Folder) -> None:
    """Two attempts that wrote at the same time would leave this."""
    folder.metrics[1], folder.metrics[2] = folder.metrics[2], folder.metrics[1]
    assert folder.wrong() == "the steps in metrics.jsonl are out of order"


def test_points_too_many_and_too_few_are_found(tmp_path: Path) -> None:
    """An attempt that did not cut off lost points, or wrote none at all, would leave such event files."""
    run = RunDir(tmp_path)
    clock = {"samples_per_s": 9.0, "time": 1.0}
    lines = [{"step": step, "epoch": 1, "loss": 1 / step, "lr": 0.1, **clock} for step in range(1, 8)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    TensorBoard(run, 3, writes=True).complete()
    assert check_curves(run, 3) == []
    (written,) = run.tensorboard.iterdir()
    again = written.with_name("tfevents.2")
    again.write_bytes(written.read_bytes())
    assert check_curves(run, 3)[0] == "TensorBoard's train/loss: missing steps (), extra steps (3, 6)"
    again.unlink()
    written.unlink()
    assert check_curves(run, 3)[0] == "TensorBoard's train/loss: missing steps (3, 6), extra steps ()"


@pytest.mark.parametrize(("line", "key"), [(0, "loss"), (3, "lr"), (5, "val_loss")])
def test_a_value_that_differs_is_found(folder: Folder, line: int, key: str) -> None:
    """The last bit of one number is enough: an inexact resume shows there first."""
    folder.metrics[line] = {**folder.metrics[line], key: folder.metrics[line][key] * (1 + 2**-52)}
    assert "metrics.jsonl differs from the undisturbed run's at steps" in folder.wrong()


def test_an_epoch_line_too_many_is_found(folder: Folder) -> None:
    """A validation that was repeated after a stop could leave this."""
    folder.metrics.append(folder.metrics[-1])
    assert folder.wrong() == "metrics.jsonl has 13 lines, the undisturbed run's 12"


def test_wrong_weights_are_found(folder: Folder) -> None:
    """Even if every metric is right."""
    folder.verified[-1]["weights_sha256"] = "f0f0"
    assert folder.wrong() == "the final weights differ from the undisturbed run's: f0f0"


def test_a_damaged_checkpoint_is_found(folder: Folder) -> None:
    """Unless the harness damaged it: then verify must find the damage."""
    folder.verified[0] |= {"ok": False, "error": "state.pt is missing"}
    assert folder.wrong() == "the checkpoint of step 6 is damaged, but not by the harness: state.pt is missing"
    folder.damaged = {6}
    assert folder.wrong() == ""
    folder.verified[0] |= {"ok": True, "error": None}
    assert folder.wrong() == "the checkpoint of step 6 was damaged by the harness, but verify calls it intact"


def test_an_attempt_without_a_record_is_found(folder: Folder) -> None:
    """An attempt that trained, according to the harness's trace, must have a line in attempts.jsonl."""
    folder.begun[Attempt("8", 0)] = 1
    assert folder.wrong() == "attempts.jsonl has no record of 8-0-0, which trained"


def test_an_attempt_in_an_allocation_given_up_is_found(folder: Folder) -> None:
    """The batch shell recorded that no attempt began, and then a rank that had survived srun began one all the same.
    Restarts in one allocation are no such case."""
    folder.attempts[1].update(restart=0, step_id=1)
    folder.begun = {FIRST: 6, Attempt("7", 0, 1): 4}
    assert folder.wrong() == "", "a restart"
    folder.attempts[0].update(step_id=None, reason="failed")
    folder.begun = {Attempt("7", 0, -1): 6, Attempt("7", 0, 1): 4}
    assert folder.wrong() == "attempt 7-0-1 began in a start of the job that the batch shell had given up"


def test_attempts_that_do_not_join_are_found(folder: Folder) -> None:
    """Each attempt must start where the record of the one before ends: otherwise steps were lost without a record."""
    folder.attempts[1]["start_step"] = folder.resumed[1] = 5
    folder.begun[SECOND] = 5
    assert folder.wrong() == "attempt 7-0-0 kept step 6 by its record, but the next started at 5"
    folder.set_back = {FIRST}
    assert folder.wrong() == "", "the harness damaged what it had kept"


def test_a_record_that_hides_what_was_done_is_found(folder: Folder) -> None:
    """The harness counts steps itself, and so finds a run that hides lost ones."""
    folder.begun[FIRST] = 9
    assert folder.wrong() == "attempt 7-0-0 is recorded with 6 steps, but began 9"
    assert folder.wrong(unwritten=5) == "", "of an attempt without a record of its own, metrics.jsonl shows the rest"
    folder.unwritten = {FIRST}
    assert folder.wrong(), "a full disk excuses a missing record, not a wrong one"
    folder.attempts[0]["reason"] = "lost"
    assert folder.wrong() == ""


def test_a_log_that_says_something_else_is_found(folder: Folder) -> None:
    """The log and attempts.jsonl must name the same steps."""
    folder.resumed = [0, 4]
    assert folder.wrong() == "the log has resumes after steps 4, attempts.jsonl does not"


def test_a_gap_in_the_attempts_is_found(folder: Folder) -> None:
    """Each attempt has one line, in order."""
    folder.attempts[1]["attempt"] = 2
    assert folder.wrong() == "attempts.jsonl numbers its attempts [0, 2]"


def test_a_run_that_did_not_finish_is_found(folder: Folder) -> None:
    """Nor may it have finished twice."""
    folder.attempts[1]["reason"] = "failed"
    assert "attempts.jsonl ends with ['failed'], and has finished 0 times" in folder.wrong()


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("7-1-0", Attempt("7", 1)),
        ("7_3-1-0-2", Attempt("7_3", 1, 0, 2)),
        ("local-20261122-214230-5323-0-0", Attempt("local-20261122-214230-5323", 0)),
    ],
)
def test_names_of_attempts(name: str, attempt: Attempt) -> None:
    """A trace that is not understood would end the harness."""
    assert Attempt.named(name) == attempt


def test_lost_steps_are_counted() -> None:
    """A step is known to be complete once the next has begun: of 11 begun after step 20, 10 are."""
    assert lost_steps(start=20, begun=11, resumed=30) == 0
    assert lost_steps(start=20, begun=11, resumed=31) == 0
    assert lost_steps(start=20, begun=11, resumed=28) == 2


@pytest.mark.parametrize(
    ("loss", "nodes", "ranks", "resumed", "lost", "wrong"),
    [
        (Loss.NOTHING, 1, 1, 30, 0, ""),
        (Loss.NOTHING, 1, 1, 29, 1, "1 step lost, 0 allowed"),
        (Loss.SINCE_SAVE, 1, 2, 20, 10, ""),
        (Loss.SINCE_SAVE, 1, 2, 19, 11, "resumed after step 19, but step 20 was saved"),
        (Loss.UNLESS_A_NODE_LIVES, 1, 2, 20, 10, ""),
        (Loss.UNLESS_A_NODE_LIVES, 2, 2, 20, 10, "10 steps lost, 0 allowed"),
        (Loss.UNLESS_A_RANK_LIVES, 1, 1, 20, 10, ""),
        (Loss.UNLESS_A_RANK_LIVES, 1, 2, 20, 10, "10 steps lost, 0 allowed"),
        (Loss.NEWEST, 1, 2, 20, 10, ""),
        (Loss.NEWEST, 1, 2, 30, 0, "resumed after step 30, but 20 was the newest intact checkpoint"),
    ],
)
def test_what_a_fault_may_cost(loss: Loss, nodes: int, ranks: int, resumed: int, lost: int, wrong: str) -> None:
    """After 30 steps, with a save at 20: one lost step too many is found, and a damaged checkpoint that was loaded."""
    assert "; ".join(check_loss(loss, nodes, ranks, resumed, lost, kept=20)) == wrong


def test_the_plan_is_a_function_of_the_seed() -> None:
    """Otherwise a violation could not be reproduced."""
    plan = make_plan(FAULTS, 200, seed=1)
    assert plan == make_plan(FAULTS, 200, seed=1) != make_plan(FAULTS, 200, seed=2)
    shots = [shot for run in plan for shot in run.shots]
    assert len(shots) == 200
    assert set(Counter(shot.fault for shot in shots)) == set(FAULTS), "a long plan has every kind"
    for run in plan:
        for shot in run.shots:
            assert FAULTS[shot.fault].needs(run.setting) and shot.moment in FAULTS[shot.fault].moments


def test_runs_with_violations_are_repeated(tmp_path: Path) -> None:
    """They alone, and the report says so: nobody has hours to repeat a thousand faults for the sake of one."""
    plan = make_plan(FAULTS, 40, seed=1)
    report, path = Report(1, plan, 2, {}), tmp_path / "results.json"
    for run in plan:
        report.done[run.name] = [Hit(run.name, shot.fault, shot.moment, shot.delay_ms) for shot in run.shots]
        report.hits += report.done[run.name]
        report.runs += 1
    first, second, *rest = (run.name for run in plan)
    report.done[first][0].wrong.append("a step lost")
    report.wrong.append(f"{second}.2: never injected: requeue")
    report.keep_good(path)
    again = Report(1, plan, 2, {})
    again.load(path)
    assert (list(again.done), again.runs, again.violations) == (rest, len(rest), [])
    assert f"repeated after a correction: {first}, {second}" in again.markdown()


def test_the_plan_leaves_out_what_the_machine_lacks() -> None:
    """Without a compiler no clock can be set. A machine that can inject nothing is an error, not a success."""
    plan = make_plan(FAULTS, 200, seed=1, lacks={"clock", "disk"})
    assert not {"clock-step", "disk-full", "disk-full-at-stop"} & {shot.fault for run in plan for shot in run.shots}
    with pytest.raises(ValueError, match="can inject none of clock-step"):
        make_plan({"clock-step": FAULTS["clock-step"]}, 8, seed=1, lacks={"clock"})


def test_the_clock_can_be_set(tmp_path: Path) -> None:
    """If the clock library had no effect, its fault would test nothing."""
    require_program("cc", "apt-get install gcc libc6-dev")
    offset = tmp_path / "clock"
    offset.write_bytes((-3600).to_bytes(8, "little", signed=True))
    ask = "import time; print(time.time()); start = time.monotonic(); time.sleep(0.1); print(time.monotonic() - start)"
    moved = {"LD_PRELOAD": str(compile_library(tmp_path, "clock")), "LASTSTEP_FAULTS_CLOCK": str(offset)}
    now, moved_now = (
        subprocess.run(
            [sys.executable, "-c", ask], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        for env in ({}, moved)
    )
    (here, _), (there, slept) = (map(float, done.stdout.split()) for done in (now, moved_now))
    assert here - there == pytest.approx(3600, abs=60)
    assert 0.1 <= slept < 10, "monotonic clocks do not change"


def test_the_kernel_can_refuse_processes_and_threads(tmp_path: Path) -> None:
    """If the library had no effect, the worst day of processes would test nothing; nor if it did not end."""
    require_program("cc", "apt-get install gcc libc6-dev")
    until = tmp_path / "forks"
    ask = """
import os, subprocess, threading
for start in (os.fork, lambda: subprocess.run("true"), threading.Thread(target=print).start):
    try:
        start() or os._exit(0)
    except (OSError, RuntimeError) as error:
        print(type(error).__name__, flush=True)
"""
    moved = {"LD_PRELOAD": str(compile_library(tmp_path, "forks")), "LASTSTEP_FAULTS_FORKS": str(until)}

    def said(processes: float, threads: float) -> list[str]:
        times = [time.monotonic_ns() + round(1e9 * seconds) for seconds in (processes, threads)]
        until.write_bytes(b"".join(at.to_bytes(8, "little") for at in times))
        words = [sys.executable, "-c", ask]
        return subprocess.run(words, env={**os.environ, **moved}, capture_output=True, text=True).stdout.split()

    assert said(600, 600) == ["BlockingIOError", "BlockingIOError", "RuntimeError"]
    assert said(600, -1) == ["BlockingIOError", "BlockingIOError"]
    assert said(-1, -1) == []


def test_each_process_is_struck_at_each_moment() -> None:
    """A plan by chance would leave out just the moment at which a run ends for good."""
    turns = {(fault.name, moment) for fault in PROCESSES.values() for moment in fault.moments}
    plan = plan_in_turn(PROCESSES, len(turns), seed=1)
    assert {(shot.fault, shot.moment) for run in plan for shot in run.shots} == turns
    for run in plan:
        assert Moment.END not in {shot.moment for shot in run.shots[:-1]}, "nothing can strike after the end"
    here = shots_in_turn(KINDS_HERE, 60, random.Random(1))
    assert {(shot.fault, shot.moment) for shot in here} == {(f.name, m) for f in KINDS_HERE.values() for m in f.moments}
