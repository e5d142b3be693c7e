"""Forks processes with torch loaded for the clients of this folder: `python server.py SOCKET OWNER [MODULE...]`, see
__init__.py.

It imports what ranks import except for the project itself, whose code each process finds by its own PYTHONPATH, and
the modules named. It ends, with all processes, when the process OWNER does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

PRELOAD = (
    "submitit",
    "numpy",
    "omegaconf",
    "rich.progress",
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torchvision.transforms.v2",
)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
SPACES = {"net": CLONE_NEWNET, "uts": CLONE_NEWUTS, "mnt": CLONE_NEWNS}
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Client:
    """The process that a forked one stands for."""

    pid: int
    mask: set[int]  # the signals that were blocked when it started
    streams: list[int]

    @classmethod
    def accept(cls, connection: socket.socket) -> Client | None:
        """The client at the other end, None if it has ended already."""
        mask, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(12))
        if not mask:
            return None
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            raise PermissionError(f"user {user}")
        return cls(pid, _signals(int.from_bytes(mask, sys.byteorder)), list(struct.unpack("3i", ancillary[0][2])))

    def read(self, name: str) -> bytes:
        """A file of /proc."""
        return Path(f"/proc/{self.pid}/{name}").read_bytes()

    def status(self, field: str) -> str:
        """A field of /proc/PID/status."""
        lines = self.read("status").decode().splitlines()
        return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


class Server:
    """The clients that are connected, and the processes that were forked for them."""

    def __init__(self, address: str, owner: int) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(100)
        self.owner = os.pidfd_open(owner)
        self.processes: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, and the connection to its client
        self.events = selectors.DefaultSelector()
        self.events.register(self.listener, selectors.EVENT_READ, self.listener)
        self.events.register(self.owner, selectors.EVENT_READ, self.owner)

    def serve(self) -> Client | None:
        """Returns the client in each process that it forks, and None in the server when its owner has ended."""
        while True:
            for key, _ in self.events.select():
                if key.data is self.owner:
                    for pidfd in self.processes:
                        self.kill(pidfd)
                    self.close()
                    return None
                if key.data is self.listener:
                    if client := self.fork():
                        return client
                elif key.data not in self.processes:
                    continue  # both events of a process at once
                elif key.fd == key.data:
                    self.report(key.data)
                else:  # a client sends nothing after its request: it has been killed
                    self.kill(key.data)
                    self.events.unregister(key.fileobj)

    def fork(self) -> Client | None:
        """Fork a process for the next client, which is returned in that process only."""
        connection, _ = self.listener.accept()
        client = Client.accept(connection)
        if client is None:
            return None
        if (pid := os.fork()) == 0:
            connection.close()
            self.close()
            return client
        for stream in client.streams:
            os.close(stream)
        pidfd = os.pidfd_open(pid)
        self.processes[pidfd] = pid, connection
        self.events.register(pidfd, selectors.EVENT_READ, pidfd)
        self.events.register(connection, selectors.EVENT_READ, pidfd)
        Path(self.listener.getsockname()).with_name(f"process_{client.pid}").write_text(str(pid))
        _send(connection, pid)
        return None

    def report(self, pidfd: int) -> None:
        """Pass on how a process ended."""
        pid, connection = self.processes.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        _send(connection, status)
        self.events.unregister(pidfd)
        with contextlib.suppress(KeyError):  # its client was killed
            self.events.unregister(connection)
        connection.close()
        os.close(pidfd)

    def kill(self, pidfd: int) -> None:
        """Kill a process whose client has been killed, and those that it started: Slurm would kill them all."""
        pid, _ = self.processes[pidfd]
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it has not made its process group yet
            os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close everything, also in each forked process."""
        self.events.close()
        self.listener.close()
        os.close(self.owner)
        for pidfd, (_, connection) in self.processes.items():
            os.close(pidfd)
            connection.close()


def become(client: Client) -> list[str]:
    """Make this process what Python would be in the place of the client; returns the words of its command line."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, os.sched_getaffinity(client.pid))
    for limit in (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")):
        resource.setrlimit(limit, resource.prlimit(client.pid, limit))
    os.umask(int(client.status("Umask"), 8))
    variables = client.read("environ").rstrip(b"\0").split(b"\0")
    words = [os.fsdecode(word) for word in client.read("cmdline").split(b"\0")[:-1]]
    ignored = _signals(int(client.status("SigIgn"), 16))
    for name, kind in SPACES.items():
        theirs = f"/proc/{client.pid}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            space = os.open(theirs, os.O_RDONLY)
            if libc.setns(space, kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")
            os.close(space)
    os.chdir(f"/proc/{client.pid}/cwd")
    for number, stream in enumerate(client.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environb.clear()
    os.environb.update(variable.split(b"=", 1) for variable in variables)  # type: ignore[misc]
    # Python ignores two signals, and turns a third into KeyboardInterrupt unless it is ignored.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        own = number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(number, signal.SIG_IGN if own else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, client.mask)
    return words


def run(words: list[str]) -> None:
    """Do what Python would with this command line."""
    sys.orig_argv = list(words)
    sys.executable = os.path.abspath(shutil.which(words[0]) or words[0])
    unbuffered = words[1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    kind, *rest = words[2:] if words[1] == "-u" else words[1:]
    _open_streams(unbuffered)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    time.tzset()
    numpy.random.seed(None)
    places = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    sys.path[:0] = dict.fromkeys(map(os.path.abspath, places))
    if importlib.util.find_spec("silent_backend"):  # torch would have loaded it as it was imported
        importlib.import_module("silent_backend").register()
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def end(program: Callable[[], None]) -> NoReturn:
    """Run the program, and end as Python would, except that its objects are not destroyed one by one: in a fork that
    takes as long as a short test."""
    status = 0
    try:
        program()
    except SystemExit as leaves:
        if leaves.code is not None and not isinstance(leaves.code, int):
            print(leaves.code, file=sys.stderr)
        status = int(leaves.code or 0) & 0xFF if isinstance(leaves.code, int | None) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _open_streams(unbuffered: bool) -> None:
    """Make sys.stdin, sys.stdout and sys.stderr anew, for other files than the server's."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, raw = getattr(sys, name), io.FileIO(number, "w" if number else "r", closefd=False)
        binary = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
        by_line = not unbuffered and (name == "stderr" or raw.isatty())
        new = io.TextIOWrapper(binary, old.encoding, old.errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client has been killed
        connection.sendall(struct.pack("i", number))


def _signals(mask: int) -> set[int]:
    """The signals in a mask as the kernel writes it."""
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    del sys.path[0]  # this file's folder
    for name in (*PRELOAD, *sys.argv[3:]):
        importlib.import_module(name)
    import numpy

    gc.collect()
    gc.freeze()  # the forks need not look at these objects again
    server = Server(sys.argv[1], int(sys.argv[2]))
    if os.fork():
        os._exit(0)  # whoever started it waits until it can be asked
    if client := server.serve():
        end(partial(run, become(client)))
