"""A real Slurm with accounting on one machine, thrown away after use: for tests, and for users without a cluster.

`python -m tests.slurm.cluster up|down` starts and stops one by hand; tests call `Cluster.start(folder)`. The folder has
slurm.conf and the log of each daemon. Sockets, spool and database are in a folder with a short name, /tmp/ls-*.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.slurm.hosts import Hosts
from tests.support.clients import Client
from tests.support.project import PROJECT

T = TypeVar("T")

PACKAGES = {  # required program: the Debian package that has it
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
NODES = ("n1", "n2", "n3", "n4")
CPUS, GPUS, MEMORY_MB = 8, 2, 64_000  # of each simulated node, regardless of this machine
START_DEADLINE_S = 60
# Stops the cluster when its owner has ended in any way; a pytest that is killed cannot.
KEEPER = """\
import os, select, sys
from contextlib import suppress
from pathlib import Path
with suppress(ProcessLookupError):
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
from tests.slurm.cluster import Cluster
Cluster(Path(sys.argv[2])).stop()
"""
MARK = "LASTSTEP_CLUSTER"  # environment variable of every daemon: the folder of its cluster

SLURM_CONF = """\
ClusterName=laststep
SlurmctldHost={host}({address})
SlurmctldPort={ctld_port}
AuthInfo=socket={run}/munge.socket,cred_expire=5
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
# As on a shared cluster: preempted jobs are requeued, and SIGKILL follows SIGTERM after a while.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# No two clusters on this machine have jobs of the same id, from which torchrun.sbatch makes a port number.
FirstJobId={first_job_id}
KillWait={kill_wait_s}
# So long after a slurmd died its node is DOWN and its jobs are requeued. A slurmd that returns is used again.
SlurmdTimeout={slurmd_timeout_s}
ReturnToService=2
# Schedule without delay, and check for preemption every second; the defaults spare controllers of large clusters.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
ProctrackType=proctrack/linuxproc
GresTypes=gpu
# Nodes have the size that is configured here, regardless of this machine.
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime={grace_s}
PartitionName=cancel Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
SLURM_CONF_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={run}/munge.socket
AccountingStorageTRES=gres/gpu
"""
SLURMDBD_CONF = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
AuthInfo=socket={run}/munge.socket
PidFile={run}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
"""


class Cluster:
    """A real Slurm (slurmctld, slurmdbd, a slurmd per node) on this machine, in one folder."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = NODES,
        slurm_conf: str = SLURM_CONF,
        hosts: Hosts | None = None,
        clients: Sequence[Client] = (),
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = [host.name for host in hosts] if hosts else nodes
        self.hosts = hosts
        self.clients = dict(zip(self.nodes, clients))
        self.template = slurm_conf
        self.accounting = True
        self.conf = self.folder / "slurm.conf"
        self.logs = self.folder / "logs"
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # by the name of its log
        surrounding = ("SLURM_", "SBATCH_", "SUBMITIT_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(surrounding)} | {
            "SLURM_CONF": str(self.conf)
        }

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        kill_wait_s: int = 15,
        grace_s: int = 15,
        slurmd_timeout_s: int = 30,
        accounting: bool = True,
        owner: int | None = None,
        nodes: Sequence[str] = NODES,
        slurm_conf: str = SLURM_CONF,
        hosts: Hosts | None = None,
        clients: Sequence[Client] = (),
    ) -> Cluster:
        """Start a cluster, after stopping one in the same folder and those whose `owner` (a pid) has died.

        `grace_s` is the GraceTime of the partition "grace". `slurm_conf` is the template of slurm.conf. With `hosts`,
        each host is a node, otherwise each name in `nodes`. With `clients`, the first nodes are these clients of a
        network file system. Raises RuntimeError.
        """
        if lack := missing():
            raise RuntimeError(lack)
        for _, previous_owner, abandoned in _run_folders():
            if not Path(f"/proc/{previous_owner}").exists():
                cls(abandoned).stop()
        cluster = cls(folder, nodes, slurm_conf, hosts, clients)
        cluster.stop()
        try:
            waits = dict(kill_wait_s=kill_wait_s, grace_s=grace_s, slurmd_timeout_s=slurmd_timeout_s)
            cluster._start(waits, accounting, owner or os.getpid())
        except BaseException:  # Ctrl-C too
            cluster.stop()
            raise
        return cluster

    def _start(self, waits: dict[str, int], accounting: bool, owner: int) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        for old in self.logs.glob("*.log"):
            old.unlink()
        # The path of a UNIX socket has at most 107 bytes, less than the folder of many tests: sockets go elsewhere.
        run = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
        (run / "owner").write_text(f"{owner}\n{self.folder}")
        run.chmod(0o755)  # munged requires that every user can reach its socket
        ports = _free_ports(2 + len(self.nodes))
        self.accounting = accounting
        self._write_configuration(run, ports, waits, accounting)
        if owner != 1:
            words = ("-c", KEEPER, str(owner), str(self.folder))
            self._daemon(sys.executable, *words, log="keeper", env={"PYTHONPATH": str(PROJECT)})
        if not self.hosts:
            _name_nodes(self.nodes)

        (run / "munge.key").touch(0o400)
        (run / "munge.key").write_bytes(os.urandom(128))
        self._daemon(
            "munged",
            "--foreground",
            f"--socket={run}/munge.socket",
            f"--key-file={run}/munge.key",
            f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munged.seed",
        )
        if accounting:
            database = ("--no-defaults", f"--datadir={run}/db", "--user=root", "--innodb-log-file-size=8M")
            root = ("--skip-test-db", "--auth-root-authentication-method=normal")
            # One that starts removes the temporary tables of all others that it finds in TMPDIR.
            temporary = {"TMPDIR": str(run)}
            install = self._daemon("mariadb-install-db", *database, *root, env=temporary)
            self._until("mariadb-install-db", lambda: install.poll() == 0)
            self._daemon("mariadbd", *database, f"--socket={run}/db/socket", "--skip-networking", env=temporary)
            self._until("mariadbd", (run / "db/socket").exists)
        self._until("munged", (run / "munge.socket").exists)
        if accounting:
            self._daemon(
                "slurmdbd", "-D", env={"MYSQL_UNIX_PORT": f"{run}/db/socket"}
            )  # no TCP, so only root can connect
            self._until("slurmdbd", lambda: _listens(ports[1]))
        self.start_daemon("slurmctld")
        self._until("slurmctld", lambda: _listens(ports[0]))
        for node in self.nodes:
            self.start_daemon(f"slurmd.{node}")
        for node in self.nodes:
            state = partial(self.run, "sinfo", "-h", "-n", node, "-o", "%t", check=False)
            self._until(f"slurmd.{node}", lambda state=state: state() == "idle\n")  # type: ignore[misc]

    def start_daemon(self, name: str, *more: str) -> None:
        """Start "slurmctld" or "slurmd.NODE", for the first time or again, with `more` words."""
        program, _, node = name.partition(".")
        words = (program, "-D", *(("-N", node) if node else ()), "-f", str(self.conf), *more)
        host = next((host for host in self.hosts or () if host.name == node), None)
        if client := self.clients.get(node):
            words = (*client.command(*words),)
        self._daemon(*(host.command(*words) if host else words), log=name)

    def stop_daemon(self, name: str, number: signal.Signals) -> None:
        """End "slurmctld" or "slurmd.NODE" by a signal; the processes of jobs continue."""
        child = self._children.pop(name)
        child.send_signal(number)
        child.wait(timeout=START_DEADLINE_S)

    def _write_configuration(self, run: Path, ports: list[int], waits: dict[str, int], accounting: bool) -> None:
        host = socket.gethostname().split(".")[0]
        for index in range(GPUS):
            os.mknod(run / f"gpu{index}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # each GPU is a copy of /dev/null
        (run / "state").mkdir()
        places = [(own.name, own.address) for own in self.hosts or ()] or [(host, "127.0.0.1")] * len(self.nodes)
        nodes = [
            f"NodeName={node} NodeHostname={name} NodeAddr={address} Port={port} CPUs={CPUS} RealMemory={MEMORY_MB} "
            f"Gres=gpu:{GPUS}"
            for node, (name, address), port in zip(self.nodes, places, ports[2:])
        ]
        values = dict(host=host, run=run, ctld_port=ports[0], dbd_port=ports[1], nodes="\n".join(nodes), **waits)
        values["first_job_id"] = random.SystemRandom().randrange(10_000, 90_000, 100)
        values["address"] = self.hosts.address(1) if self.hosts else "127.0.0.1"
        self.conf.write_text((self.template + (SLURM_CONF_ACCOUNTING if accounting else "")).format(**values))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={run}/gpu[0-{GPUS - 1}]\n")
        dbd_conf = self.folder / "slurmdbd.conf"
        dbd_conf.touch(0o600)  # slurmdbd refuses to read a file that others can read
        dbd_conf.write_text(SLURMDBD_CONF.format(**values))

    def _daemon(
        self, program: str, *words: str, log: str = "", env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program of this cluster in a new session, so that it outlives this process and its terminal."""
        variables = self.env | {MARK: str(self.folder)} | (env or {})
        with (self.logs / f"{log or program}.log").open("ab") as out:
            child = subprocess.Popen(
                [program, *words],
                env=variables,
                cwd=self.logs,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children[log or program] = child
        return child

    def _until(self, log: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon is ready. Raises RuntimeError with the end of its log."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not ready():
            dead = [child.args for child in self._children.values() if child.poll()]
            if dead or time.monotonic() > deadline:
                tail = (self.logs / f"{log}.log").read_text(errors="replace")[-2000:]
                what = f"{dead[0]!r} ended" if dead else f"not ready after {START_DEADLINE_S} s"
                raise RuntimeError(f"waiting for {log}: {what}. Its log, {self.logs}/{log}.log, ends:\n{tail}")
            time.sleep(0.05)

    def run(self, *words: str, check: bool = True, timeout: float = 60) -> str:
        """The output of a Slurm command, such as `run("squeue", "-h")`. Raises RuntimeError if `check` and it fails."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def wait_for(self, condition: Callable[[], T], deadline_s: float, message: str, poll_s: float = 0.1) -> T:
        """Poll until `condition` returns something true, and return that.

        Raises TimeoutError with `message` at the deadline, with the jobs and their output files.
        """
        deadline = time.monotonic() + deadline_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                columns = "JobID:8,Partition:10,State:12,Reason:25,RestartCnt:5,NodeList:12,STDOUT:200"
                jobs = re.sub(" +\n", "\n", self.run("squeue", "--states=all", "-O", columns, check=False))
                raise TimeoutError(f"{message} (waited {deadline_s} s). Daemons' logs: {self.logs}. Jobs:\n{jobs}")
            time.sleep(poll_s)
        return value

    def answers(self) -> bool:
        """Whether the slurmctld of this folder answers."""
        return any(self._processes()) and " is UP" in self.run("scontrol", "ping", check=False)

    def stop(self) -> None:
        """End all daemons and all processes of jobs, if any, and keep the logs."""
        deadline = time.monotonic() + START_DEADLINE_S
        while pids := list(self._processes()):  # repeatedly, as a daemon may fork meanwhile
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # there is no state to save
            if time.monotonic() > deadline:
                raise RuntimeError(f"throwaway Slurm: processes do not end: {pids}")
            time.sleep(0.02)
        for child in self._children.values():
            child.wait()
        self._children.clear()
        for run, _, folder in _run_folders():
            if folder == self.folder:
                shutil.rmtree(run, ignore_errors=True)

    def _processes(self) -> Iterator[int]:
        """Pids of the daemons and their jobs' processes. They are found by their environment: a pid may be reused."""
        daemon, conf = f"{MARK}={self.folder}".encode(), f"SLURM_CONF={self.conf}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                pid, variables = int(entry.name), (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it ended meanwhile
                continue
            # A shell with SLURM_CONF, or inside salloc, is the user's; only what slurmd started has SLURMD_NODENAME.
            in_job = conf in variables and any(v.startswith(b"SLURMD_NODENAME=") for v in variables)
            if (daemon in variables or in_job) and pid != os.getpid():
                yield pid


def missing() -> str | None:
    """What this machine lacks to run a cluster, in one line, or None."""
    if sys.platform != "linux":
        return f"the throwaway Slurm needs Linux, this is {sys.platform}"
    if packages := sorted({package for program, package in PACKAGES.items() if not shutil.which(program)}):
        return f"the throwaway Slurm needs: apt-get install -y --no-install-recommends {' '.join(packages)}"
    return (
        None if os.geteuid() == 0 else "the throwaway Slurm needs root (its daemons switch users): sudo, or a container"
    )


def _run_folders() -> Iterator[tuple[Path, str, Path]]:
    """The clusters on this machine: folder of sockets, pid of the owner, and folder."""
    for place in Path("/tmp").glob("ls-*"):
        file = place / "owner"
        with suppress(OSError):  # another process may remove it meanwhile
            owner, _, folder = file.read_text().partition("\n")
            if folder and file.stat().st_uid == os.geteuid():  # anybody may write to /tmp
                yield file.parent, owner, Path(folder)


def _free_ports(count: int) -> list[int]:
    """Unused ports below the range that the kernel assigns: no connection takes one before its daemon does."""
    free = (port for port in random.SystemRandom().sample(range(10_000, 32_000), 1_000) if not _listens(port))
    return [next(free) for _ in range(count)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _name_nodes(nodes: Sequence[str]) -> None:
    """Make the nodes' names resolve, for srun and torch's rendezvous, by a line in /etc/hosts that stays there."""
    line, hosts = f"127.0.0.1 {' '.join(nodes)}", Path("/etc/hosts")
    if line not in hosts.read_text().splitlines():
        with hosts.open("a") as file:
            file.write(f"\n{line}\n")


def main() -> int:
    """`up` starts a cluster that outlives this command, `down` stops it."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("--folder", type=Path, default=Path(".slurm"), help="default: .slurm")
    words = parser.parse_args()
    cluster = Cluster(words.folder)
    try:
        if lack := missing():
            raise RuntimeError(lack)
        if words.verb == "down":
            was_up = any(cluster._processes())
            cluster.stop()
            print("stopped" if was_up else f"no cluster is up in {cluster.folder}")
            return 0
        if cluster.answers():
            raise RuntimeError(f"already up: export SLURM_CONF={cluster.conf} (make slurm-down stops it)")
        Cluster.start(words.folder, owner=1)  # owned by init: only `down` stops it
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"Four nodes with {CPUS} CPUs and {GPUS} pretended GPUs each are up. To submit to them, type:\n\n"
        f"    export SLURM_CONF={cluster.conf}\n    python launch.py --nodes 2 --tasks-per-node 2\n\n"
        f"`make slurm-down` stops them. Daemons' logs: {cluster.logs}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
