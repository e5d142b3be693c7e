"""The shell of a job, with a stand-in for srun. tests/slurm/ has a real one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from laststep.config.checks import nodes_for
from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.ranks.process import session
from laststep.ranks.slurm import CHAIN_VARIABLE, TAG_VARIABLE
from laststep.rundir import RunDir
from laststep.submission import chain, sbatch
from tests.support.clients import Clients, missing
from tests.support.needs import require
from tests.support.project import DEADLINE_S, wait_until

SHARE = sbatch.SHARE
SPARE = Launch(nodes=2, spare_nodes=1, tasks_per_node=4)
# It writes down its arguments, and does what the test has put into a file.
SRUN = '#!/bin/bash\necho "$@" >>{folder}/calls\nsource {folder}/does\n'

COMMENT = "JobId=7 JobName=mine\n   ExcNodeList=(null)\n   Comment=the user's laststep:0123456789ab\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "srun").write_text(SRUN.format(folder=tmp_path))
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "OVER_S", 0)
    run = RunDir(tmp_path / "a run")
    run.logs.mkdir(parents=True)
    return run


def shell(run: RunDir, after: str, launch: Launch = SPARE, env: Mapping[str, str] | None = None) -> list[str]:
    """The lines of the batch shell that start the ranks; `after` is what after_ranks does."""
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", **(env or {})}
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in job.items()),
        "trap 'export LASTSTEP_SIGNALLED=1' TERM",
        *(sbatch.rank_count(launch, nodes_for(None, launch)) if launch.chooses_nodes else []),
        f"after_ranks() {{ {after}; }}",
        *sbatch.start_again(run, launch),
        "srun --label python",
    ]


def calls(run: RunDir) -> list[str]:
    """The arguments of each srun so far."""
    path = run.path.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def does(run: RunDir, *lines: str) -> None:
    (run.path.parent / "does").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "5_3")]
)
def test_other_nodes(run: RunDir, array: dict[str, str], job: str) -> None:
    """First as many nodes as train, of those that the job has; after a fault those that after_ranks has chosen. A
    choice of an earlier allocation does not count. The exit status is srun's."""
    run.next_nodes(job).write_text("--nodelist=n8,n9\n")
    does(run, 'echo "$SLURM_NTASKS $LASTSTEP_BATCH_HOST $LASTSTEP_RESTARTS"; exit $((5 + LASTSTEP_RESTARTS))')
    choice = f"echo --nodes=2 --nodelist=n1,n3 >'{run.next_nodes(job)}'; [ $1 = 5 ]"
    done = subprocess.run(["bash", "-c", "\n".join(shell(run, choice, env=array))], capture_output=True, text=True)
    again = f"--nodes=2 --nodelist=n1,n3 {SHARE} --label python"
    assert calls(run) == ["--nodes=2 --label python", again]
    assert (done.returncode, done.stdout, done.stderr) == (6, "8 n1 0\n8 n1 1\n", "")


@pytest.mark.parametrize("launch", [SPARE, Launch(nodes=2)])
def test_srun_waits_for_a_dead_node(run: RunDir, launch: Launch) -> None:
    """It would wait until Slurm notices, for minutes, or forever if the node is soon back. The ranks that survive, or
    their supervisors, ask the shell to end it. The next step shares what Slurm still counts as the old one's."""
    does(run, f"[ $LASTSTEP_RESTARTS = 1 ] || {{ touch '{run.step_over('7')}'; exec sleep {DEADLINE_S}; }}")
    lines = shell(run, "[ $1 = 137 ]", launch, {"size": "the user's"})
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=DEADLINE_S / 2)
    size = "--nodes=2 " if launch is SPARE else ""
    assert done.returncode == 0 and calls(run) == [f"{size}--label python", f"{size}{SHARE} --label python"]


def test_the_shell_sees_what_another_host_has_created(run: RunDir) -> None:
    """A client of a network file system remembers for a minute, here forever, that there is no such file. The job's
    nodes would be idle for as long. A folder of that name that a killed shell has left is in nobody's way."""
    require(missing())
    does(run, "touch $0.runs", f"[ $LASTSTEP_RESTARTS = 1 ] || exec sleep {DEADLINE_S}")
    run.step_over("7").with_name("7.step_over.look").mkdir()
    with Clients(run.path, 1, DEADLINE_S * 2) as (host,):
        lines = ["set -eu", *shell(run, "[ $1 = 137 ]")]
        with subprocess.Popen(host.command("bash", "-c", "\n".join(lines))) as process:
            wait_until((run.path.parent / "srun.runs").exists, "srun was not started")
            run.step_over("7").touch()
            assert process.wait(DEADLINE_S / 2) == 0
    assert len(calls(run)) == 2


def test_a_signal_does_not_end_the_wait(run: RunDir) -> None:
    """Slurm signals the shell, too; the ranks still have to save. And it is too late for a restart."""
    does(run, "touch $0.runs; until [ -e $0.go ]; do sleep 0.05; done; exit 9")
    process = subprocess.Popen(["bash", "-c", "\n".join(shell(run, "true"))], start_new_session=True)
    srun = run.path.parent / "srun"
    wait_until(srun.with_name("srun.runs").exists, "srun was not started")
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    srun.with_name("srun.go").touch()
    assert process.wait(DEADLINE_S) == 9 and len(calls(run)) == 1


def test_a_signal_during_the_setup(run: RunDir) -> None:
    """The job is being taken away: ranks that it starts now have not received the signal, and would be killed."""
    does(run, "exit 0")
    lines = ["kill -TERM $$  # while launch.setup runs", *shell(run, "true")]
    lines.insert(0, "trap 'export LASTSTEP_SIGNALLED=1' TERM")
    done = subprocess.run(["bash", "-c", "\n".join(lines)])
    assert done.returncode == 143 and calls(run) == []


@pytest.mark.parametrize(("allocated", "trained"), [("2", "2"), ("3", "2"), ("4", "3"), ("5", "4")])
def test_spare_nodes_of_a_range(run: RunDir, allocated: str, trained: str) -> None:
    """Of 2-4 nodes and one spare: no spare one only where the minimum was free."""
    does(run, "exit 0")
    lines = shell(run, "false", Launch(nodes="2-4", spare_nodes=1), {"SLURM_JOB_NUM_NODES": allocated})
    subprocess.run(["bash", "-c", "\n".join(lines)], check=True)
    assert calls(run) == [f"--nodes={trained} --label python"]


# A job of Slurm's, as scontrol shows and changes it: a file of one field per line.
SCONTROL = r"""#!/bin/bash
cd {folder}
if [ -e busy ] && [ "$1" = "$(<busy)" ]; then
    rm busy
    [ ! -e carries_out ] || {{ echo $1 >>orders; sed -i s/RUNNING/PENDING/ job; }}
    echo "scontrol: error: Socket timed out on send/recv operation" >&2
    exit 1
fi
case "$1 $2" in
"show job") cat job ;;
"show partition") echo "PartitionName=main TotalNodes=$(<total)" ;;
"show hostnames") tr , '\n' <<<"$3" ;;
"requeue 7")
    [ ! -e disabled ] || {{ echo "Operation disabled" >&2; exit 1; }}
    echo requeue >>orders
    ;;
"update JobId=7")
    [ ! -e refuses ] || exit 1
    echo "$3" >>orders
    sed -i "s/^   ${{3%%=*}}=.*/   $3/" job ;;
esac
"""


def programs(folder: Path, **texts: str) -> None:
    """Write programs in bash, by name, which the shell finds first."""
    for name, text in texts.items():
        (folder / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def failed_job(run: RunDir, restart: int) -> str:
    """What the shell prints in this start of a job whose ranks fail."""
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "SLURMD_NODENAME": f"n{restart}"}
    env |= {"SLURM_JOB_PARTITION": "main", TAG_VARIABLE: "laststep:0123456789ab"}
    lines = ["set -eu", *sbatch.after_ranks(run, Launch(nodes=2, max_failures=2)), "exit 9"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    return done.stdout


@pytest.mark.parametrize("hangs", [False, True])
def test_python_does_not_start(run: RunDir, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """Its mount is bad on this node, or hangs. Other nodes may have a good one: the job is requeued, at most
    launch.max_failures times in a row, and leaves the node while the partition has enough others. The comment is the
    user's as well, and what follows depends on Slurm alone."""
    folder = run.path.parent
    monkeypatch.setattr("sys.executable", str(folder / ("python" if hangs else "no python")))
    programs(folder, python="kill -KILL $$  # as `at_most` would", scontrol=SCONTROL.format(folder=folder))

    def start(restart: int, state: str = "RUNNING") -> list[str]:
        """What scontrol is ordered in this start of the job."""
        job = (folder / "job").read_text() if (folder / "job").exists() else COMMENT
        job = "\n".join(line for line in job.splitlines() if "JobState" not in line)
        (folder / "job").write_text(f"{job}\n   JobState={state} Reason=None\n")
        (folder / "orders").write_text("")
        said.append(failed_job(run, restart))
        return (folder / "orders").read_text().splitlines()

    said: list[str] = []
    (folder / "total").write_text("4")
    noted = "Comment=the user's laststep:0123456789ab laststep-unrecorded:"
    assert start(5) == [f"{noted}1@5", "requeue", "ExcNodeList=n5"]
    for _ in range(2):  # of one start it may be noted before
        assert start(6)[:2] == [f"{noted}2@6", "requeue"]
    assert (folder / "job").read_text().count("ExcNodeList=n5,n6\n") == 1
    assert start(7) == [] and "Python did not start in the last 3 starts of this job" in said[-1]
    assert start(9) == [f"{noted}1@9", "requeue"], "some start in between was recorded; two nodes are left"
    assert start(10, "COMPLETING") == [], "Slurm has ended it"
    (folder / "refuses").touch()
    assert start(2) == [], "a site may forbid to change comments: then all restarts of the job count"
    (folder / "refuses").unlink()
    (folder / "job").write_text(COMMENT.replace("0123456789ab", "0123456789cd"))
    assert start(0) == [], "another job has the id now"


@pytest.mark.parametrize(
    ("busy", "carries_out"), [("show", False), ("update", False), ("requeue", False), ("requeue", True)]
)
def test_python_does_not_start_and_slurmctld_is_busy(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, busy: str, carries_out: bool
) -> None:
    """One answer that is late must not end the run: nobody else is left who could continue it. An order whose answer
    is lost may be carried out; it is not given again."""
    folder = run.path.parent
    monkeypatch.setattr("sys.executable", str(folder / "no python"))
    programs(folder, scontrol=SCONTROL.format(folder=folder), sleep="")
    (folder / "job").write_text(f"{COMMENT}\n   JobState=RUNNING Reason=None\n")
    (folder / "total").write_text("4")
    (folder / "busy").write_text(busy)
    if carries_out:
        (folder / "carries_out").touch()
    said = failed_job(run, restart=3)
    orders = (folder / "orders").read_text().splitlines()
    assert orders.count("requeue") == 1 and f"{COMMENT.splitlines()[-1].strip()} laststep-unrecorded:1@3" in orders
    assert not (folder / "busy").exists() and "not requeued" not in said


def test_python_does_not_start_and_slurm_refuses(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has ended, and its log must say so, and why: there is no other trace of it."""
    folder = run.path.parent
    monkeypatch.setattr("sys.executable", str(folder / "no python"))
    programs(folder, scontrol=SCONTROL.format(folder=folder), sleep="")
    (folder / "job").write_text(f"{COMMENT}\n   JobState=RUNNING Reason=None\n")
    (folder / "disabled").touch()
    assert failed_job(run, restart=0).endswith("\n[laststep] not requeued: Operation disabled\n")
    (folder / "scontrol").write_text("#!/bin/bash\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
    assert failed_job(run, restart=0) == "[laststep] not requeued: slurm_load_jobs error: Invalid job id specified\n"


def test_python_hangs(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it imports from a mount that does not answer. It is killed after 300 s, or the nodes would be idle until the
    time limit."""
    folder = run.path.parent
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    programs(folder, scontrol=SCONTROL.format(folder=folder), python="kill -STOP $$", sleep="echo $1 >>$0.s")
    (folder / "job").write_text(f"{COMMENT}\n   JobState=RUNNING Reason=None\n")
    (folder / "total").write_text("4")
    failed_job(run, restart=0)
    assert "requeue" in (folder / "orders").read_text().splitlines()
    assert (folder / "sleep.s").read_text().splitlines() == ["1"] * 300


@pytest.mark.parametrize("program", ["after_ranks", "chain"])
def test_a_signal_while_python_starts(run: RunDir, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Slurm sends SIGTERM to all processes of the job. Python, which cannot ignore it yet, died while it imported: a
    job that a preemption had ended was not requeued, and in any other a good node was taken for a bad one."""
    folder = run.path.parent
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    programs(folder, python='touch $0.runs; until [ -e $0.go ]; do sleep 0.05; done; echo "$2" >>$0.done; exit 1')
    programs(folder, scontrol="exit 1")
    lines = sbatch.after_ranks(run, SPARE)
    if program == "chain":
        lines += sbatch._in_chain(run, SPARE, "laststep:0123456789ab")
    python = folder / "python"
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", "\n".join([*lines, "exit 9"])], env=env, start_new_session=True) as process:
        wait_until(python.with_name("python.runs").exists, "the program was not started")
        for pid in [process.pid, *session(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        python.with_name("python.go").touch()
        assert process.wait(DEADLINE_S) == 9
    module = "laststep.job.after_ranks" if program == "after_ranks" else "laststep.submission.chain"
    assert python.with_name("python.done").read_text().splitlines()[0] == module


def test_after_ranks_has_decided(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the shell does nothing of its own, also if the program was killed while it read checkpoints."""
    folder = run.path.parent
    programs(folder, python='rm "$LASTSTEP_UNDECIDED"; kill -KILL $$', scontrol=f"echo $* >>{folder}/orders")
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    lines = [*sbatch.after_ranks(run, SPARE), "exit 9"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env={**os.environ, "SLURM_JOB_ID": "7"})
    assert done.returncode == 9 and not (folder / "orders").exists()


@pytest.mark.parametrize(
    ("in_queue", "says"),
    [
        ([["8", "9"]], "job 8 of the chain continues the run"),
        ([[], ["9"]], "job 9 of the chain continues the run"),  # submitted just now
        ([[], []], "no job of the chain is left"),
        ([None], ""),
    ],
)
def test_which_job_of_the_chain_continues(
    in_queue: list[list[str] | None],
    says: str,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A job's last line is right whatever the queue holds: its ranks cannot know."""
    trainer = SimpleNamespace(run=run, config=Config.load(None, ["launch.chain=2"]))
    monkeypatch.setenv(CHAIN_VARIABLE, "tag")
    monkeypatch.setattr(chain, "_this_job", lambda _: ("7", trainer))
    monkeypatch.setattr(chain, "_waiting", lambda *_: in_queue.pop(0))
    monkeypatch.setattr(chain, "lengthen", lambda *_: 1)
    monkeypatch.setattr(chain, "keep_from_bad_nodes", lambda *_: None)
    chain.ends(run)
    said = capfd.readouterr().out
    assert says in said and bool(said) == bool(says) and not in_queue
