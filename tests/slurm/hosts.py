"""Simulated hosts for tests: on this machine, but each with its own network, address and name.

They share the disk and one network (a bridge), as the nodes of a cluster do. A test says which names resolve. Needs
Linux network namespaces, `ip` of iproute2, and root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.support.project import DEADLINE_S

# Files that replace /etc/hosts and /etc/resolv.conf on a host, where `ip netns exec` expects them. That command is not
# used, as it hides the cgroups under /sys, which slurmd needs.
ETC = Path("/etc/netns")
MOVE_IN = """\
set -e
echo "$0" >/proc/sys/kernel/hostname
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
shift
exec "$@"
"""


class Host:
    """A simulated host, named h1, h2 and so on."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.name = f"h{number}"
        self.space = f"{hosts.prefix}{self.name}"  # the name of its network namespace and of its network interface
        self.address = hosts.address(10 + number)

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on the host."""
        enter = ("nsenter", f"--net=/run/netns/{self.space}", "unshare", "--uts", "--mount")
        return [*enter, "sh", "-c", MOVE_IN, self.name, str(ETC / self.space), *words]

    def starts(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process on the host, which writes to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*words), env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def ip(self, *words: str) -> str:
        """The output of the command `ip` on the host."""
        return _ip("-n", self.space, *words)

    def resolves(self, names: Mapping[str, str]) -> None:
        """Make these names, and localhost, the only ones that resolve on the host."""
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (ETC / self.space).mkdir(parents=True, exist_ok=True)
        (ETC / self.space / "hosts").write_text("\n".join(lines) + "\n")
        (ETC / self.space / "resolv.conf").write_text("")

    def asks(self, server: str) -> None:
        """Ask this name server for other names, and for the names of addresses."""
        (ETC / self.space / "resolv.conf").write_text(f"nameserver {server}\n")


class Hosts(list[Host]):
    """Several hosts, until the end of the `with`. Also removes hosts that a killed test left behind."""

    def __init__(self, count: int, ip_version: int = 4) -> None:
        if lack := missing():
            raise RuntimeError(lack)
        self.prefix = f"ls{os.getpid()}"
        self.ip_version = ip_version
        super().__init__(Host(self, number) for number in range(1, count + 1))

    def address(self, number: int) -> str:
        """An address in a network that no other test uses: for benchmarks (RFC 2544), or for local use (RFC 4193)."""
        pid = os.getpid()
        if self.ip_version == 6:
            return f"fd4c:{pid >> 16:x}:{pid & 0xFFFF:x}::{number}"
        return f"198.{18 + (pid >> 8) % 2}.{pid % 256}.{number}"

    def __enter__(self) -> Hosts:
        _remove(prefix for prefix in _prefixes() if not Path(f"/proc/{prefix.removeprefix('ls')}").exists())
        try:
            _ip("link", "add", self.prefix, "type", "bridge")
            self._address(self.address(1), self.prefix)
            for host in self:
                host.resolves({})
                _ip("netns", "add", host.space)
                _ip("link", "add", host.space, "type", "veth", "peer", "name", "eth0", "netns", host.space)
                _ip("link", "set", host.space, "master", self.prefix, "up")
                host.ip("link", "set", "lo", "up")
                self._address(host.address, "eth0", "-n", host.space)
        except BaseException:
            _remove([self.prefix])
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove([self.prefix])

    def cut(self) -> None:
        """Drop what the hosts send to each other, without an error. They still reach the bridge's address."""
        for host in self:
            _ip("link", "set", host.space, "type", "bridge_slave", "isolated", "on")

    def mend(self) -> None:
        """Let the network work again."""
        for host in self:
            _ip("link", "set", host.space, "type", "bridge_slave", "isolated", "off")

    def _address(self, address: str, interface: str, *where: str) -> None:
        more = ("nodad",) if self.ip_version == 6 else ()  # usable at once
        _ip(*where, "address", "add", f"{address}/{64 if self.ip_version == 6 else 24}", "dev", interface, *more)
        _ip(*where, "link", "set", interface, "up")


def missing() -> str | None:
    """What this machine lacks to simulate hosts, in one line, or None."""
    if not shutil.which("ip"):
        return "simulated hosts need: apt-get install -y --no-install-recommends iproute2"
    if os.geteuid() != 0:
        return "simulated hosts need root: sudo, or a container"
    space = f"ls{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
    if tried.returncode == 0:
        _ip("netns", "delete", space)
        return None
    return f"simulated hosts need network namespaces: {tried.stderr.strip()}"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _prefixes() -> set[str]:
    """The prefixes of all simulated hosts on this machine."""
    spaces = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    links = [line.split()[0] for line in _ip("-brief", "link", "show", "type", "bridge").splitlines()]
    return {name.partition("h")[0] for name in (*spaces, *links) if name.removeprefix("ls")[:1].isdecimal()}


def _remove(prefixes: Iterable[str]) -> None:
    """End all processes on these hosts, and remove the hosts."""
    for prefix in prefixes:
        for line in _ip("netns", "list").splitlines():
            space = line.split()[0]
            if space.startswith(f"{prefix}h"):
                _end_all(space)
                with suppress(RuntimeError):  # it may not have been created
                    _ip(
                        "link", "delete", space
                    )  # a deleted namespace keeps its interface while it has connections to close
                with suppress(RuntimeError):  # another test process has removed it meanwhile
                    _ip("netns", "delete", space)
                shutil.rmtree(ETC / space, ignore_errors=True)
        with suppress(RuntimeError):
            _ip("link", "delete", prefix)


def _end_all(space: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while pids := _ip("netns", "pids", space).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{space}: processes do not end: {pids}")
        time.sleep(0.02)
