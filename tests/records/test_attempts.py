"""attempts.jsonl: the end of every attempt is recorded once, by any rank, with whether the run continues by itself."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laststep.config.schema import Launch
from laststep.ranks.world import World
from laststep.records import attempts
from laststep.records.attempt_record import EndedAttempt, Reason, read_attempts, read_ended_attempts
from laststep.records.attempts import (
    begin_attempt,
    end_attempt,
    find_record,
    lower_start_step,
    raise_kept_step,
    recorded_step,
)
from laststep.records.retry import FAILURES, SAME_FAILURE, Decision, Next, decide, recorded
from laststep.records.submissions import SubmissionRecord
from laststep.rundir import RunDir
from tests.support.records import a_world, add_metrics

WORLD = a_world(size=2, launcher="submitit-slurm", hosts=("n1", "n1"))
LAUNCH = Launch(max_timeouts=1, max_failures=1, max_restarts=0)


def restarted(times: int) -> World:
    """The same job, requeued that often."""
    return replace(WORLD, restart=times)


def test_one_line_per_attempt(tmp_path: Path) -> None:
    """With the fields that status, report and the requeue budget read."""
    run = RunDir(tmp_path)
    reasons: tuple[Reason, ...] = ("preempted", "finished")
    for number, reason in enumerate(reasons):
        begin_attempt(run, restarted(number), start_step=10 * number)
        assert run.attempt_now.exists()
        assert find_record(run, restarted(number)) is None
        record = end_attempt(run, restarted(number), LAUNCH, reason, 10 * number + 10, 10 * number + 10)
        assert record == find_record(run, restarted(number))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts.jsonl", "reserve"]
    records = read_ended_attempts(run.attempts)
    assert [(r["attempt"], r["start_step"], r["end_step"], r["reason"], r["requeue"]) for r in records] == [
        (0, 0, 10, "preempted", True),
        (1, 10, 20, "finished", False),
    ]
    assert set(records[0]) == {
        "step_id", "step_restarts", "job_start", "save_s", "blamed", "chain",
        "attempt", "job_id", "restart", "hosts", "world_size", "start", "end", "start_step", "end_step", "reason",
        "lost_steps", "lost_s", "step_s", "requeue", "error",
    }  # fmt: skip
    assert all(r["start"] <= r["end"] for r in records)


def test_a_local_run_is_not_requeued(tmp_path: Path) -> None:
    """A record with `requeue` would have the user wait for a restart that never happens."""
    run, local = RunDir(tmp_path), replace(WORLD, on_slurm=False)
    begin_attempt(run, local, start_step=0)
    record = end_attempt(run, local, LAUNCH, "preempted", 3, 3)
    assert record is not None and not record["requeue"]


def _end(folder: str, rank: int, results: Any) -> None:
    world = replace(WORLD, rank=rank)
    record = end_attempt(RunDir(folder), world, LAUNCH, "failed", 9, 9, error=f"rank {rank}")
    results.put(record["error"] if record else None)


def test_many_ranks_end_the_attempt_at_once(tmp_path: Path) -> None:
    """When a rank dies, all its peers notice at the same moment: there is one complete record, and only the rank that
    wrote it acts on it."""
    run, context = RunDir(tmp_path), multiprocessing.get_context("spawn")
    begin_attempt(run, WORLD, start_step=0)
    results = context.Queue()
    ranks = [context.Process(target=_end, args=(str(tmp_path), rank, results)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    winners = [said for said in (results.get(timeout=60) for _ in ranks) if said]
    for rank in ranks:
        rank.join(60)
    assert len(winners) == 1
    assert [record["error"] for record in read_ended_attempts(run.attempts)] == winners
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts.jsonl", "reserve"]


def test_a_rank_of_an_older_attempt_ends_nothing(tmp_path: Path) -> None:
    """The last rank of a killed attempt may live on for a while. It must not end the next attempt."""
    run = RunDir(tmp_path)
    begin_attempt(run, restarted(1), start_step=0)
    assert end_attempt(run, restarted(0), LAUNCH, "hung", 3, 0) is None
    assert end_attempt(run, replace(WORLD, job_id="8", restart=1), LAUNCH, "hung", 3, 0) is None
    assert not read_ended_attempts(run.attempts) and run.attempt_now.exists()


def test_ended_by_a_rank_that_did_not_know_the_start_step(tmp_path: Path) -> None:
    """Ranks learn the start step when they meet. One that ends the attempt before that has lost no step."""
    run = RunDir(tmp_path)
    begin_attempt(run, restarted(0), start_step=30)
    record = end_attempt(run, restarted(0), LAUNCH, "preempted", 0, 0)
    assert record is not None and (record["start_step"], record["end_step"], record["lost_steps"]) == (30, 30, 0)


class PowerCut(Exception):
    """Nothing after it happens."""


@pytest.mark.parametrize("step", range(8))
def test_a_power_cut_at_any_moment_of_the_end(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it hits the writer, the end is recorded exactly once: as the writer meant it, or as lost."""
    run = RunDir(tmp_path)
    begin_attempt(run, WORLD, start_step=0)
    add_metrics(run.metrics, [{"step": 1, "time": 0.0}])
    left = [step]

    def cut_off(method: Any) -> Any:
        def run_or_cut(*words: Any, **more: Any) -> Any:
            if not left[0]:
                raise PowerCut
            left[0] -= 1
            return method(*words, **more)

        return run_or_cut

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, cut_off(getattr(Path, name)))
        patch.setattr(os, "fsync", cut_off(os.fsync))
        ended = True
        try:
            end_attempt(run, WORLD, LAUNCH, "preempted", 1, 1)
        except PowerCut:
            ended = False
    assert ended == (step == 7), "the end has seven moments to be cut off in"
    begin_attempt(run, restarted(1), start_step=1)
    (record,) = read_ended_attempts(run.attempts)
    assert (record["attempt"], record["end_step"], record["lost_steps"], record["requeue"]) == (0, 1, 0, True)
    assert record["reason"] == ("preempted" if step >= 3 else "lost")
    assert end_attempt(run, restarted(1), LAUNCH, "finished", 9, 9) is not None
    assert [(r["attempt"], r["reason"]) for r in read_ended_attempts(run.attempts)][1:] == [(1, "finished")]


def test_an_abandoned_attempt(tmp_path: Path) -> None:
    """After a power cut the next attempt records it as lost, with the steps that are in no checkpoint, and the seconds
    that they took."""
    run = RunDir(tmp_path)
    start = begin_attempt(run, WORLD, start_step=0)["start"]
    add_metrics(run.metrics, ({"step": step, "time": start + 10 * step} for step in range(1, 8)))
    begin_attempt(run, restarted(1), start_step=5)
    end_attempt(run, restarted(1), LAUNCH, "finished", 9, 9)
    lost, finished = read_ended_attempts(run.attempts)
    assert (lost["attempt"], lost["reason"], lost["end_step"], lost["lost_steps"]) == (0, "lost", 7, 2)
    assert lost["lost_s"] == pytest.approx(20) and lost["requeue"]
    assert (finished["attempt"], finished["start_step"], finished["lost_steps"]) == (1, 5, 0)


def test_seconds_lost_before_the_first_save(tmp_path: Path) -> None:
    """They count from the start of this attempt: the step that it began at may have been done last week."""
    run = RunDir(tmp_path)
    start = begin_attempt(run, WORLD, start_step=5)["start"]
    steps = [{"step": 5, "time": start - 600_000}, {"step": 6, "time": start + 30}]
    add_metrics(run.metrics, [*steps, {"epoch": 1, "step": 6}])
    record = end_attempt(run, WORLD, LAUNCH, "failed", 6, 5)
    assert record is not None and record["lost_s"] == pytest.approx(30)


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """A line that was cut short costs its own record, but not the next one."""
    run = RunDir(tmp_path)
    run.attempts.write_text('{"attempt": 0, "rea')
    begin_attempt(run, WORLD, start_step=0)
    end_attempt(run, WORLD, LAUNCH, "finished", 9, 9)
    assert [r["reason"] for r in read_ended_attempts(run.attempts)] == ["finished"]
    assert run.attempts.read_text().startswith('{"attempt": 0, "rea\n')


def test_a_damaged_record_of_an_earlier_attempt(tmp_path: Path) -> None:
    """The next attempt gets a number that no other has: attempts.jsonl takes one record for each number."""
    run = RunDir(tmp_path)
    for restart in range(2):
        begin_attempt(run, restarted(restart), start_step=0)
        end_attempt(run, restarted(restart), LAUNCH, "preempted", 0, 0)
    first, second = run.attempts.read_text().splitlines()
    run.attempts.write_text(f"{first[:-9]}\n{second}\n")
    begin_attempt(run, restarted(2), start_step=0)
    end_attempt(run, restarted(2), LAUNCH, "finished", 9, 9)
    assert [record["attempt"] for record in read_ended_attempts(run.attempts)] == [1, 2]


def ends(*reasons: str) -> list[EndedAttempt]:
    """Records of one job. "failed" kept no step, "failed+3" kept 3, "idle" failed before it did one; "unsaved" had no
    time for its last save before the time limit, "timeout" had; "8:" before it is another job, "c/8:" one of chain c.
    Each is in an allocation of its own, unless "here " before it puts it into that of the one before."""
    records: list[Any] = []
    restart = 0
    for word in reasons:
        job, _, reason = word.removeprefix("here ").rpartition(":")
        chain, _, job = job.rpartition("/")
        reason, _, kept = reason.partition("+")
        restart += not word.startswith("here ")
        steps = {"start_step": 10, "end_step": 14 + int(kept or 0), "lost_steps": 4}
        if reason == "idle":
            reason, steps = "failed", {"start_step": 10, "end_step": 10, "lost_steps": 0}
        if reason == "timeout":
            steps["lost_steps"] = 0
        reason = reason.replace("unsaved", "timeout")
        records.append(
            {
                "job_id": job or "7",
                "restart": restart,
                "reason": reason,
                "requeue": False,
                "blamed": [],
                "chain": chain or None,
                **steps,
            }
        )
    return records


TIMEOUTS_USED_UP = "retry budget used up (launch.max_timeouts=1)"
FAILURES_USED_UP = "retry budget used up (launch.max_failures=1)"
NEVER_FITS = (
    "the last save does not fit into launch.signal_delay_s=90, and no step is kept (launch.max_failures=1): raise it"
)


@pytest.mark.parametrize(
    ("records", "why_not"),
    [
        (ends("finished"), "the run is finished"),
        (ends("cancelled"), "the run is cancelled"),
        (ends(*["preempted"] * 50), ""),
        (ends("timeout"), ""),
        (ends("timeout", "timeout"), TIMEOUTS_USED_UP),
        (ends("timeout", "preempted"), ""),
        (ends("8:timeout", "8:timeout", "7:timeout"), ""),
        (ends("c/8:timeout", "c/9:timeout"), TIMEOUTS_USED_UP),
        (ends("c/8:failed", "c/9:failed"), FAILURES_USED_UP),
        (ends("c/8:failed", "d/9:failed"), ""),  # resumed
        (ends("unsaved"), ""),
        (ends("unsaved", "unsaved"), NEVER_FITS),
        (ends("unsaved+1", "unsaved+1", "unsaved"), TIMEOUTS_USED_UP),
        (ends("unsaved", "failed"), FAILURES_USED_UP),
        (ends("failed"), ""),
        (ends("failed", "failed"), FAILURES_USED_UP),
        (ends("lost", "hung"), FAILURES_USED_UP),
        (ends("failed+1", "failed+2", "failed+3"), ""),
        (ends("failed", "failed+2", "failed"), FAILURES_USED_UP),
        (ends("failed", "failed", "hung+2"), ""),
        (ends("timeout", "timeout", "failed"), ""),
        (ends("8:lost", "8:lost", "7:lost"), ""),
    ],
    ids=lambda value: ",".join(record["reason"] for record in value) if isinstance(value, list) else "",
)
def test_the_retry_policy(records: list[EndedAttempt], why_not: str) -> None:
    """Per job, one timeout and one failure without progress are allowed here. If the policy is too strict, a run waits
    all night for its user; if too lax, a bug wastes cluster hours all weekend. The reason names the budget used up."""
    assert decide(records, LAUNCH) == Decision(Next.END if why_not else Next.REQUEUE, why_not)


@pytest.mark.parametrize(
    ("records", "follows"),
    [
        (ends("failed+1"), Next.RESTART),
        (ends("hung"), Next.RESTART),
        (ends("lost"), Next.RESTART),
        (ends("preempted"), Next.REQUEUE),  # the nodes are wanted by somebody else
        (ends("timeout"), Next.REQUEUE),
        (ends("finished"), Next.END),
        (ends("failed", "here failed"), Next.RESTART),
        (ends("failed", "here failed", "here failed"), Next.REQUEUE),  # two restarts got nowhere
        (ends("failed+1", "here failed", "here failed"), Next.REQUEUE),
        (ends("failed", "here failed+1", "here failed"), Next.RESTART),  # counted anew since that step
        (ends("failed", "here failed", "here failed+1"), Next.RESTART),
        (ends("failed+1", *["here failed+1"] * 50), Next.RESTART),
        (ends("failed", "here failed", "here failed", "failed"), Next.END),  # launch.max_failures=1 allocation
        (ends("failed+1", "here failed", "here failed", "failed+1"), Next.RESTART),  # other nodes
        (ends("8:failed", "8:failed", "7:failed"), Next.RESTART),
    ],
    ids=lambda value: ",".join(record["reason"] for record in value) if isinstance(value, list) else "",
)
def test_restart_or_requeue(records: list[EndedAttempt], follows: Next) -> None:
    """The allocation is kept as long as restarts get somewhere; launch.max_restarts=2 here. A requeue too early costs
    hours in the queue; one too late, hours on a bad node."""
    launch = replace(LAUNCH, max_restarts=2)
    assert decide(records, launch).what is follows
    assert decide(records, launch, retry="no").what is not Next.RESTART, "the same error would follow"


def failing(*errors: str, step: int = 14) -> list[EndedAttempt]:
    """Records of one job whose attempts failed with these errors, at this step, having kept new ones."""
    records = ends(*["failed+3"] * len(errors))
    return [{**record, "error": error, "end_step": step} for record, error in zip(records, errors)]


def traceback_of(line: int, error: str, path: str = "/runs/a/code/own.py") -> str:
    """A recorded error: one of the user's code, below which torch has raised it."""
    torch = '  File "/env/lib/python3.11/site-packages/torch/nn.py", line 7, in forward\n    x\n'
    loop = '  File "/runs/a/code/laststep/loops/task_loop.py", line 9, in _step\n    x\n'
    own = f'  File "{path}", line {line}, in step\n    y\n'
    return f"rank 1 on n2 failed:\nTraceback (most recent call last):\n{loop}{own}{torch}{error}\n"


KEY_ERROR = "KeyError: 'accuracy'"


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        ([KEY_ERROR, KEY_ERROR], "the same error a second time, after step 14: KeyError at own.py, line 12"),
        (
            ["RuntimeError: mat1 and mat2 shapes cannot be multiplied"] * 2,
            "the same error a second time, after step 14: ",
        ),
        ([KEY_ERROR], ""),
        ([KEY_ERROR, "ValueError: accuracy"], ""),
        (["OSError: [Errno 5] Input/output error"] * 2, ""),
        (["FileNotFoundError: [Errno 2] No such file or directory: '/mnt/x'"] * 2, ""),
        (["RuntimeError: CUDA error: an illegal memory access was encountered"] * 2, ""),
        (["torch.OutOfMemoryError: CUDA out of memory"] * 2, ""),
        (["torch.distributed.DistBackendError: NCCL error"] * 2, ""),
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed"] * 2, ""),
    ],
    ids=["twice", "shapes", "once", "another", "disk", "mount", "CUDA", "memory", "NCCL", "worker"],
)
def test_the_same_error_twice(errors: list[str], why: str) -> None:
    """A bug in the user's validation was tried 13 times over four allocations. What a node, the network, the disk or
    CUDA may cause is retried as the budgets say: ending the run for it would lose a weekend."""
    decision = decide(failing(*(traceback_of(12, error) for error in errors)), replace(LAUNCH, max_failures=20))
    assert (decision.what is Next.END) == bool(why) and decision.why.startswith(why)


def test_the_same_error_elsewhere() -> None:
    """At another line, at another step, or in code that is not the user's, it says nothing of the next attempt."""
    launch, again = replace(LAUNCH, max_failures=20), traceback_of(12, KEY_ERROR)
    assert decide(failing(traceback_of(13, KEY_ERROR), again), launch).what is not Next.END
    assert decide([*failing(again, step=12), *failing(again)], launch).what is not Next.END
    ours = traceback_of(12, KEY_ERROR, path="/runs/a/code/laststep/tasks/language.py")
    assert decide(failing(ours, ours), launch).what is not Next.END


@pytest.mark.parametrize(
    "error", ["RuntimeError: can't start new thread", "BlockingIOError: [Errno 11] Resource temporarily unavailable"]
)
def test_a_system_that_is_short_of_something(error: str) -> None:
    """At its very first start a run has proved nothing, and any error there would end it; this one passes."""
    record = {**failing(traceback_of(12, error), step=0)[0], "start_step": 0, "lost_steps": 0}
    assert decide([record], LAUNCH, retry="if_trained").what is Next.REQUEUE  # type: ignore[list-item]
    other = {**record, "error": traceback_of(12, KEY_ERROR)}
    assert decide([other], LAUNCH, retry="if_trained").what is Next.END  # type: ignore[list-item]


@pytest.mark.parametrize("reason", FAILURES)
def test_an_error_that_would_only_repeat(reason: str) -> None:
    """A configuration that cannot work is not retried, even if earlier attempts made progress."""
    records = ends(f"{reason}+5")
    assert decide(records, LAUNCH, retry="no") == Decision(Next.END, SAME_FAILURE)
    if reason != "lost":  # for which no rank was left to decide anything
        why = "the only reason that the records do not have"
        assert recorded(records, LAUNCH) == Decision(Next.END, SAME_FAILURE), why


SUBMITTED: list[SubmissionRecord] = [
    {"job_id": "6", "time": 1.0, "config": "lr: 1"},
    {"job_id": "7", "time": 2.0, "config": "lr: 1"},
    {"job_id": "8", "time": 3.0, "config": "lr: 2"},
]


@pytest.mark.parametrize(
    ("records", "retried"),
    [
        (ends("7:idle"), False),  # the very first start
        (ends("7:preempted", "7:idle"), True),  # it trained in this job; that its steps were lost does not matter
        (ends("6:failed+3", "7:idle"), True),  # resumed as it was
        (ends("7:failed+3", "8:idle"), False),  # resumed with another configuration, which has never trained
        (ends("7:failed+3", "8:failed+3", "8:idle"), True),
        (ends("9:failed+3", "7:idle"), False),  # nothing is known about the configuration of job 9
        (ends("7:failed+3", "7:idle", "7:idle"), False),  # launch.max_failures=1
    ],
    ids=lambda value: ",".join(f"{r['job_id']}:{r['reason']}" for r in value) if isinstance(value, list) else "",
)
def test_an_error_before_the_first_step(records: list[EndedAttempt], retried: bool) -> None:
    """A node without its GPU or its mount must not end a run that has trained for weeks. A configuration that cannot
    work must not be started again and again."""
    assert (decide(records, LAUNCH, "if_trained", SUBMITTED).what is not Next.END) == retried
    assert decide(records, LAUNCH, "no", SUBMITTED).what is Next.END


@pytest.mark.parametrize(
    ("record", "blamed", "follows"),
    [
        ("lost", [], Next.RESTART),
        ("hung", [], Next.RESTART),
        ("failed", ["n1"], Next.RESTART),
        ("failed", [], Next.END),
    ],
)
def test_without_a_queue(record: str, blamed: list[str], follows: Next) -> None:
    """Under --local a killed rank must not end a run over night; the user's own error must end it at once, as the user
    waits for it."""
    records = ends(record, f"here {record}")
    for one in records:
        one["blamed"] = blamed
    launch = replace(LAUNCH, max_restarts=2)
    assert decide(records, launch, local=True).what is follows
    assert decide(records, replace(launch, max_restarts=1), local=True).what is Next.END, "there are no other nodes"


def test_a_record_of_an_older_version(tmp_path: Path) -> None:
    """A run that began under an older version can be resumed: fields that its records lack get their defaults."""
    run = RunDir(tmp_path)
    older = {"attempt": 0, "job_id": "7", "restart": 0, "hosts": ["n1"], "world_size": 1, "start": 1.0, "end": 2.0}
    older |= {"start_step": 0, "end_step": 5, "reason": "preempted", "lost_steps": 0}
    run.attempts.write_text(json.dumps(older) + "\n")
    (record,) = read_ended_attempts(run.attempts)
    assert (record["lost_s"], record["step_s"], record["requeue"], record["error"]) == (0.0, None, False, None)
    assert begin_attempt(run, restarted(1), start_step=5)["attempt"] == 1


@pytest.mark.parametrize("damage", ['{"attempt": 0, "rea', "[1]", '{"attempt": 0}', "null", ""])
def test_a_damaged_line_is_skipped(damage: str, tmp_path: Path) -> None:
    """It costs one record; an exception would cost every command that looks at the run."""
    run = RunDir(tmp_path)
    begin_attempt(run, WORLD, start_step=0)
    end_attempt(run, WORLD, LAUNCH, "preempted", 9, 9)
    run.attempts.write_text(f"{damage}\n{run.attempts.read_text()}{damage}\n")
    assert [record["reason"] for record in read_attempts(run.attempts)] == ["preempted"]


def lost_and_begun_again(run: RunDir) -> World:
    """Three steps of a lost attempt, and the next one, which begins at step 2: that checkpoint seems to be intact."""
    start = begin_attempt(run, WORLD, start_step=0)["start"]
    lines = [{"step": step, "time": start + 10.0 * step} for step in (1, 2, 3)]
    add_metrics(run.metrics, lines)
    begin_attempt(run, restarted(1), start_step=2)
    assert [record["lost_steps"] for record in read_ended_attempts(run.attempts)] == [1]
    return restarted(1)


def test_the_checkpoint_of_the_start_is_damaged(tmp_path: Path) -> None:
    """The ranks find that out after the attempt has begun. It begins earlier then, and the lost one before it has lost
    more: the user is told what is really gone, and an attempt that kept nothing counts against the budget."""
    run = RunDir(tmp_path)
    world = lost_and_begun_again(run)
    run.attempts.write_text("damaged\n" + run.attempts.read_text() + "damaged too\n")
    lower_start_step(run, world, 1)
    (lost,) = read_ended_attempts(run.attempts)
    assert (lost["end_step"], lost["lost_steps"]) == (3, 2) and lost["lost_s"] == pytest.approx(20)
    assert run.attempts.read_text().startswith("damaged\n") and run.attempts.read_text().endswith("damaged too\n")
    record = end_attempt(run, world, LAUNCH, "failed", 0, 0)
    assert record is not None and (record["start_step"], record["end_step"], record["lost_steps"]) == (1, 1, 0)


def test_no_attempt_began_in_between(tmp_path: Path) -> None:
    """An attempt was lost, and srun could not start the next one: by both records the run kept the damaged checkpoint.
    None of the steps is forgotten."""
    run = RunDir(tmp_path)
    lost_and_begun_again(run)
    end_attempt(run, restarted(1), LAUNCH, "failed", 2, 2)
    begin_attempt(run, restarted(2), start_step=2)
    lower_start_step(run, restarted(2), 0)
    first, second = read_ended_attempts(run.attempts)
    assert (first["reason"], first["end_step"], first["lost_steps"]) == ("lost", 3, 3)
    assert (second["reason"], second["start_step"], second["end_step"], second["lost_steps"]) == ("failed", 0, 0, 0)


def test_a_step_that_was_saved_after_the_end(tmp_path: Path) -> None:
    """A rank was suspended, and the others recorded the end. It woke with the next step and saved that. The record says
    what was kept once the next attempt begins there."""
    run = RunDir(tmp_path)
    begin_attempt(run, WORLD, start_step=0)
    end_attempt(run, WORLD, LAUNCH, "hung", 8, 8)
    begin_attempt(run, restarted(1), start_step=9)
    raise_kept_step(run, 9)
    (hung,) = read_ended_attempts(run.attempts)
    assert (hung["reason"], hung["end_step"], hung["lost_steps"], hung["lost_s"]) == ("hung", 9, 0, 0.0)


@pytest.mark.parametrize("fails_again", [False, True])
def test_a_step_that_the_disk_did_not_show(tmp_path: Path, fails_again: bool) -> None:
    """A lost attempt had saved step 9. The start after it did not see that, and ended. Once the disk shows it, the
    records say that the lost attempt kept it, and that the other did nothing: also where the first start that saw it
    failed in the user's code before the checkpoint was read."""
    run = RunDir(tmp_path)
    start = begin_attempt(run, WORLD, start_step=5)["start"]
    add_metrics(run.metrics, [{"step": step, "time": start + step} for step in range(6, 11)])
    begin_attempt(run, restarted(1), start_step=5)
    end_attempt(run, restarted(1), LAUNCH, "failed", 5, 5)
    begin_attempt(run, restarted(2), start_step=9)
    if fails_again:
        end_attempt(run, restarted(2), LAUNCH, "failed", 9, 9)
        begin_attempt(run, restarted(3), start_step=9)
    raise_kept_step(run, 9)
    lost, *failed = read_ended_attempts(run.attempts)
    assert (lost["reason"], lost["end_step"], lost["lost_steps"]) == ("lost", 10, 1)
    assert lost["lost_s"] == pytest.approx(1)
    steps = [(each["start_step"], each["end_step"], each["lost_steps"]) for each in failed]
    assert steps == [(9, 9, 0)] * (1 + fails_again)


def test_the_step_that_the_records_say_is_saved(tmp_path: Path) -> None:
    """A start below it loses steps. It must be right at each moment of an attempt."""
    run = RunDir(tmp_path)
    assert recorded_step(run) == 0
    begin_attempt(run, WORLD, start_step=0)
    assert recorded_step(run) == 0
    end_attempt(run, WORLD, LAUNCH, "failed", 8, 5)
    assert recorded_step(run) == 5
    begin_attempt(run, restarted(1), start_step=7)
    assert recorded_step(run) == 7, "a rank that was suspended saved it later"
    lower_start_step(run, restarted(1), 3)
    assert recorded_step(run) == 3, "the checkpoints of steps 5 and 7 are damaged"
    run.attempt_now.rename(run.attempt_ended)
    assert recorded_step(run) == 3
    run.attempt_ended.rename(run.attempt_now)
    end_attempt(run, restarted(1), LAUNCH, "finished", 9, 9)
    assert recorded_step(run) == 9


def test_ended_while_its_start_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank ends the attempt between any two of rank 0's calls: it stays ended, with one record."""
    run = RunDir(tmp_path)
    world = lost_and_begun_again(run)
    real = attempts._write_temporary

    def ended_first(path: Path, text: str) -> Path:
        temporary = real(path, text)
        if path == run.attempt_now:
            monkeypatch.setattr(attempts, "_write_temporary", real)
            end_attempt(run, world, LAUNCH, "failed", 2, 2)
        return temporary

    monkeypatch.setattr(attempts, "_write_temporary", ended_first)
    lower_start_step(run, world, 1)
    assert [record["reason"] for record in read_ended_attempts(run.attempts)] == ["lost", "failed"]
    assert not run.attempt_now.exists(), "a leftover would look like an attempt that runs"
