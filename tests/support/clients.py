"""Clients of a network file system, simulated on this machine: each has its own, cached view of one folder.

The folder itself, seen from the test, is the server: always up to date. A process that is started on a client finds the
client's view at the folder's own path, in a mount namespace of its own. `tests.support.caching_client` says what a
client does not see, and for how long.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support.caching_client import unmount
from tests.support.project import PROJECT

PREFIX = "laststep-client-"  # not that of a cluster, whose folders every session looks through
# Linux: of unshare and mount.
_NEW_MOUNTS, _BIND, _PRIVATE, _ALL = 0x20000, 4096, 1 << 18, 16384
BEHIND_VIEW = 'mount --bind "$0" "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Client:
    """One client: `view` is its mount of `folder`."""

    folder: Path
    view: Path
    pid: int  # of the process that answers for the file system

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on the client."""
        return ["unshare", "--mount", "sh", "-c", BEHIND_VIEW, str(self.view), str(self.folder), *words]

    def enter(self) -> None:
        """Move this process to the client. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        steps = (
            lambda: libc.unshare(_NEW_MOUNTS),
            lambda: libc.mount(None, b"/", None, _PRIVATE | _ALL, None),
            lambda: libc.mount(os.fsencode(self.view), os.fsencode(self.folder), None, _BIND, None),
        )
        for step in steps:
            if step():
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.folder))

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Meanwhile the server does not answer this client."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class Clients(list[Client]):
    """Clients of one folder, until the end of the `with`. Also removes those that a killed test left behind."""

    def __init__(self, folder: Path, count: int, cache_s: float, write_back_s: float | None = None) -> None:
        """`cache_s`: how long a client remembers. `write_back_s`: how long it keeps what was written into an open file;
        by default the same."""
        super().__init__()
        if lack := missing():
            raise RuntimeError(lack)
        self._folder, self._count = folder, count
        self._times = str(cache_s), str(cache_s if write_back_s is None else write_back_s)
        self._mounts: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Clients:
        _remove_abandoned()
        try:
            for _ in range(self._count):
                view = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
                words = (sys.executable, "-m", "tests.support.caching_client", str(self._folder), str(view))
                mount = subprocess.Popen([*words, *self._times], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
                self._mounts.append(mount)
                self.append(Client(self._folder, view, mount.pid))
                if mount.stdout is None or mount.stdout.readline() != "mounted\n":
                    raise RuntimeError(f"{view} could not be mounted")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for client in self:
            with suppress(OSError):
                unmount(client.view)
        for mount in self._mounts:  # processes that still use the mount get an error
            mount.kill()
            mount.wait()
            if mount.stdout is not None:
                mount.stdout.close()
        for client in self:
            client.view.rmdir()


@dataclass(frozen=True)
class OnItsNode:
    """Called by a rank of `tests.support.ranks.Attempt` before it trains: each simulated node is a client."""

    clients: tuple[Client, ...]

    def __call__(self) -> None:
        self.clients[int(os.environ["SUBMITIT_LOCAL_NODEID"])].enter()


@functools.cache
def missing() -> str | None:
    """What this machine lacks to simulate clients, in one line, or None."""
    if os.geteuid() != 0:
        return "simulated clients of a network file system need root: sudo, or a container"
    if not Path("/dev/fuse").exists():
        return (
            "simulated clients of a network file system need /dev/fuse: modprobe fuse, or docker run --device /dev/fuse"
        )
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"simulated clients of a network file system need mount namespaces: {tried.stderr.strip()}"
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"simulated clients of a network file system need /dev/fuse: {error.strerror}"
    os.close(device)
    return None


def _remove_abandoned() -> None:
    for view in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = view.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            with suppress(OSError):
                unmount(view)
            with suppress(OSError):
                view.rmdir()
