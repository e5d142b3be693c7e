"""A fault on a real Slurm does not cost the allocation: the ranks start again in the same job, without a requeue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from laststep.config.config import Config
from laststep.rundir import RunDir
from tests.slurm.launchers import IN_EPOCH_2, SMALL, UNHURRIED
from tests.slurm.user import User
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

# 14 steps. A fault may strike in a given step of each attempt, see tests.support.tasks.Faulty.
FAULTY = (*SMALL, "train.epochs=2", "task=tests.support.tasks.Faulty")
# A stand-in for `decide`, which starts what decides for the batch shell, or for `scontrol`, which the ranks'
# supervisors ask: it holds back its first answer.
HOLDS_BACK = """\
#!/bin/bash
{program} "$@"
status=$?
if compgen -G "{rescues}/*/leader_0.json" >/dev/null && mkdir {folder}/decided 2>/dev/null; then
    until [ -e {folder}/go ]; do sleep 0.1; done
fi
exit $status
"""


def undisturbed(ranks: int, *words: str) -> dict[str, Any]:
    """The fingerprint of an undisturbed run, on one host."""
    return undisturbed_run(Config.load("mnist", [*words, f"launch.tasks_per_node={ranks}"]))


def requeues(user: User, name: str) -> int:
    """How often Slurm has requeued the run's job; it remembers an ended job for minutes."""
    shown = user.cluster.run("scontrol", "show", "job", "--oneliner", user.job_of(name))
    return int(dict(word.split("=", 1) for word in shown.split() if "=" in word)["Restarts"])


def starts(user: User, name: str) -> list[tuple[str, int, int | None, int]]:
    """How each attempt ended, the requeues before it, its step in Slurm, and the restarts within that step."""
    return [(end["reason"], end["restart"], end["step_id"], end["step_restarts"]) for end in user.attempts(name)]


def test_a_killed_rank(user: User) -> None:
    """As when a node runs out of memory. The other ranks end in seconds, not after a timeout; one of them saves the
    last complete step before Slurm ends them too. The job never leaves its nodes: no queue, no lost step, the same
    bits. Its log says where to look for the reason."""
    following = user.begins("--nodes", "2", "--tasks-per-node", "2", "--name", "kept", "--follow", *UNHURRIED)
    user.waits_for("kept", IN_EPOCH_2)
    user.kills("kept", 3)
    user.cluster.wait_for(lambda: user.attempts("kept"), 30, "the other ranks did not notice")
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert "resuming after step" in said, "--follow streams through the restart"
    assert starts(user, "kept") == [("failed", 0, 0, 0), ("finished", 0, 2, 0)], "step 1 asked the node"
    assert requeues(user, "kept") == 0
    first, second = user.attempts("kept")
    assert (first["job_id"], first["hosts"]) == (second["job_id"], second["hosts"])
    assert first["requeue"] and "gone (killed, out of memory, or its node died)" in first["error"]
    assert first["lost_steps"] == 0 and second["start_step"] == first["end_step"] >= 50
    hints = [line for line in user.types("logs", "kept").splitlines() if "hint: " in line]
    ask = f"sacct -j {user.job_of('kept')} --format=JobID,State"
    assert len(hints) == 1 and f"(`{ask}` shows it): set launch.mem_gb, " in hints[0]
    if user.cluster.accounting:
        assert user.cluster.run(*ask.split()).split()[:2] == ["JobID", "State"], "a command that Slurm has"
    assert fingerprint(user.run("kept")) == undisturbed(4, *UNHURRIED)


def test_killed_in_the_last_save(user: User) -> None:
    """No collective fails: the other rank waits for a part of the checkpoint, on another node. It is told at once, long
    before a silent rank would be taken for dead."""
    words = ("task=tests.support.tasks.KilledInTheLastSave", "checkpoint.every_epochs=null")
    user.types("--nodes", "2", "--name", "last-save", "--follow", *SMALL, "train.epochs=2", *words)
    assert starts(user, "last-save") == [("failed", 0, 0, 0), ("finished", 0, 0, 1)]
    first, second = user.attempts("last-save")
    assert (first["end_step"], first["lost_steps"], second["start_step"]) == (14, 0, 14)
    assert fingerprint(user.run("last-save")) == undisturbed(2, *SMALL, "train.epochs=2")


@pytest.mark.parametrize("fault", ["kill", "halt"])
def test_as_long_as_it_makes_progress(user: User, fault: str) -> None:
    """A rank is killed, or frozen, in the fifth step of every attempt. Each attempt keeps four steps, so the budget of
    one restart lasts for the whole run."""
    options = ("launch.max_restarts=1", "launch.max_failures=0", "launch.hang_timeout_s=5")
    words = (*FAULTY, *options, f"launch.env.LASTSTEP_TEST_FAULT={fault} step 5 rank 1")
    user.types("--nodes", "2", "--name", fault, "--follow", *words)
    reason = "hung" if fault == "halt" else "failed"
    assert starts(user, fault) == [*[(reason, 0, 0, count) for count in range(3)], ("finished", 0, 0, 3)]
    assert requeues(user, fault) == 0 and sum(end["lost_steps"] for end in user.attempts(fault)) == 0
    assert fingerprint(user.run(fault)) == undisturbed(2, *SMALL, "train.epochs=2")


def test_restarts_that_get_nowhere(user: User) -> None:
    """The allocation is given back, since its nodes may be bad; with those of the next one it is the same: a bug."""
    options = ("launch.max_restarts=1", "launch.max_failures=1")
    words = (*FAULTY, *options, "launch.env.LASTSTEP_TEST_FAULT=kill step 1 rank 1")
    following = user.begins("--nodes", "2", "--name", "nowhere", "--follow", *words)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 1 and "the run ended: failed" in said
    assert starts(user, "nowhere") == [("failed", 0, 0, 0), ("failed", 0, 0, 1), ("failed", 1, 0, 0)]
    user.waits_for("nowhere", "retry budget used up (launch.max_failures=1)")


@pytest.mark.parametrize(
    ("name", "signal", "end"),
    [
        ("usr2", ("--batch", "--signal=USR2"), ("finished", 1, 0, 0)),
        ("term", ("--batch", "--signal=TERM"), ("finished", 1, 0, 0)),
        ("scancel", (), None),
    ],
)
def test_a_signal_between_two_starts(
    user: User, tmp_path: Path, name: str, signal: tuple[str, ...], end: tuple[str, int, int, int] | None
) -> None:
    """It comes at the worst moment: the shell has decided to restart, and no rank lives that could receive it. The job
    is requeued or stays cancelled, as if the signal had come a moment earlier."""
    name = f"between-{name}"
    words = _held_back(user.run(name), tmp_path, "decide", "kill-both")
    hold = f'at_most() {{ shift; {tmp_path}/decide "$@"; }}'  # in place of the shell's own function
    words = (*words, f"launch.setup=[{json.dumps(hold)}]")
    user.types("--tasks-per-node", "2", "--name", name, *words)  # on two nodes, the setup would be step 0
    user.cluster.wait_for((tmp_path / "decided").exists, DEADLINE_S, "the shell has decided nothing")
    user.waits_for(name, "restarting the ranks in job")
    user.cluster.run("scancel", *signal, user.job_of(name))
    (tmp_path / "go").touch()
    if end is not None:
        user.waits_for_end(name, "finished")
    user.waits_until_gone(user.job_of(name))
    first, *more = starts(user, name)
    assert first == ("failed", 0, 0, 0)
    if end is not None:
        assert more == [end]
    else:  # srun may be a moment faster than the SIGTERM of scancel: then Slurm refuses it, and no rank starts
        assert more in ([], [("cancelled", 0, None, 0)])
    state = user.cluster.run("scontrol", "show", "job", user.job_of(name))
    assert ("JobState=CANCELLED" in state) == (end is None)


@pytest.mark.parametrize(
    ("name", "signal", "ends"),
    [
        ("usr2", ("--signal=USR2",), [("preempted", 0, 0, 1), ("finished", 1, 0, 0)]),
        ("term", ("--signal=TERM",), [("finished", 0, 2, 0)]),
        ("scancel", (), []),
    ],
)
def test_a_signal_between_two_starts_in_a_step(
    user: User, tmp_path: Path, name: str, signal: tuple[str, ...], ends: list[tuple[str, int, int, int]]
) -> None:
    """The same while the ranks' supervisors ask Slurm whether they start them again. USR2 reaches the next start, which
    stops in its first step; SIGTERM ends the step, and the shell decides."""
    name = f"within-{name}"
    user.types("--tasks-per-node", "2", "--name", name, *_held_back(user.run(name), tmp_path, "scontrol", "kill"))
    user.cluster.wait_for((tmp_path / "decided").exists, DEADLINE_S, "no supervisor has asked Slurm")
    user.cluster.run("scancel", *signal, user.job_of(name))
    (tmp_path / "go").touch()
    if ends:
        user.waits_for_end(name, "finished")
    user.waits_until_gone(user.job_of(name))
    first, *more = starts(user, name)
    assert first == ("failed", 0, 0, 0)
    if ends:
        assert more == ends
    else:  # the SIGTERM of scancel may come a moment after the answer: then the ranks have started, and stop at once
        assert more in ([], [("cancelled", 0, 0, 1)])
    state = user.cluster.run("scontrol", "show", "job", user.job_of(name))
    assert ("JobState=CANCELLED" in state) == (not ends)


def _held_back(run: RunDir, folder: Path, program: str, fault: str) -> tuple[str, ...]:
    """The words for a run with a fault, after which this program holds back its first answer."""
    stand_in = folder / program
    stand_in.write_text(HOLDS_BACK.format(program=shutil.which(program) or "", folder=folder, rescues=run.rescues))
    stand_in.chmod(0o755)
    return (*FAULTY, f"launch.env.LASTSTEP_TEST_FAULT={fault} step 8 rank 1", f"launch.setup=['PATH={folder}:$PATH']")
