"""doctor, without a Slurm: its checks of Slurm's settings, of a folder and of GPUs, and its roll call.

A problem that it misses breaks a run at night. A false alarm teaches people to ignore it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Launch
from laststep.doctor import diagnosis
from laststep.doctor import greeting as hello
from laststep.doctor.diagnosis import RunRoot, check_bad_nodes, check_gpus, check_run_root, mount_of
from laststep.doctor.greeting import Greeting, RollCall
from laststep.doctor.slurm_settings import SlurmSettings, check_gpu_binding, check_slurm
from laststep.ranks.slurm import parse_config, parse_records
from laststep.rundir import RunDir
from tests.support.commands import REFUSING_SBATCH, files, refusal
from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.records import ended_attempt

# From Slurm 22.05.8, shortened.
CONFIG = """\
Configuration data as of 2026-11-21T13:46:54
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = socket=/run/munge.socket,cred_expire=5
ClusterName             = laststep
JobRequeue              = 1
KillWait                = 30 sec
PowerPlugin             = 
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
RequeueExit             = (null)
RequeueExitHold         = (null)
SLURM_VERSION           = 22.05.8
SlurmctldHost[0]        = vm(127.0.0.1)
SlurmctldParameters     = (null)
TaskPluginParam         = (null type)

Slurmctld(primary) at vm is UP
"""  # noqa: W291
PARTITIONS = """\
PartitionName=main Default=YES GraceTime=0 MaxTime=UNLIMITED PriorityTier=1 PreemptMode=REQUEUE TotalNodes=2
PartitionName=high Default=NO GraceTime=0 MaxTime=7-00:00:00 PriorityTier=10 PreemptMode=OFF TotalNodes=1
"""
NODES = """\
NodeName=n1 Arch=x86_64 CPUTot=8 NodeHostName=n1 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0 Partitions=main,high
NodeName=n2 Arch=x86_64 CPUTot=16 NodeHostName=n2 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0 Partitions=main
"""
HEALTHY = SlurmSettings(parse_config(CONFIG), parse_records(PARTITIONS), parse_records(NODES), sacct_error=None)
SHARED = RunRoot(Path("/home/me/runs"), "nfs4", None, 10**12)


def with_settings(**changed: str) -> SlurmSettings:
    """A healthy cluster, with these settings changed."""
    return dataclasses.replace(HEALTHY, config={**HEALTHY.config, **changed})


def test_parsing() -> None:
    """Settings without a value are left out, in each of Slurm's spellings."""
    assert HEALTHY.config["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert not {"RequeueExit", "TaskPluginParam"} & set(HEALTHY.config)
    assert (HEALTHY.kill_wait_s, HEALTHY.cred_expire_s, HEALTHY.sends_user_signal) == (30, 5, False)
    assert HEALTHY.requeue_delay.startswith("waits 5 s")
    expedited = with_settings(SLURM_VERSION="26.05.5", SlurmctldParameters="enable_expedited_requeue")
    assert expedited.requeue_delay.startswith("starts again as soon as")
    assert with_settings(AuthInfo="").cred_expire_s == 120
    assert with_settings(SlurmctldParameters="preempt_send_user_signal").sends_user_signal
    assert with_settings(PreemptParameters="send_user_signal").sends_user_signal


def test_a_healthy_cluster() -> None:
    """No false alarm: exit status 0 depends on it."""
    assert list(check_slurm(HEALTHY, Launch())) == []
    assert list(check_run_root(SHARED, HEALTHY, Launch(), "login")) == []
    assert list(check_gpus(in_driver=2, in_torch=2)) == []


CANCELLING = [{**partition, "PreemptMode": "CANCEL"} for partition in HEALTHY.partitions]


@pytest.mark.parametrize(
    ("slurm", "launch", "says"),
    [
        (with_settings(KillWait="15 sec"), Launch(), ["KillWait=15 s", "more than 7.5 s", "within 12 s"]),
        (HEALTHY, Launch(grace_s=60), ["launch.grace_s=60: Slurm sends SIGKILL after KillWait=30 s"]),
        (HEALTHY, Launch(slurm={"no-requeue": True}), ["launch.slurm.no-requeue", "launch.py resume"]),
        (
            dataclasses.replace(HEALTHY, partitions=CANCELLING),
            Launch(),
            ["PreemptMode=CANCEL (partition main, partition high)", "KillWait=30 s"],
        ),
        (with_settings(PreemptType="preempt/qos", PreemptMode="CANCEL"), Launch(), ["(every QOS"]),
        (with_settings(RequeueExit="1-9"), Launch(), ["RequeueExit=1-9", "launch.max_failures", "launch.py cancel"]),
        (with_settings(RequeueExitHold="7"), Launch(), ["RequeueExitHold=7", "scontrol release"]),
        (
            dataclasses.replace(HEALTHY, sacct_error="Slurm accounting storage is disabled"),
            Launch(),
            ["no accounting (Slurm accounting storage is disabled)", "job.result()", "launch.py status"],
        ),
        (HEALTHY, Launch(cpus_per_task=9, tasks_per_node=2), ["more than 16 CPUs", "set launch.cpus_per_task=8"]),
        (HEALTHY, Launch(tasks_per_node=17), ["use at most 16 ranks per node"]),
    ],
    ids=["kill-wait", "grace", "no-requeue", "cancel", "cancel-qos", "exit", "exit-hold", "sacct", "cpus", "ranks"],
)
def test_problems_of_a_cluster(slurm: SlurmSettings, launch: Launch, says: list[str]) -> None:
    """Each one alone, with its fix."""
    (problem,) = check_slurm(slurm, launch)
    assert all(text in str(problem) for text in says), problem


PER_TASK: dict[str, Any] = {"tasks_per_node": 4, "slurm": {"gpus-per-task": "a100:1"}}


def test_gpus_that_a_rank_does_not_see() -> None:
    """NCCL would copy through host memory, at a tenth of NVLink's speed, and say so only with NCCL_DEBUG=INFO."""
    constrained = with_settings(ConstrainDevices="yes")
    (problem,) = check_gpu_binding(constrained, Launch(**PER_TASK))
    assert str(problem).startswith("launch.slurm.gpus-per-task=a100:1: with ConstrainDevices=yes Slurm hides the other")
    assert str(problem).endswith("use launch.gpus_per_node=4 instead, with launch.slurm.gpu-bind=none")
    slurm = {"gpus-per-task": 1, "gpu-bind": "none"}
    for calm, launch in (
        (with_settings(ConstrainDevices="no"), Launch(**PER_TASK)),
        (HEALTHY, Launch(**PER_TASK)),
        (constrained, Launch(gpus_per_node=4)),
        (constrained, Launch(slurm={"gpus-per-task": 1})),
        (constrained, Launch(tasks_per_node=4, slurm=slurm)),
        (constrained, Launch(**PER_TASK, srun=["--gpu-bind=none"])),
    ):
        assert not list(check_gpu_binding(calm, launch))


def test_a_roll_call_warns_of_them(
    slurm: Path, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its all-reduces will be slow, and this is why."""
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'ConstrainDevices = yes'\n")
    (slurm / "scontrol").chmod(0o755)
    monkeypatch.setattr(RollCall, "wait", Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor", "--nodes", "1", "--tasks-per-node", "2", "launch.slurm.gpus-per-task=1"]) == 130
    assert capfd.readouterr().out.startswith("WARNING: launch.slurm.gpus-per-task=1: with ConstrainDevices=yes")


def test_no_preemption() -> None:
    """Without preemption, PreemptMode has no effect."""
    calm = with_settings(PreemptType="preempt/none")
    assert list(check_slurm(dataclasses.replace(calm, partitions=CANCELLING), Launch())) == []


def test_one_partition() -> None:
    """With a partition chosen, only that one counts; an unknown name is wrong input."""
    high = HEALTHY.of_partition("high")
    assert [node["NodeName"] for node in high.nodes] == ["n1"]
    (problem,) = check_slurm(high, Launch(cpus_per_task=9))
    assert "more than 8 CPUs" in problem.what
    with pytest.raises(ConfigError, match=r"launch\.partition=mian: no such partition; did you mean main"):
        HEALTHY.of_partition("mian")


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (dataclasses.replace(SHARED, kind="ext4"), "only login can see, but jobs run on other machines, e.g. n1"),
        (dataclasses.replace(SHARED, lock_error="mounted with nolock"), "locks do not work (mounted with nolock)"),
        (dataclasses.replace(SHARED, free_bytes=10**9), "only 1.0 GB free"),
    ],
    ids=["local", "locks", "full"],
)
def test_problems_of_a_folder(root: RunRoot, says: str) -> None:
    """Each one alone. A local disk is fine without Slurm, and when this machine is Slurm's only node."""
    (problem,) = check_run_root(root, HEALTHY, Launch(), "login")
    assert says in problem.what
    if root.is_local:
        assert not list(check_run_root(root, None, Launch(), "login"))
        assert not list(check_run_root(root, HEALTHY.of_partition("high"), Launch(), "n1"))


def test_gpus_that_torch_cannot_use() -> None:
    """With a torch that is too new for the driver, a run would train on the CPU for days."""
    (problem,) = check_gpus(in_driver=8, in_torch=0)
    assert "the driver has 8 GPUs, but torch can use 0" in problem.what


MOUNTS = r"""/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2,local_lock=none 0 0
server:/old /home/me/my\040runs nfs rw,nolock 0 0
mgs:/scratch /home/me/my\040runs lustre rw,flock 0 0
/dev/sdb1 /home2 xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data", ("ext4", "rw,relatime")),
        ("/home/me", ("nfs4", "rw,vers=4.2,local_lock=none")),
        ("/home/me/my runs/a", ("lustre", "rw,flock")),
        ("/home2/me", ("xfs", "rw")),
    ],
)
def test_mounts(path: str, found: tuple[str, str]) -> None:
    """The innermost mount counts, and the last of several on one folder; /home2 is not in /home."""
    assert mount_of(Path(path), MOUNTS) == found


def test_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    """Its nearest existing parent is tested; nothing is created or left behind."""
    root = RunRoot.inspect(tmp_path / "not" / "yet")
    assert root.path == tmp_path / "not" / "yet" and root.lock_error is None and root.free_bytes > 0
    assert files(tmp_path) == []


def greeting(rank: int, host: str, work_s: float, seconds: list[float], total: float = 4.0) -> Greeting:
    return Greeting(rank, 4, host, "gloo", "n1:4711", total, work_s, {hello.MIB: seconds})


FOUR = [
    greeting(0, "n1", 1.0, [0.01, 0.01, 0.01]),
    greeting(1, "n1", 1.0, [0.01, 0.03, 0.01]),
    greeting(2, "n2", 1.0, [0.02, 0.01, 0.01]),
    greeting(3, "n3", 3.0, [0.01, 0.01, 0.01]),
]


def test_report() -> None:
    """The slowest rank's time counts for each repeat. The bandwidth is that of nccl-tests: 2 x 3/4 x 1 MiB in 20 ms are
    0.0786 GB/s. The slowest host is first."""
    assert str(FOUR[2]) == "[n1:4711] hello from [n2:gloo] rank 2/4"
    assert hello.all_reduce_times(FOUR) == {hello.MIB: 0.02}
    lines = hello.report(FOUR)
    assert lines[0] == "sum of ones: 4 on every rank"
    assert "     1 MiB   20.0 ms      0.08 GB/s" in lines
    assert "    3000 ms   3.00 x median  n3" in lines and next(iter(hello.work_times(FOUR))) == "n3"
    wrong = [*FOUR[:3], greeting(3, "n3", 1.0, [0.01], total=3.0)]
    assert hello.report(wrong)[0] == "rank 3 on n3: the sum of 4 ones is 3"


def test_nodes_that_runs_blame(tmp_path: Path) -> None:
    """One fault may be chance. Two on one node, of whatever runs, are for the administrators to see."""
    for name, nodes in (("a", ["n2", "n3"]), ("b", ["n2"]), ("c", [])):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        Config.load(None).save(run.config)
        common = {"reason": "failed", "end": time.time()}
        lines = [ended_attempt(attempt=at, blamed=[node], **common) for at, node in enumerate(nodes)]
        run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [str(problem) for problem in check_bad_nodes(str(tmp_path))] == [
        "node n2 was blamed for 2 faults within a day, by run: a 1, b 1; have it checked; launch.exclude=n2 keeps new "
        "runs from it"
    ]


SAY_HELLO = """
import sys
from pathlib import Path
from laststep.config.config import Config
from laststep.doctor import greeting as hello
hello.SIZES = hello.SIZES[:2]
hello.EDGE = 64
greeting = hello.Hello(Config.load(), Path(sys.argv[1]))()
assert greeting.total == greeting.size and greeting.work_s > 0
assert {size: len(times) for size, times in greeting.all_reduce_s.items()} == (
    dict.fromkeys(hello.SIZES, hello.REPEATS) if greeting.size > 1 else {}
)
print(*hello.report([greeting]), sep="\\n")
"""


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_say_hello(size: int, tmp_path: Path) -> None:
    """One rank alone, and two of a launcher."""
    place = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": str(size)}
    place |= {"SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "SUBMITIT_LOCAL_NODEID": "0", "PYTHONPATH": str(PROJECT)}
    ranks = []
    for rank in range(size):
        ids = {"SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
        command = [forked_python(), "-c", SAY_HELLO, str(tmp_path)]
        env = {**os.environ, **place, **ids}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert f"] rank {rank}/{size}" in said and f"sum of ones: {size} on every rank" in said
        assert ("all-reduce" in said) == (size > 1)


def test_roll_call(slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks, one says hello, one fails, one is killed half way, and one does not start: each has its own
    reason."""
    monkeypatch.setattr(hello, "GIVE_UP_S", 0.0)
    call = RollCall(Config.load(None, ["launch.nodes=4"]))
    assert "#SBATCH --no-requeue" in (slurm / "submitted.sh").read_text()
    for rank in range(3):
        (call.folder / f"started-{rank}").write_text(f"n{rank}")
    for rank, outcome in enumerate([("success", FOUR[0]), ("error", "Traceback\nRuntimeError: no luck\n")]):
        (call.folder / "logs" / f"4711_{rank}_result.pkl").write_bytes(pickle.dumps(outcome))
    (slurm / "squeue").write_text("#!/bin/sh\n")
    call.wait(lambda state: None)
    assert call.greetings == {0: FOUR[0]}
    assert call.failures() == [
        "rank 1 on n1: RuntimeError: no luck",
        "rank 2 on n2: started, but was ended before it finished",
        f"rank 3: did not start: its node cannot see {call.folder}, or Python does not start there",
    ]
    call.remove()
    assert files(here) == ["runs"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["doctor", "--nodes", "0"], "launch.nodes=0: must be at least 1"),
        (["doctor", "--nods", "2"], "--nods: no such option; did you mean --nodes?"),
        (["doctor", "mine"], "mine: not a verb, an option or key=value"),
        (["doctor", "launch.root=/proc/version/runs"], "/proc/version is not a folder"),
        (["doctor", "--nodes", "3", "--partition", "nope"], "Slurm refused the job: "),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_wrong_input(words: list[str], says: str, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, status 2, and nothing left behind."""
    (slurm / "sbatch").write_text(REFUSING_SBATCH)
    (here / "runs").mkdir()
    assert says in refusal(words, capfd, here)


def test_a_machine_without_slurm(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lack of a Slurm is no problem, but a roll call needs one. Three ranks are fine with any batch size."""
    monkeypatch.setattr(diagnosis, "MIN_FREE_GB", 0)  # the disk of the tests may be nearly full
    assert main(["doctor"]) == 0
    said = capfd.readouterr().out
    assert "no Slurm on this machine" in said and "GPUs              none" in said
    assert "nothing found that could break a run" in said
    assert "no Slurm on this machine" in refusal(["doctor", "--nodes", "3"], capfd, here)


def test_slurm_that_does_not_answer(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Then no run can be submitted or requeued."""
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    (slurm / "scontrol").chmod(0o755)
    assert main(["doctor"]) == 1
    assert "  Slurm does not answer: Unable to contact slurm controller; " in capfd.readouterr().out
