"""Where a run's time went. Each second belongs to one part: a part that is missing would be looked for in vain, and one
that is counted twice would be blamed for what another one costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from laststep.records.attempt_record import AttemptRecord, read_attempts
from laststep.records.metrics import steps_from
from laststep.records.submissions import SubmissionRecord
from laststep.runs.run_status import TimeSplit, Waiting, split_time
from tests.support.records import add_metrics, ended_attempt

T0 = 1_000_000.0  # the first submission


def steps(path: Path, *runs: tuple[int, int, float, float]) -> Path:
    """A metrics.jsonl: for each of these (first step, last step, when the first one ended, seconds of a step)."""
    add_metrics(
        path,
        (
            {"step": step, "time": T0 + ended + (step - first) * step_s}
            for first, last, ended, step_s in runs
            for step in range(first, last + 1)
        ),
    )
    return path


def attempt(start: float, end: float | None, **fields: Any) -> AttemptRecord:
    """An attempt, with seconds since the first submission."""
    job_start = {"job_start": T0 + fields.pop("job_start")} if "job_start" in fields else {}
    ended = {"end": None, "reason": None} if end is None else {"end": T0 + end}
    return {**ended_attempt(start=T0 + start, step_s=1.0, save_s=0.0), **fields, **job_start, **ended}  # type: ignore[return-value]


def submitted(**at: float) -> list[SubmissionRecord]:
    """Submissions of these jobs."""
    return [{"job_id": job.removeprefix("_"), "time": T0 + time} for job, time in at.items()]


def test_a_run_with_everything(tmp_path: Path) -> None:
    """Queue, start, training with saves, a fault with lost steps, a restart in place, a requeue, a resume days later
    on another number of ranks."""
    metrics = steps(tmp_path / "m", (1, 50, 121, 1.0), (51, 60, 191, 1.0), (61, 80, 521, 2.0), (81, 90, 9031, 1.0))
    records = [
        # Queued until 100, starts until 120, trains 50 s of which 3 s are saves, loses 9 s, dies 1 s later.
        attempt(104, 180, job_start=100, reason="failed", requeue=True, end_step=59, lost_steps=9, lost_s=9.0,
                save_s=3.0),
        # In place: starts until 190, trains 10 s and saves for 2 s. Preempted.
        attempt(185, 202, job_start=100, step_id=1, reason="preempted", requeue=True, start_step=50, end_step=60,
                save_s=2.0),
        # Requeued: waits until 500, starts until 519, trains 40 s, the time limit ends it with a save of 1 s.
        attempt(505, 560, job_start=500, restart=1, reason="timeout", start_step=60, end_step=80, step_s=2.0,
                save_s=1.0),
        # Stopped until 9000, resumed on two ranks: waits 20 s, starts in 10 s.
        attempt(9021, 9042, job_id="8", job_start=9020, world_size=2, start_step=80, end_step=90, save_s=2.0),
    ]  # fmt: skip
    split = split_time(records, submitted(_7=0, _8=9000), metrics, now=T0 + 99_999)
    assert split == TimeSplit(
        training=(50 - 3) + (12 - 2) + (41 - 1) + (12 - 2),
        queue=100 + 298 + 20,
        restarts=20 + (180 - 170 - 9) + (190 - 180) + (519 - 500) + (9030 - 9020),
        lost_steps=9,
        saves=3 + 2 + 1 + 2,
    )
    assert split.total == 560 + (9042 - 9000), "the run's time without the days in which it was stopped"
    assert str(split) == "training 17.8%, queue 69.4%, restarts 10.0%, lost steps 1.5%, saves 1.3%"


def test_while_it_trains(tmp_path: Path) -> None:
    """The attempt under way has no end, and the lines of several steps are written together."""
    metrics = tmp_path / "m"
    add_metrics(metrics, ({"step": step, "time": T0 + 100 + 10 * -(-step // 10)} for step in range(1, 41)))
    records = [attempt(90, None, job_start=80, step_s=None, save_s=None, end_step=0)]
    split = split_time(records, submitted(_7=0), metrics, now=T0 + 145, alive=True)
    assert split == TimeSplit(training=45, queue=80, restarts=20)
    dead = split_time(records, submitted(_7=0), metrics, now=T0 + 145)
    assert dead == TimeSplit(training=40, queue=80, restarts=20), "it has used no time since its last step"
    starting = [attempt(90, None, job_start=80, step_s=None)]
    assert split_time(starting, submitted(_7=0), tmp_path / "none", now=T0 + 95, alive=True) == TimeSplit(
        queue=80, restarts=15
    )


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (Waiting("7", in_place=False), TimeSplit(queue=30)),
        (Waiting("7", in_place=True), TimeSplit(restarts=30)),
        (Waiting("8", in_place=False), TimeSplit(queue=10)),
        (None, TimeSplit()),
    ],
    ids=["requeued", "restarting", "resumed", "stopped"],
)
def test_while_it_waits(waiting: Waiting | None, expected: TimeSplit, tmp_path: Path) -> None:
    """`status` is often called because a run does not train right now."""
    metrics, jobs = steps(tmp_path / "m", (1, 10, 1, 1.0)), submitted(_7=0, _8=30)
    ended = [attempt(0, 10, reason="preempted", requeue=True)]
    before = split_time(ended, jobs, metrics, now=T0 + 40)
    assert before == TimeSplit(training=10)
    assert split_time(ended, jobs, metrics, T0 + 40, waiting=waiting) == before + expected
    if waiting and waiting.job_id == "7" and not waiting.in_place:
        assert split_time([], jobs, tmp_path / "none", T0 + 5, waiting=waiting) == TimeSplit(queue=5), "never started"


def test_without_slurm(tmp_path: Path) -> None:
    """There is no queue: what passes before the first step is the start."""
    metrics = steps(tmp_path / "m", (1, 10, 9, 1.0), (11, 20, 29, 1.0))
    local = {"job_id": "local-host-17", "step_s": 1.0}
    records = [
        attempt(5, 18, **local, reason="failed", requeue=True),
        attempt(25, 40, **local, step_id=1, start_step=10, end_step=20, save_s=2.0),
    ]
    jobs: list[SubmissionRecord] = [{"job_id": "local-host-17", "time": T0}]
    assert split_time(records, jobs, metrics, T0 + 50) == TimeSplit(training=20, restarts=18, saves=2)


def test_no_step_was_kept(tmp_path: Path) -> None:
    """An attempt that never got to a step is a restart; if it lost all its steps, only these are lost steps, not its
    start."""
    died = attempt(10, 30, reason="hung", requeue=True, end_step=0)
    lost = attempt(40, 60, restart=1, reason="lost", end_step=8, lost_steps=8, lost_s=18.0)
    split = split_time([died, lost], submitted(_7=0), tmp_path / "none", T0 + 99)
    assert split == TimeSplit(queue=20, restarts=20 + 12, lost_steps=8)


def test_an_older_version(tmp_path: Path) -> None:
    """It recorded neither the start of the job nor the saves: the start counts until the attempt's, and what an
    orderly stop took after its last step is the save."""
    metrics = steps(tmp_path / "m", (1, 10, 21, 1.0))
    (tmp_path / "attempts").write_text(
        json.dumps(
            {"attempt": 0, "job_id": "7", "restart": 0, "hosts": ["a"], "world_size": 1, "start": T0 + 15,
             "end": T0 + 34, "start_step": 0, "end_step": 10, "lost_steps": 0, "reason": "preempted"}
        )
    )  # fmt: skip
    records = read_attempts(tmp_path / "attempts")
    assert split_time(records, submitted(_7=0), metrics, T0 + 50) == TimeSplit(
        training=10, queue=15, restarts=5, saves=4
    )
    assert split_time(records, [], tmp_path / "none", T0 + 50).total == 19, "metrics.jsonl and the submission are gone"


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_add_up(seed: int, tmp_path: Path) -> None:
    """Whatever the files say, even what contradicts itself: a clock that was set back, lines that are missing, steps
    of another attempt. No part is negative, and together they are the time that passed."""
    draw = random.Random(seed)
    now, step, records, lines = 0.0, 0, [], []
    for number in range(draw.randrange(1, 6)):
        start = now + draw.uniform(0, 30)
        done = draw.randrange(0, 12)
        lost = draw.randrange(0, done + 1)
        end = start + draw.uniform(0, 40)
        times = sorted(draw.uniform(start - 5, end + 5) for _ in range(done - lost))
        lines += [
            {"step": step + 1 + n, "time": T0 + at} for n, at in enumerate(times) if draw.random() < 0.9
        ]  # fmt: skip
        records.append(
            attempt(
                start, end, attempt=number, restart=number, job_start=draw.uniform(now - 5, end),
                start_step=step, end_step=step + done, lost_steps=lost, lost_s=draw.uniform(0, 50),
                step_s=draw.choice([None, draw.uniform(0, 9)]), save_s=draw.choice([None, draw.uniform(0, 50)]),
                reason=draw.choice(["failed", "hung", "lost", "preempted", "finished"]), requeue=True,
            )
        )  # fmt: skip
        step, now = step + done - lost, end
    add_metrics(tmp_path / "m", lines)
    split = split_time(records, submitted(_7=0), tmp_path / "m", T0 + now)
    assert min(vars(split).values()) >= -1e-9, split
    assert split.total == pytest.approx(now)


def test_a_step_of_a_long_file(tmp_path: Path) -> None:
    """A run of weeks has gigabytes of metrics; `status` must not read them all. Epochs' lines and a damaged line stand
    between the steps."""
    path = tmp_path / "metrics.jsonl"
    lines = []
    for step in range(1, 20_001):
        lines.append(json.dumps({"step": step, "time": float(step), "loss": 1 / step}))
        lines += [json.dumps({"epoch": 1, "step": step, "val_loss": 1}), '{"step": 12'] * (step % 100 == 0)
    path.write_text("\n".join(lines))
    for step in (1, 2, 99, 100, 101, 7777, 19_999, 20_000):
        assert next(iter(steps_from(path, step)))["step"] == step
    assert [line["step"] for line in steps_from(path, 19_998)] == [19_998, 19_999, 20_000]
    assert not list(steps_from(path, 20_001)) and not list(steps_from(tmp_path / "none", 1))
