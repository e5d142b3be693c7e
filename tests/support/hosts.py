"""Hosts of their own for tests: on this machine, but each with its own network, addresses and name.

They share the disk and one link (a bridge), as the nodes of a cluster do. Names resolve where a test says so. Linux's
network namespaces, `ip` of iproute2, and root are needed.
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

DEADLINE_S = 30.0
# Where `ip netns exec` finds a host's /etc/hosts and /etc/resolv.conf. It is not used itself, as it hides the cgroups
# under /sys, which slurmd needs.
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
    """One of them. Its name is that of its place: h1, h2."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.name = f"h{number}"
        self.space = f"{hosts.prefix}{self.name}"  # of its network namespace, and of its end of the cable
        self.address = hosts.address(10 + number)

    def command(self, *words: str) -> list[str]:
        """What to start here, to start `words` there."""
        enter = ("nsenter", f"--net=/run/netns/{self.space}", "unshare", "--uts", "--mount")
        return [*enter, "sh", "-c", MOVE_IN, self.name, str(ETC / self.space), *words]

    def starts(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A process there, which writes into `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*words), env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def ip(self, *words: str) -> str:
        """The output of the command `ip` there."""
        return _ip("-n", self.space, *words)

    def resolves(self, names: Mapping[str, str]) -> None:
        """Give names an address there, and no other name than localhost."""
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (ETC / self.space).mkdir(parents=True, exist_ok=True)
        (ETC / self.space / "hosts").write_text("\n".join(lines) + "\n")
        (ETC / self.space / "resolv.conf").write_text("")

    def asks(self, server: str) -> None:
        """Of any other name, and of what an address is called, ask this name server."""
        (ETC / self.space / "resolv.conf").write_text(f"nameserver {server}\n")


class Hosts(list[Host]):
    """So many hosts, until the end of the `with`; those that a killed test left behind go, too."""

    def __init__(self, count: int, ip_version: int = 4) -> None:
        if lack := missing():
            raise RuntimeError(lack)
        self.prefix = f"ls{os.getpid()}"
        self.ip_version = ip_version
        super().__init__(Host(self, number) for number in range(1, count + 1))

    def address(self, number: int) -> str:
        """In a network that no other test uses: reserved for tests (RFC 2544), or for one's own (RFC 4193)."""
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
        """The network between the hosts takes everything and delivers nothing: no host is told. They still reach the
        bridge's own address."""
        for host in self:
            _ip("link", "set", host.space, "type", "bridge_slave", "isolated", "on")

    def mend(self) -> None:
        """The network works again."""
        for host in self:
            _ip("link", "set", host.space, "type", "bridge_slave", "isolated", "off")

    def _address(self, address: str, interface: str, *where: str) -> None:
        more = ("nodad",) if self.ip_version == 6 else ()  # usable at once
        _ip(*where, "address", "add", f"{address}/{64 if self.ip_version == 6 else 24}", "dev", interface, *more)
        _ip(*where, "link", "set", interface, "up")


def missing() -> str | None:
    """One line that names what this machine lacks to play several hosts, or None."""
    if not shutil.which("ip"):
        return "hosts of their own need: apt-get install -y --no-install-recommends iproute2"
    if os.geteuid() != 0:
        return "hosts of their own need root: sudo, or a container"
    space = f"ls{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
    if tried.returncode == 0:
        _ip("netns", "delete", space)
        return None
    return f"hosts of their own need network namespaces: {tried.stderr.strip()}"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _prefixes() -> set[str]:
    """Of all hosts that any test has made on this machine."""
    spaces = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    links = [line.split()[0] for line in _ip("-brief", "link", "show", "type", "bridge").splitlines()]
    return {name.partition("h")[0] for name in (*spaces, *links) if name.removeprefix("ls")[:1].isdecimal()}


def _remove(prefixes: Iterable[str]) -> None:
    """End whatever runs on these hosts, and them."""
    for prefix in prefixes:
        for line in _ip("netns", "list").splitlines():
            space = line.split()[0]
            if space.startswith(f"{prefix}h"):
                _end_all(space)
                with suppress(RuntimeError):  # it never came so far
                    _ip("link", "delete", space)  # a deleted namespace keeps its end while it has connections to close
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
            raise RuntimeError(f"{space}: processes that do not end: {pids}")
        time.sleep(0.02)
