"""Why a job waits, and limits on how many a user may submit, on a real Slurm with accounts, QOS and reservations."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from laststep.ranks.slurm import NEVER
from laststep.runs import pending
from laststep.runs.pending import sentence
from laststep.runs.queue import Queue
from tests.slurm.cluster import SLURM_CONF, Cluster, missing
from tests.slurm.user import User
from tests.support.needs import require
from tests.support.project import DEADLINE_S, wait_until

QUICK = ("data.name=fake", "data.args.samples=64", "data.args.image_size=8", "train.max_steps=2", "--time", "5")
CONF = (
    SLURM_CONF.replace(
        "PartitionName=cancel",
        "Licenses=matlab:1\nPartitionName=small Nodes=n4 MaxTime=30\nPartitionName=dead Nodes=n1 State=DOWN\n"
        "PartitionName=cancel",
    )
    + "PriorityType=priority/multifactor\nPriorityWeightPartition=1000\nMaxArraySize=3\n"
    + "AccountingStorageEnforce=associations,limits,qos\n"
)
ACCOUNTS = """\
add account physics
add account chemistry
add user root account=physics
add user root account=chemistry
add qos short MaxWall=10
add qos gpus MaxTRESPerUser=gres/gpu=2
add qos group GrpTRES=cpu=8 MaxTRESPerAccount=node=1
add qos single MaxJobsPerUser=1
add qos narrow MaxSubmitJobsPerUser=2
modify user root set qos=normal,short,gpus,group,single,narrow defaultaccount=physics
modify user root where account=chemistry set MaxJobs=1
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of a cluster with limits of every kind."""
    require(missing())
    folder = tmp_path_factory.mktemp("limits")
    cluster = Cluster.start(folder / "slurm", slurm_conf=CONF, owner=os.getpid())
    for line in ACCOUNTS.splitlines():
        words = line.split()
        if words[-1].startswith("defaultaccount"):
            cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", words.pop())
        cluster.run("sacctmgr", "-i", *words)
    yield User(cluster, folder / "runs")
    cluster.stop()


@pytest.fixture
def submits(user: User, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Submits a job that sleeps, with these options, and returns its id; all are cancelled in the end."""
    monkeypatch.setenv("SLURM_CONF", str(user.cluster.conf))
    # What a user may have set for other purposes must change no answer.
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")

    def submit(*options: str) -> str:
        said = user.cluster.run("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 3000")
        return said.strip()

    yield submit
    user.cluster.run("scancel", "--me")
    user.cluster.wait_for(lambda: not user.cluster.run("squeue", "-h"), DEADLINE_S, "jobs stay in the queue")


def why(user: User, job: str, reason: str) -> str:
    """Wait until Slurm gives this reason for which the job waits; returns what we say about it."""

    def word() -> str:
        jobs = Queue.ask([]).jobs or {}
        return jobs[job].reason if job in jobs and re.match(reason, jobs[job].reason) else ""

    return sentence(job, user.cluster.wait_for(word, DEADLINE_S, f"job {job} does not wait for {reason}"))


def runs(user: User, job: str) -> None:
    """Wait until a job runs."""
    state = lambda: user.cluster.run("squeue", "-h", "-j", job, "-o", "%t").strip() == "R"  # noqa: E731
    user.cluster.wait_for(state, DEADLINE_S, f"job {job} does not run")


def test_limits(user: User, submits: Callable[..., str]) -> None:
    """Who holds what a limit allows, and until when; or that a job is beyond it, and so never starts."""
    gpus = ("-q", "gpus", "--gpus-per-node=2", "-t", "20")
    first = submits(*gpus, "-N1")
    runs(user, first)
    said = why(user, submits(*gpus, "-N1"), "QOSMaxGRESPerUser")
    assert "QOS gpus allows a user at most 2 GPUs at a time, 2 in use, it asks for 2 GPUs" in said, said
    assert re.search(rf"held by job {first} of root \(2 GPUs, until 20..-..-.. ..:..\)$", said), said
    said = why(user, submits(*gpus, "-N2"), "QOSMaxGRESPerUser")
    assert said.endswith("at most 2 GPUs, and it asks for 4 GPUs, so it never starts; ask for less"), said
    said = why(user, submits("-q", "short", "-t", "20"), "QOSMaxWall")
    assert "QOS short allows at most 10 min for a job, and it asks for 20 min, so it never starts" in said, said
    submits("-q", "single", "-t", "5")
    said = why(user, submits("-q", "single", "-t", "5"), "QOSMaxJobsPerUserLimit")
    assert "QOS single allows a user at most 1 job at a time, 1 in use; held by job" in said, said
    submits("-q", "group", "-c8", "-t", "5")
    said = why(user, submits("-q", "group", "-c8", "-t", "5"), "QOSGrpCpuLimit")
    assert "QOS group allows at most 8 CPUs at a time, 8 in use, it asks for 8 CPUs; held by job" in said, said
    said = why(user, submits("-q", "group", "-N2", "-t", "5"), ".*MaxNode")
    assert "QOS group allows an account at most 1 node, and it asks for 2 nodes" in said, said
    submits("-A", "chemistry", "-t", "5")
    said = why(user, submits("-A", "chemistry", "-t", "5"), "AssocMaxJobsLimit")
    assert "account chemistry allows root at most 1 job at a time, 1 in use; held by job" in said, said


def test_what_a_job_asks_for(user: User, submits: Callable[..., str]) -> None:
    """Reasons that lie in the job itself."""
    first = submits("-t", "20", "-L", "matlab:1")
    runs(user, first)
    said = why(user, submits("-t", "5", "-d", f"afterany:{first}"), "Dependency")
    assert re.search(rf"Dependency: job {first} is RUNNING until \S+ ..:.. at the latest \(afterany\)", said), said
    said = why(user, submits("-t", "5", "-L", "matlab:1"), "Licenses")
    assert "1 of 1 licenses matlab are in use, it needs 1" in said, said
    held = submits("-t", "5", "-H")
    assert f"you hold it; `scontrol release {held}` lets it go" in why(user, held, "JobHeldUser")
    assert "it was asked to wait until 20" in why(user, submits("-t", "5", "-b", "now+1hour"), "BeginTime")
    said = why(user, submits("-t", "5", "-a", "0-1%1") + "_1", "JobArrayTaskLimit")
    assert "its sweep runs at most 1 at a time (--parallel)" in said, said
    said = why(user, submits("-t", "60", "-p", "small"), "PartitionTimeLimit")
    assert "small allows at most 00:30:00, and the job asks for 01:00:00" in said, said
    said = why(user, submits("-t", "5", "-p", "small", "-N2"), "PartitionNodeLimit")
    assert "small has 1 node, and the job asks for 2" in said, said
    assert why(user, submits("-t", "5", "-p", "dead"), "PartitionDown") == "PartitionDown: dead is DOWN"


def test_the_line(user: User, submits: Callable[..., str]) -> None:
    """What is ahead of a run, when it starts, and what starts sooner: a command reports all of it, before and after a
    submission, and Slurm then starts a job with that change at once."""
    running = submits("-N3", "-c8", "-t", "60")
    runs(user, running)
    dry = user.types(*QUICK, "--nodes", "2", "--name", "line", "--dry-run")
    assert re.search(r"# sbatch --test-only: Slurm would start it at 20", dry), dry
    assert "# sooner with --nodes 1: now" in dry and not user.run("line").path.exists(), dry
    user.types(*QUICK, "--nodes", "2", "--name", "line")
    said = why(user, user.job_of("line"), "Resources")
    assert "it is next in main: it needs 2 nodes, and 1 of 4 is idle; the first to end: job" in said, said

    def status_with_a_start() -> str:
        # Slurm's scheduler plans a start some seconds after it has given the reason.
        shown = user.types("status", "line")
        return shown if "as Slurm expects" in shown else ""

    shown = wait_until(status_with_a_start, "Slurm expects no start of the job", 1.0)
    assert "it is next in main" in shown, shown
    assert re.search(r"sooner .*--nodes 1: ", shown), shown
    behind = submits("-N4", "-t", "60")
    said = why(user, behind, "Priority")
    assert re.search(r"1 job for 2 nodes is ahead of it in main; its priority is \d+ \(.*partition 1000\)", said), said
    (status,) = json.loads(user.types("status", "line", "--json"))
    found = status["pending"]
    assert found["reason"] == "Resources" and found["starts_at"] == status["starts_at"], found
    assert found["sooner"] and found["sooner"][0].keys() == {"change", "starts_at"}, found
    user.types("cancel", "line")
    user.types("resume", "line", "--nodes", "1", "--follow")
    assert running in user.cluster.run("squeue", "-h"), "it has not waited for the other job"


def test_nodes_that_are_not_there(user: User, submits: Callable[..., str]) -> None:
    """Drained nodes, with what an administrator wrote about them, and maintenance that a job would run into."""
    cluster = user.cluster
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=bad rail")
    try:
        said = why(user, submits("-t", "5", "-w", "n3"), "ReqNodeNotAvail|Nodes? ?[rR]equired")
        assert said.endswith("n3 is drained (bad rail)"), said
        said = why(user, submits("-t", "5", "-N4"), "ReqNodeNotAvail|Nodes? ?[rR]equired")
        assert said.endswith("n3 is drained (bad rail), it needs 4 nodes of 3 that are left"), said
    finally:
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
    cluster.run(
        *("scontrol", "create", "reservation", "reservationname=upgrade", "starttime=now+30minutes", "duration=60"),
        *("user=root", "flags=maint,ignore_jobs", "nodes=n[1-3]"),
    )
    try:
        words = (*QUICK[:-2], "--nodes", "2", "--name", "windows")
        said = user.types(*words, "--time", "60", "--dry-run")
        expected = (
            r"maintenance upgrade has n\[1-3\] from \S+ ..:.. to \S+ ..:.., and a job of 60 min would run into it"
        )
        assert re.search(expected + r"; at most --time 2\d ends before; it starts at ", said), said
        said = user.types(*words, "--time", "60")
        assert re.search(expected, said), "the submission says it, too"
        assert "maintenance upgrade has n[1-3]" in user.types("status", "windows")
        user.types("cancel", "windows")
        said = user.types("resume", "windows", "--time", "5", "--follow")
        assert "maintenance" not in said and "finished" in user.types("status", "windows")
    finally:
        cluster.run("scontrol", "delete", "reservationname=upgrade")


def test_names(user: User) -> None:
    """An account or a QOS that this user has not: the nearest is named, and nothing is submitted."""
    for words, said in (
        (["launch.qos=shrt"], "launch.qos=shrt: you may not use such a QOS; did you mean short?"),
        (["launch.account=phisics"], "launch.account=phisics: you may not use such an account; did you mean physics?"),
        (["launch.account=phisics", "--dry-run"], "did you mean physics?"),
    ):
        printed = user.types("--name", "names", *words, status=2)
        assert said in printed and len(printed.splitlines()) == 1, printed
    assert not user.run("names").path.exists()


def test_several_partitions(user: User, submits: Callable[..., str]) -> None:
    """The first of the partitions that has room is taken, with a limit that Slurm may shorten."""
    submits("-p", "small", "-w", "n4", "-c8", "-t", "20")
    words = ("launch.partition=[small,main]", "--time", "20", "launch.least_time_min=10", *QUICK[:-2])
    user.types("--name", "partitions", *words, "--follow")
    shown = user.cluster.run("scontrol", "show", "job", user.job_of("partitions"))
    assert "Partition=main" in shown and "TimeMin=00:10:00" in shown, shown
    user.types("doctor", "launch.partition=[small,main]", status=1)
    said = user.types("doctor", "launch.partition=[small,mian]", status=2)
    assert "did you mean main?" in said


def test_submit_limit(user: User, submits: Callable[..., str]) -> None:
    """A user may have two jobs in the queue. A single run waits for room; Ctrl-C leaves nothing behind."""
    narrow = ("-q", "narrow", "-t", "20")
    first, _ = submits(*narrow), submits(*narrow)
    words = ("--name", "room", "launch.qos=narrow", *QUICK)
    waiting = user.begins(*words)
    assert waiting.stdout is not None
    line = waiting.stdout.readline()
    assert "Slurm takes no more jobs now (QOSMaxSubmitJobPerUserLimit): waiting until one ends" in line, line
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(DEADLINE_S) == 130 and not user.run("room").path.exists()
    waiting = user.begins(*words, "--follow")
    assert waiting.stdout is not None and "takes no more" in waiting.stdout.readline()
    user.cluster.run("scancel", first)
    said, _ = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 0, said
    assert len((user.run("room").submissions).read_text().splitlines()) < 9, "a wait writes nothing"


@pytest.mark.parametrize("chain", [1, 3])
def test_a_sweep_under_limits(user: User, submits: Callable[..., str], chain: int) -> None:
    """Four runs where a user may have two jobs, in arrays of at most three: all are submitted, one after another, none
    is left without a job, and all finish."""
    sweep = f"four-{chain}"
    words = ("sweep", "--name", sweep, "launch.qos=narrow", "seed=0..3", f"launch.chain={chain}", *QUICK)
    said = user.types(*words)
    assert "waiting until one ends" in said and f"sweep  {sweep}: 4 runs" in said, said
    for seed in range(4):
        user.waits_for_end(f"{sweep}-seed_{seed}", "finished")
    user.cluster.wait_for(lambda: not user.cluster.run("squeue", "-h"), DEADLINE_S, "jobs are left in the queue")
    assert "all of them have finished" in user.types(*words), "the same command again"


def test_large_arrays(user: User, submits: Callable[..., str]) -> None:
    """More runs than Slurm takes as one array (MaxArraySize=3): several arrays, which keep --parallel together."""
    said = user.types("sweep", "--name", "large", "seed=0..3", "--parallel", "1", *QUICK)
    arrays = re.search(r"job    (\d+), (\d+): 4 runs, 1 at a time", said)
    assert arrays, said
    for seed in range(4):
        user.waits_for_end(f"large-seed_{seed}", "finished")
    started = [user.attempts(f"large-seed_{seed}")[0] for seed in range(4)]
    assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(started)), "one at a time"


def test_exclusive(user: User, submits: Callable[..., str]) -> None:
    """A job that has its nodes for itself trains with the ranks that it asked for, not one for each CPU."""
    user.types("--name", "exclusive", "--nodes", "2", *QUICK, "launch.slurm.exclusive=true", "--follow")
    (attempt,) = user.attempts("exclusive")
    shown = user.cluster.run("scontrol", "show", "job", user.job_of("exclusive"))
    assert attempt["world_size"] == 2 and "OverSubscribe=NO" in shown and "NumCPUs=16" in shown, shown
    said = user.types("--name", "mixed", *QUICK, "launch.srun=[--het-group=0]", status=2)
    assert "a run cannot be a heterogeneous job" in said


def test_options_of_a_user_change_nothing(user: User, submits: Callable[..., str]) -> None:
    """SLURM_TIME_FORMAT and the like are for a user's own eyes: a start that is tried is still understood."""
    assert pending.try_it("#!/bin/bash\n#SBATCH --time=5\n").starts_at < NEVER
