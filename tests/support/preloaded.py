"""A server that forks processes with more imported than all ranks need: the frameworks take seconds in each rank."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any


class PreloadedServer:
    """Imports these modules in a process of `context`, as far as they are installed, and forks that."""

    def __init__(self, context: ForkServerContext, modules: Sequence[str]) -> None:
        self._connection, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(theirs, tuple(modules)))
        server.start()
        theirs.close()
        atexit.register(self._connection.close)  # then the server ends; registered last, so done first

    def ask(self, method: str, *words: Any) -> Any:
        """Have the server call a method of `_Forked`, and return what that returns."""
        self._connection.send((method, words))
        return self._connection.recv()


class PreloadedProcess:
    """A process that the server forks, with those methods of multiprocessing's that tests use."""

    def __init__(self, server: PreloadedServer, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._server, self._target, self._args = server, target, args

    def start(self) -> None:
        self.pid: int = self._server.ask("start", self._target, self._args)

    def join(self, timeout: float | None = None) -> None:
        self._server.ask("join", self.pid, timeout)

    @property
    def exitcode(self) -> int | None:
        code: int | None = self._server.ask("join", self.pid, 0)
        return code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class _Forked:
    """The processes that this one has forked."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._processes: dict[int, Any] = {}

    def start(self, target: Callable[..., None], args: tuple[Any, ...]) -> int:
        process = self._context.Process(target=target, args=args)
        process.start()
        assert process.pid is not None
        self._processes[process.pid] = process
        return process.pid

    def join(self, pid: int, timeout: float | None) -> int | None:
        self._processes[pid].join(timeout)
        code: int | None = self._processes[pid].exitcode
        return code


def _serve(connection: Connection, modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):  # the rank will say why
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    forked = _Forked()
    with contextlib.suppress(EOFError):
        while True:
            method, words = connection.recv()
            connection.send(getattr(forked, method)(*words))
