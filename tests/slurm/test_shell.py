"""`laststep shell`: nodes of one's own, on which ranks start again and again, and a run that goes on in a job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from laststep.ranks import disk
from laststep.records.metrics import read_lines
from laststep.records.submissions import read_submissions
from tests.slurm.launchers import SMALL, UNHURRIED
from tests.slurm.processes import processes
from tests.slurm.test_requeue import undisturbed
from tests.slurm.user import User, begun
from tests.support.forked import process_of
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint

# Reads commands from a pipe, as a shell reads them from a terminal, and says how each has ended.
SHELL = """\
while read -r line; do
    bash -c "$line"
    echo "ended with $?"
done
"""


class Shell:
    """An allocation of two nodes, and the user who types in it."""

    def __init__(self, user: User, *words: str) -> None:
        self.user = user
        command = [user.python, user.program, "shell", "--nodes", "2", *words, "--", "bash", "-c", SHELL]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.process = subprocess.Popen(command, cwd=user.folder, env=user.env, text=True, **pipes)  # type: ignore
        begun.append(self.process)

    def begins(self, *words: str) -> None:
        """Type a command of ours."""
        assert self.process.stdin is not None
        typed = " ".join([self.user.python, self.user.program, *words, f"launch.root={self.user.root}"])
        self.process.stdin.write(f"{typed} </dev/null\n")
        self.process.stdin.flush()

    def ends(self) -> tuple[str, int]:
        """What it has printed, and its exit status."""
        said = ""
        for line in self.process.stdout or ():
            if line.startswith("ended with "):
                return said, int(line.split()[-1])
            said += line
        raise AssertionError(f"the shell has ended:\n{said}")

    def types(self, *words: str, status: int = 0) -> str:
        """Type a command, and wait for its end."""
        self.begins(*words)
        said, found = self.ends()
        assert found == status, said
        return said


@pytest.fixture
def shell(user: User) -> Iterator[Shell]:
    one = Shell(user, "launch.env.TYPED_OUTSIDE=1")
    yield one
    assert one.process.stdin is not None
    with contextlib.suppress(OSError):
        one.process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(10)  # else the test has failed, and what it has begun is ended


def jobs_of(user: User) -> list[str]:
    """The ids of all jobs in the queue."""
    return user.cluster.run("squeue", "--noheader", "--format=%i").split()


def kills_rank_1(user: User, name: str) -> None:
    """Kill the rank, not its supervisor."""
    (attempt,) = read_lines(user.run(name).attempt_now)
    ours = {"SUBMITIT_LOCAL_JOB_ID": attempt["job_id"], "SUBMITIT_LOCAL_GLOBALID": "1"}
    started = [pid for pid, _, environ in processes() if ours.items() <= environ.items()]
    supervisor = process_of(min(started), user.python)
    (rank,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)


def test_three_starts_and_a_job(user: User, shell: Shell) -> None:
    """Each start has all nodes at once, in the one job of the shell; the run that was stopped in it goes on in a job of
    its own, to the weights of an undisturbed one, and no step is lost."""
    for number in range(2):
        said = shell.types("--name", f"tried-{number}", *SMALL, "train.max_steps=3")
        assert "ranks  2 on 2 nodes of job" in said
    (attempt,) = user.attempts("tried-0")
    assert len(set(attempt["hosts"])) == 2 and attempt["world_size"] == 2
    words = ("task=tests.support.tasks.AwaitsStop", *SMALL, "train.epochs=2")
    shell.begins("--local", "--name", "goes-on", *words)
    user.waits_for("goes-on", "holds in its step 8", times=2)
    status = user.types("status", "goes-on", "--json")
    assert '"state": "running"' in status, status
    user.types("cancel", "goes-on")
    said, exit_status = shell.ends()
    assert exit_status == 130 and "stopped after step 8, every step is saved" in said, said
    said = shell.types("--nodes", "3", "--name", "too-many", *SMALL, "train.batch_size=9", status=2)
    assert "launch.nodes=3: this shell has 2 nodes (job" in said
    assert "is the shell of job" in shell.types("shell", status=2)
    jobs = jobs_of(user)
    shell.types("resume", "goes-on", "--nodes", "2")
    first, second = user.waits_for_end("goes-on", "finished")
    assert (first["reason"], first["lost_steps"], second["start_step"]) == ("cancelled", 0, 8)
    assert second["job_id"] not in jobs
    assert fingerprint(user.run("goes-on")) == undisturbed(2, *words)


def test_a_killed_rank(user: User, shell: Shell) -> None:
    """As under --local the ranks start again, and the user reads it; Ctrl-C stops them and keeps every step."""
    shell.begins("--local", "--name", "killed-in-shell", *UNHURRIED)
    user.waits_for("killed-in-shell", "step 20/120")
    kills_rank_1(user, "killed-in-shell")
    user.waits_for("killed-in-shell", "step 60/120")
    launcher = read_submissions(user.run("killed-in-shell").submissions)[-1]["process"].split()[1]
    subprocess.run(["kill", f"-{signal.SIGINT.value}", launcher], check=True)
    said, status = shell.ends()
    assert status == 130 and "every step is saved" in said, said
    first, second = user.attempts("killed-in-shell")[:2]
    assert (first["reason"], first["lost_steps"], first["step_restarts"]) == ("failed", 0, 0)
    assert (second["reason"], second["lost_steps"], second["step_restarts"]) == ("cancelled", 0, 1)


def is_free(user: User, name: str) -> bool:
    """Whether no rank is left."""
    return disk.lock_holder(user.run(name).lock) is None


def test_the_shell_ends(user: User, shell: Shell) -> None:
    """Whoever ends the allocation, or the command in it: the ranks stop, no step is lost, and nothing lives on."""
    for name, words in (("command-killed", "kill -KILL {launcher}"), ("given-back", "scancel {job}")):
        shell.begins("--local", "--name", name, *UNHURRIED)
        user.waits_for(name, "step 20/120")
        launcher = read_submissions(user.run(name).submissions)[-1]["process"].split()[1]
        (job,) = user.cluster.run("squeue", "--noheader", "--name=shell", "--format=%i").split()
        subprocess.run(words.format(launcher=launcher, job=job).split(), check=True, env=user.env)
        (attempt,) = user.waits(name, partial(user.attempts, name), "has not ended")
        assert (attempt["reason"], attempt["lost_steps"]) == ("preempted", 0)
        user.cluster.wait_for(partial(is_free, user, name), DEADLINE_S, f"{name} lives")


def test_refused(user: User, tmp_path: Path) -> None:
    """What cannot be had is refused in one line, before Slurm is asked for nodes."""
    said = user.types("shell", f"launch.container={tmp_path}", status=2)
    assert said.startswith("error: launch.container=") and "add launch.container=null" in said
    assert "would never start" in user.types("shell", "--nodes", "9", status=2)
    assert not user.cluster.run("squeue", "--noheader", "--name=shell").strip()
