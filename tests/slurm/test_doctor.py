"""doctor on a real Slurm: the problems that it finds, and its roll call of the nodes."""

from __future__ import annotations

import re
import signal

from tests.slurm.user import User
from tests.support.project import DEADLINE_S, read_until


def test_dangers(user: User) -> None:
    """It names the problems of this cluster, and nothing that is in order."""
    said = user.types("doctor", status=1)
    _, _, problems = said.partition("\nproblems\n")
    accounting = user.cluster.accounting
    assert problems.count("\n") == (2 if accounting else 3)
    assert ("no accounting" in problems) != accounting
    assert "KillWait=15 s" in problems and "PreemptMode=CANCEL (partition cancel)" in problems
    assert re.search(r"^  grace +4 +UNLIMITED +1 +REQUEUE +15$", said, re.MULTILINE)
    assert "waits 5 s" in said and ("sacct: answers" in said) == accounting
    assert "CANCEL" not in user.types("doctor", "--partition", "high", status=1)
    assert "did you mean cancel?" in user.types("doctor", "--partition", "cancl", status=2)


def test_hello(user: User) -> None:
    """All ranks of all nodes of the range answer, in rank order, with the right sum; no file is left behind."""
    said = user.types("doctor", "--nodes", "1-2", "--tasks-per-node", "2")
    greetings = re.findall(r"^\[n1:\d+\] hello from \[(n\d):gloo\] rank (\d)/4$", said, re.MULTILINE)
    assert greetings == [("n1", "0"), ("n1", "1"), ("n2", "2"), ("n2", "3")]
    assert "sum of ones: 4 on every rank" in said
    assert re.search(r"^ +16 MiB +\d+\.\d ms +\d+\.\d\d GB/s$", said, re.MULTILINE)
    assert sorted(re.findall(r"x median  (n\d)$", said, re.MULTILINE)) == ["n1", "n2"]
    assert not list(user.root.glob(".doctor-*"))


def test_ranks_that_fail(user: User) -> None:
    """doctor names the ranks and the reason. Their logs stay, and the job is not requeued."""
    said = user.types("doctor", "--nodes", "2", "--gpus-per-node", "1", status=1)
    for rank, node in ((0, "n1"), (1, "n2")):
        assert re.search(rf"^error: rank {rank} on {node}: .*torch finds no GPU on this machine", said, re.MULTILINE)
    (folder,) = user.root.glob(".doctor-*")
    assert str(folder) in said and list(folder.glob("logs/*_0_log.out"))


def test_ctrl_c_cancels_the_job(user: User) -> None:
    """The user need not look for the job in the queue."""
    before = set(user.root.glob(".doctor-*"))
    asking = user.begins("doctor", "--nodes", "2", "launch.slurm.hold=true")
    job = read_until(asking, "pending jobhelduser").split()[1].rstrip(":")
    asking.send_signal(signal.SIGINT)
    said, _ = asking.communicate(timeout=DEADLINE_S)
    assert asking.returncode == 130 and f"job {job}: cancelled" in said
    user.waits_until_gone(job)
    assert set(user.root.glob(".doctor-*")) == before
