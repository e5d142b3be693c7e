"""Ranks on separate hosts meet over a real link, train as on one host, and lose no step when the link drops.

On a single machine every address leads back to it, so a test would not notice a rank that publishes an address that
only it can reach. Here each host is a network namespace with its own address, and it resolves only the names that a
test defines.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.hosts import Hosts, missing
from tests.support.forked import forked_python
from tests.support.needs import require
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint, reasons
from tests.support.runs import config, undisturbed

PORT = "29500"
HELD = ("task=tests.support.tasks.Held", "launch.hang_timeout_s=6")


def two_hosts(ip_version: int = 4) -> Hosts:
    require(missing())
    return Hosts(2, ip_version)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as two:
        yield two


class Ranks:
    """The ranks of one attempt, `per_host` on each host, started with torch's own variables. Each of `words` is given
    to one rank only."""

    def __init__(
        self,
        hosts: Hosts,
        root: Path,
        name: str,
        options: tuple[str, ...] = (),
        per_host: int = 1,
        words: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        size = len(hosts) * per_host
        self.run = RunDir(root / name)
        written = root / f"{name}.yaml"
        config(root, name, size, options).save(written)
        started = f"{name}-{len(list(root.glob(f'{name}-*-0.log')))}"
        self.logs = [root / f"{started}-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
            command = [forked_python(), "-u", "-m", "laststep", "--config", str(written), *words[rank:][:1]]
            variables = {**(env or {}), **{key: str(value) for key, value in place.items()}}
            self.processes.append(hosts[rank // per_host].starts(command, variables, log))

    def wait(self, deadline_s: float = DEADLINE_S) -> list[int]:
        """The exit statuses of all ranks. Fails the test, and shows the logs, when they do not end in time."""
        try:
            deadline = time.monotonic() + deadline_s
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ranks did not end within {deadline_s:.0f} s:\n{self.output()}") from None

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition. Fails the test, and shows the logs, when it does not become true in time."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes):
                raise AssertionError(f"{what}: did not happen:\n{self.output()}")
            time.sleep(0.01)

    def output(self) -> str:
        """The output of all ranks."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)


def finishes(ranks: Ranks) -> dict[str, Any]:
    """Wait for the run, which must succeed; returns its fingerprint."""
    codes = ranks.wait()
    assert codes == [0] * len(codes), ranks.output()
    return fingerprint(ranks.run)


def debian(hosts: Hosts) -> dict[str, str]:
    """Every host resolves the others, and its own name to 127.0.1.1, as Debian's installer sets it up."""
    for host in hosts:
        host.resolves({other.name: "127.0.1.1" if other is host else other.address for other in hosts})
    return {}


def master(hosts: Hosts) -> dict[str, str]:
    """The variables that a launcher of torch exports."""
    debian(hosts)
    return {"MASTER_ADDR": "h1", "MASTER_PORT": PORT}


def containers(hosts: Hosts) -> dict[str, str]:
    """Docker's bridge has the same address on every host, and precedes the real network in the list of interfaces."""
    for host in hosts:
        host.ip("link", "add", "docker0", "type", "bridge")
        host.ip("link", "set", "docker0", "up")
        host.ip("address", "add", "172.17.0.1/16", "dev", "docker0")
        host.ip("link", "set", "eth0", "down")
        host.ip("link", "set", "eth0", "name", "uplink", "up")
    return {}


@pytest.mark.parametrize(
    ("setting", "method", "per_host", "ip_version"),
    [
        (debian, None, 2, 4),
        (None, None, 2, 4),
        (None, None, 1, 6),
        (containers, None, 1, 4),
        (master, None, 1, 4),
        (None, "tcp://{h1}:29500", 2, 4),
        (None, "tcp://[{h1}]:29500", 1, 6),
        (None, "file://{root}/meeting-point", 1, 4),
    ],
    ids=["names", "no names", "IPv6", "docker0", "env", "tcp", "tcp IPv6", "file"],
)
def test_ranks_meet_over_a_real_link(
    root: Path,
    setting: Callable[[Hosts], dict[str, str]] | None,
    method: str | None,
    per_host: int,
    ip_version: int,
    request: pytest.FixtureRequest,
) -> None:
    """The ranks meet on networks with any names and addresses, and at any configured meeting point. The weights are the
    same as with all ranks on one host."""
    name = request.node.callspec.id.replace(" ", "-")
    with two_hosts(ip_version) as hosts:
        env = setting(hosts) if setting else {}
        options = (f"launch.init_method={method.format(h1=hosts[0].address, root=root)}",) if method else ()
        ranks = Ranks(hosts, root, name, ("launch.hang_timeout_s=20", *options), per_host, env=env)
        assert finishes(ranks) == undisturbed(2 * per_host, ())
    assert not list(root.glob("meeting-point*")), "a file that is left behind would mislead the next attempt"
    (record,) = read_lines(ranks.run.attempts)
    assert record["hosts"] == ["h1", "h2"]


def test_a_name_server_that_does_not_answer(hosts: Hosts, root: Path) -> None:
    """Nothing needs the name server, but torch's store asks it for the name of each peer and serves nobody meanwhile:
    the ranks would take half a minute to meet, in each attempt."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((hosts.address(1), 53))
        for host in hosts:
            host.asks(hosts.address(1))
        ranks = Ranks(hosts, root, "nameless", per_host=2)
        assert finishes(ranks) == undisturbed(4, ())
        silent.settimeout(DEADLINE_S)
        assert silent.recv(512), "the name server was asked"
    (meeting_s,) = re.findall(r"meeting ([\d.]+)", ranks.output())
    assert float(meeting_s) < 15


def held(hosts: Hosts, root: Path, name: str, words: tuple[str, ...] = (), torn: bool = False) -> Ranks:
    """Start an attempt whose ranks wait in their fifth step until the file `name`-hold/go exists."""
    folder = root / f"{name}-hold"
    folder.mkdir()
    ranks = Ranks(
        hosts, root, name, HELD, words=words, env={"LASTSTEP_TEST_HOLD": f"5 {folder} {'torn' if torn else ''}"}
    )
    ranks.until(lambda: len(list(folder.iterdir())) == len(hosts), "every rank is in its fifth step")
    return ranks


@pytest.mark.parametrize("torn", [False, True], ids=["in step", "a step apart"])
def test_the_link_drops(hosts: Hosts, root: Path, torn: bool) -> None:
    """No packet gets through any more, and no host is notified: a gloo rank would wait for its peer as long as TCP
    retries. Both ranks are alive and share the disk, but neither knows that the other is alive. The attempt ends on
    both hosts, and is recorded once, with every step that either rank has. When the link is back, the same command
    continues the run."""
    name, kept = ("torn", 5) if torn else ("whole", 4)
    ranks = held(hosts, root, name, torn=torn)
    hosts.cut()
    if not torn:
        (root / f"{name}-hold" / "go").touch()
    assert ranks.wait(deadline_s=60) == [1, 1], "long before gloo's own 120 s"
    (record,) = read_lines(ranks.run.attempts)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("hung", kept, 0), ranks.output()
    assert "gone" not in record["error"], "both ranks are alive"
    assert "rank 1 on h2 gives no sign of life" in ranks.logs[0].read_text()
    assert "rank 0 on h1 has not answered" in ranks.logs[1].read_text()

    again = Ranks(hosts, root, name, (HELD[0], "launch.hang_timeout_s=60"))
    again.until(
        lambda: all("attempt begins" in log.read_text() for log in again.logs), "both ranks look for each other"
    )
    hosts.mend()
    assert finishes(again) == undisturbed(2, ())
    assert [record["start_step"] for record in read_lines(again.run.attempts)] == [0, kept]


def test_the_two_sides_give_up_at_different_times(hosts: Hosts, root: Path) -> None:
    """Over ten minutes of silence, clocks drift apart. The side that gives up first must not record the end without the
    other, which may have one step more and would then find the end already recorded."""
    ranks = held(hosts, root, "uneven", words=("launch.hang_timeout_s=4", "launch.hang_timeout_s=7"), torn=True)
    hosts.cut()
    assert ranks.wait() == [1, 1], ranks.output()
    (record,) = read_lines(ranks.run.attempts)
    assert (record["end_step"], record["lost_steps"]) == (5, 0), ranks.output()


def test_the_link_comes_back_in_time(hosts: Hosts, root: Path) -> None:
    """A switch that restarts is no reason to end an attempt: within launch.hang_timeout_s, TCP resends everything."""
    ranks = held(hosts, root, "flap", words=("launch.hang_timeout_s=30",) * 2)
    hosts.cut()
    (root / "flap-hold" / "go").touch()
    time.sleep(2)  # the outage
    hosts.mend()
    assert finishes(ranks) == undisturbed(2, ())
    assert reasons(ranks.run) == ["finished"]


def test_localhost_on_two_hosts(hosts: Hosts, root: Path) -> None:
    """MASTER_ADDR=localhost is in every tutorial. On two hosts each would wait for itself. All ranks report it."""
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": PORT}
    ranks = Ranks(hosts, root, "localhost", ("launch.hang_timeout_s=60",), env=env)
    assert ranks.wait(deadline_s=60) == [2, 2], ranks.output()
    said = "error: MASTER_ADDR=localhost MASTER_PORT=29500: on each of the 2 nodes, localhost is the node itself"
    assert all(said in log.read_text() for log in ranks.logs), ranks.output()


def test_a_firewall_between_two_hosts(hosts: Hosts, root: Path) -> None:
    """The one port that the administrator was asked for is open, but gloo's own connections use other ports. The ranks
    that wait for those connections must be notified, not run into their own long timeouts."""
    for host in hosts:
        host.ip("rule", "add", "pref", "1", "ipproto", "tcp", "dport", PORT, "lookup", "main")
        host.ip("rule", "add", "pref", "2", "ipproto", "tcp", "sport", PORT, "lookup", "main")
        host.ip("rule", "add", "pref", "3", "iif", "lo", "ipproto", "tcp", "dport", "1024-65534", "unreachable")
    method = f"launch.init_method=tcp://{hosts[0].address}:{PORT}"
    ranks = Ranks(hosts, root, "firewall", ("launch.hang_timeout_s=100", method))
    assert ranks.wait() == [1, 1], ranks.output()
    for log in ranks.logs:
        assert "gloo cannot connect them" in log.read_text(), ranks.output()
        assert "nodes must accept connections from each other" in log.read_text()


def test_torchrun_over_two_hosts(hosts: Hosts, root: Path) -> None:
    """torchrun's own agents meet first, and serve the store. Names do not resolve."""
    written = root / "torchrun.yaml"
    config(root, "torchrun", 2, ("launch.hang_timeout_s=20",)).save(written)
    logs = [root / f"torchrun-{host.name}.log" for host in hosts]
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", PORT)
    agents = []
    for node, (host, log) in enumerate(zip(hosts, logs)):
        torchrun = (sys.executable, "-m", "torch.distributed.run", *nodes, "--node-rank", str(node))
        agents.append(host.starts((*torchrun, "-m", "laststep", "--config", str(written)), {}, log))
    codes = [agent.wait(DEADLINE_S) for agent in agents]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    run = RunDir(root / "torchrun")
    assert fingerprint(run) == undisturbed(2, ())
    (record,) = read_lines(run.attempts)
    assert record["hosts"] == ["h1", "h2"]
