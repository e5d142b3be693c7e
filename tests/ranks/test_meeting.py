"""When the ranks cannot meet, one line names the variable, or the rank and its host, and no rank hangs.

A wrong address is the first mistake that a newcomer to a cluster makes. torch itself reports it after minutes, or
never, as a socket timeout. The exit status is 2 for wrong input, 1 when a rank did not join.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from laststep.attempt.rescue import gone_file
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks import meeting as address
from laststep.ranks.world import hostname
from laststep.rundir import RunDir
from tests.support.project import DEADLINE_S, wait_until
from tests.support.ranks import reasons, starts
from tests.support.records import a_world
from tests.support.runs import config

HERE = hostname()
# A rank waits 4 s for the others; by default each of these tests would take a minute.
SHORT_TIMEOUT = "launch.hang_timeout_s=4"
PATIENT = "launch.hang_timeout_s=600"


class Rank:
    """One rank, started by its own command, and its output."""

    def __init__(self, process: BaseProcess, log: Path) -> None:
        self.process = process
        self.log = log

    def ends(self, status: int, *said: str) -> None:
        """Check that it ends with this exit status, and that one line of its output has all of these texts."""
        self.process.join(DEADLINE_S)
        text = self.log.read_text()
        assert self.process.exitcode == status, text
        assert any(all(words in line for words in said) for line in text.splitlines()), f"no line has {said}:\n{text}"
        assert "Traceback" not in text, text


class Starter:
    """Starts ranks, of runs in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = RunDir(root / "run")
        self.ranks: list[Rank] = []

    def rank(self, rank: int, size: int, *words: str, name: str = "run", env: Mapping[str, str] | None = None) -> Rank:
        """Start `python -m laststep` under --spawn (see laststep.submission.local), which knows its hosts, or under the
        launcher whose variables are in `env`."""
        written, log = self.root / f"{name}.yaml", self.root / f"{len(self.ranks)}.log"
        if not written.exists():
            config(self.root, name, size, ("train.batch_size=12",)).save(written)
        place = env or {"LASTSTEP_RANK": f"{rank}", "LASTSTEP_WORLD_SIZE": f"{size}", "LASTSTEP_JOB": "1"}
        self.ranks.append(Rank(starts(["--config", str(written), SHORT_TIMEOUT, *words], place, log), log))
        return self.ranks[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for rank in starter.ranks:  # a failed test may leave some behind
        rank.process.kill()
        rank.process.join()


def free_port() -> int:
    """A port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def variables(rank: int, size: int, port: int, host: str = "localhost") -> dict[str, str]:
    """The variables that torch's launchers export."""
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": host, "MASTER_PORT": f"{port}"}


def test_a_rank_that_never_joins(start: Starter) -> None:
    """A node hangs while it starts. Every rank that joined names the missing one and its host: the user looks into a
    single log, and cannot know which rank gave up first."""
    here = [start.rank(rank, 3) for rank in (0, 1)]
    for rank in here:
        rank.ends(1, f"rank 2 on {HERE} did not join within 4 s")


def test_rank_0_never_joins(start: Starter) -> None:
    """Without rank 0 there is no store that could show which ranks are missing."""
    start.rank(1, 2).ends(1, f"rank 0 on {HERE} did not publish its address", "within 4 s", "meeting/spawn-1-0.json")


@pytest.mark.parametrize(("status", "how"), [("-9", "killed by SIGKILL"), ("1", "exit status 1")])
def test_rank_0_ends_as_it_starts(start: Starter, status: str, how: str) -> None:
    """It is out of memory, or its GPU is broken, as its supervisor says. The nodes of the others would stand still for
    ten minutes (launch.hang_timeout_s) before anything starts again."""
    said_gone(start, 0, status)
    start.rank(1, 2, PATIENT).ends(1, f"rank 0 on {HERE} ended as it started ({how})")


@pytest.mark.parametrize("status", ["-9", "1"])
def test_another_rank_ends_as_it_starts(start: Starter, status: str) -> None:
    """The same of any other rank: rank 0 learns it, and tells those that have met."""
    first = start.rank(0, 2, PATIENT)
    wait_until(start.run.meeting("spawn-1-0").exists, "rank 0 does not wait for the others")
    said_gone(start, 1, status)
    first.ends(1, f"rank 1 on {HERE} has ended")


def said_gone(start: Starter, rank: int, status: str) -> None:
    """What the rank's supervisor says."""
    file = gone_file(start.run.rescues / "spawn-1-0", rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(status)


def test_an_address_that_does_not_resolve(start: Starter) -> None:
    """A typing error, or a cluster without host names."""
    host, port = "no-such-host.invalid", free_port()
    first, second = (start.rank(rank, 2, env=variables(rank, 2, port, host)) for rank in (0, 1))
    second.ends(2, f"error: MASTER_ADDR={host} MASTER_PORT={port}", f"does not resolve on {HERE}; give an IP address")
    first.ends(1, "rank 1 on an unknown host did not join within 4 s")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_exist_is_refused_by_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 needs no name to serve, but without this check it would wait for the others until its timeout.
    In Kubernetes, where each host gets its name as it starts, the name may still appear."""

    def nobody(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(ConfigError, match="MASTER_ADDR=h7: h7 does not resolve on"):
        address._check_host(a_world(rank, 2, "mpirun"), "h7", "MASTER_ADDR=h7")
    address._check_host(a_world(rank, 2, "env"), "h7", "MASTER_ADDR=h7")


def test_a_port_that_is_taken(start: Starter) -> None:
    """Another user's job took the port, as 29500 is everyone's choice. The other ranks connect to that job, which does
    not answer: torch would wait without a timeout."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        said = f"error: MASTER_ADDR=localhost MASTER_PORT={port}: port {port} on {HERE}: Address already in use"
        start.rank(0, 2, env=variables(0, 2, port)).ends(2, said)
        start.rank(1, 2, env=variables(1, 2, port)).ends(
            1, f"localhost:{port}: something else listens there", "within 4 s"
        )


@pytest.mark.parametrize(
    "method",
    ["env", "localhost:29500", "tcp://localhost", "tcp://h1:0", "tcp://h1:65536", "tcp://fd00::1:29500", "file://here"],
)
def test_an_invalid_init_method(method: str) -> None:
    """Refused when the command is typed, not by every rank of a job that has waited in the queue for hours."""
    with pytest.raises(ConfigError, match=r"launch\.init_method=.*: must be env://, tcp://HOST:PORT or file:///PATH"):
        Config.load(None, [f"launch.init_method={method}"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, f"launch.init_method=env://: MASTER_ADDR is not set on {HERE}"),
        ({"MASTER_ADDR": "localhost"}, f"launch.init_method=env://: MASTER_PORT is not set on {HERE}"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, "MASTER_PORT=http: must be a number from 1 to 65535"),
    ],
    ids=["nothing", "no port", "no number"],
)
def test_the_environment_has_no_address(start: Starter, given: dict[str, str], said: str) -> None:
    """env:// is torch's own default; it needs a launcher that exports both variables."""
    env = {"RANK": "1", "WORLD_SIZE": "2", **given}
    start.rank(1, 2, "launch.init_method=env://", env=env).ends(2, f"error: {said}")


def test_a_file_that_cannot_be_written(start: Starter, tmp_path: Path) -> None:
    """Usual mistakes: the path is a folder, or on a disk that the nodes do not share."""
    method = f"launch.init_method=file://{tmp_path}"
    for rank in (0, 1):
        start.rank(rank, 2, method).ends(2, f"error: {method}: Is a directory on {HERE}")


def test_two_jobs_at_one_address(start: Starter) -> None:
    """Both were given the same port. A rank of the second job must not take the place of a rank of the first, which
    must continue undisturbed."""
    port = free_port()
    first = start.rank(0, 2, "launch.hang_timeout_s=100", name="first", env=variables(0, 2, port))
    stray = start.rank(1, 2, "launch.hang_timeout_s=100", name="second", env=variables(1, 2, port))
    stray.ends(2, f"two jobs use localhost:{port}: this one (second, attempt", "another (first, attempt")
    start.rank(1, 2, name="first", env=variables(1, 2, port)).ends(0)
    first.ends(0, "finished")


def test_the_same_rank_twice(start: Starter) -> None:
    """A script gives two processes the same RANK. The second of them reports it, and the others report which rank is
    missing because of it."""
    twice = [start.rank(1, 3), start.rank(1, 3)]
    first = start.rank(0, 3)
    first.ends(1, f"rank 2 on {HERE} did not join within 4 s")
    for rank in twice:
        rank.process.join(DEADLINE_S)
    logs = [rank.log.read_text() for rank in twice]
    assert sorted(rank.process.exitcode or 0 for rank in twice) == [1, 2], logs
    (said,) = (
        line
        for text in logs
        for line in text.splitlines()
        if "error: " in line and "two processes claim rank 1" in line
    )
    assert all(f"process {rank.process.pid} on {HERE}" in said for rank in twice)


def test_gloo_cannot_connect(start: Starter) -> None:
    """All ranks have met, but gloo's own connections fail on one. Without help the others would wait in gloo, for twice
    their timeout, for a rank that has ended."""
    env = {"LASTSTEP_RANK": "1", "LASTSTEP_WORLD_SIZE": "2", "LASTSTEP_JOB": "1", "GLOO_SOCKET_IFNAME": "nosuch0"}
    first, second = start.rank(0, 2, "launch.hang_timeout_s=100"), start.rank(1, 2, env=env)
    second.ends(1, "gloo cannot connect them", "GLOO_SOCKET_IFNAME chooses the network")
    first.ends(1, "gloo cannot connect them")


def test_an_address_that_every_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's bridge: tried first, it would connect a rank to any process at that port of its own host."""
    file = tmp_path / "file.json"
    places = ["h1", "172.17.0.1", "10.0.0.1"]
    file.write_text(json.dumps({"purpose": "this", "places": places, "port": 7}))
    monkeypatch.setattr(address, "interfaces", lambda: [("docker0", "172.17.0.1"), ("eth0", "10.0.0.2")])
    assert address._read_address(file, "this") == (["h1", "10.0.0.1", "172.17.0.1"], 7)


def test_an_address_that_is_left_over(start: Starter, tmp_path: Path) -> None:
    """An attempt that is killed while its ranks meet leaves its address in the file. The next attempt, which uses the
    same file, must not wait for a rank 0 that is dead."""
    place = tmp_path / "meeting-point"
    method = f"launch.init_method=file://{place}"
    killed = start.rank(0, 2, method, "launch.hang_timeout_s=100")
    deadline = time.monotonic() + DEADLINE_S
    while not place.exists():
        assert time.monotonic() < deadline and killed.process.is_alive(), "rank 0 did not publish its address"
        time.sleep(0.01)
    killed.process.kill()
    killed.process.join()
    second = start.rank(1, 2, method, "launch.hang_timeout_s=100")
    first = start.rank(0, 2, method, "launch.hang_timeout_s=100")
    first.ends(0, "finished")
    second.ends(0)
    assert reasons(RunDir(tmp_path / "run")) == ["lost", "finished"]
