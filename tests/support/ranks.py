"""Real ranks for tests: processes that run the Trainer and communicate by gloo, as a launcher would start them.

They are forked from a server process that has imported torch, so that an attempt costs little more than its training.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from laststep.cli.verify import inspect
from laststep.config.config import Config
from laststep.records.metrics import CLOCK, read_lines
from laststep.rundir import RunDir
from laststep.script import FILE
from tests.support.project import DEADLINE_S, SILENT

PRINT_STACKS = signal.SIGRTMIN
# What ranks import that takes seconds: those of a script by the package that it imports, and those of these loops.
PRELOADED = {
    "accelerate": ("accelerate", "torch._dynamo", "torchdata.stateful_dataloader"),
    "lightning": ("laststep.frameworks.lightning",),
    "trl": ("laststep.frameworks.transformers", "trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama"),
    "tests.support.framework_loops": (
        "laststep.frameworks.fabric",
        "laststep.frameworks.lightning",
        "laststep.frameworks.transformers",
        "transformers.models.gpt2.modeling_gpt2",
        "trl.trainer.dpo_trainer",
        "trl.trainer.sft_trainer",
    ),
}
_attempts = iter(range(1, 1 << 30))


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


@functools.cache
def _preloaded(module: str) -> PreloadedServer:
    return PreloadedServer(_context(), PRELOADED[module])


def _process(args: tuple[Any, ...]) -> BaseProcess | PreloadedProcess:
    """A rank, not started yet."""
    config, env, *_ = args
    names = {config.task.rpartition(".")[0]}
    if config.script and (file := Path(env.get(FILE, config.script[0]))).is_file():
        names |= set(re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.MULTILINE))
    for name in PRELOADED:
        if name in names:
            return PreloadedProcess(_preloaded(name), _rank, args)
    return _context().Process(target=_rank, args=args)


class Attempt:
    """The ranks of one attempt of a run. Each calls `before` first, if given."""

    def __init__(
        self,
        config: Config,
        env: Mapping[str, str] | None = None,
        nodes: int = 1,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.run = RunDir(Path(config.launch.root) / str(config.launch.name))
        self.run.logs.mkdir(parents=True, exist_ok=True)
        job_id, size = f"test{next(_attempts)}", config.launch.world_size
        self.logs = [self.run.logs / f"{job_id}_{rank}_log.out" for rank in range(size)]
        self.ranks: list[BaseProcess | PreloadedProcess] = []
        for rank, log in enumerate(self.logs):
            place = {
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_JOB_ID": job_id,
                "SUBMITIT_LOCAL_NTASKS": str(size),
                "SUBMITIT_LOCAL_JOB_NUM_NODES": str(nodes),
                "SUBMITIT_LOCAL_NODEID": str(rank * nodes // size),
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_LOCALID": str(rank % (size // nodes)),
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the rank: a pool would import torch again
            }
            silent = {SILENT: os.environ[SILENT]} if SILENT in os.environ else {}
            process = _process((config, {**place, **silent, **(env or {})}, str(log), before))
            process.start()
            self.ranks.append(process)

    def wait(self) -> list[int]:
        """The exit statuses of all ranks, negative for a signal. Fails the test, with the logs, if they do not end."""
        deadline = time.monotonic() + DEADLINE_S
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        if left := [rank for rank in self.ranks if rank.is_alive()]:
            for rank in left:
                os.kill(rank.pid or 0, PRINT_STACKS)
                rank.join(1)  # while it prints them
                rank.kill()
            raise AssertionError(f"ranks did not end within {DEADLINE_S:.0f} s:\n{self.output()}")
        return [rank.exitcode or 0 for rank in self.ranks]

    def wait_for_end(self, *ranks: int) -> None:
        """Wait until these ranks have ended."""
        for rank in ranks:
            self.ranks[rank].join(DEADLINE_S)
            assert not self.ranks[rank].is_alive(), f"rank {rank} did not end:\n{self.output()}"

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            os.kill(self.ranks[rank].pid or 0, number)

    def wait_for(self, text: str, rank: int = 0) -> None:
        """Wait until the rank has printed `text`."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in (self.logs[rank].read_text() if self.logs[rank].exists() else ""):
            if time.monotonic() > deadline or not self.ranks[rank].is_alive():
                raise AssertionError(f"rank {rank} did not print {text!r}:\n{self.output()}")
            time.sleep(0.01)

    def output(self) -> str:
        """What all ranks have printed."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs if log.exists())


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls this function and has torch imported."""
    process = _context().Process(target=function, args=args)
    process.start()
    return process


def starts(words: Sequence[str], env: Mapping[str, str], log: Path) -> BaseProcess:
    """Start `python -m laststep WORDS`, in which ranks wait for each other no longer than launch.hang_timeout_s."""
    process = _context().Process(target=_command, args=(list(words), dict(env), str(log)))
    process.start()
    return process


def train(config: Config, env: Mapping[str, str] | None = None, before: Callable[[], None] | None = None) -> RunDir:
    """Run one attempt, which must finish the run."""
    attempt = Attempt(config, env, before=before)
    codes = attempt.wait()
    assert codes == [0] * len(codes), attempt.output()
    return attempt.run


def fingerprint(run: RunDir) -> dict[str, Any]:
    """What interruptions must not change: the weights of the last checkpoint, and every line of metrics.jsonl except
    its times."""
    checkpoint = inspect(run)[-1]
    return {
        "weights": checkpoint["weights_sha256"] or checkpoint["files_sha256"],
        "step": checkpoint["step"],
        "metrics": [{k: v for k, v in line.items() if k not in CLOCK} for line in read_lines(run.metrics)],
    }


def pause(run: RunDir, since: float) -> float:
    """Seconds from `since` (Unix) to the end of the first new step of the run's second attempt."""
    first = read_lines(run.attempts)[0]
    again = next(line for line in read_lines(run.metrics) if line.get("step") == first["end_step"] + 1)
    return float(again["time"]) - since


def reasons(run: RunDir) -> list[str]:
    """The reasons for which the run's attempts ended, in order."""
    return [record["reason"] for record in read_lines(run.attempts)]


def _command(words: list[str], env: dict[str, str], log: str) -> None:
    """The body of a process that `starts` makes."""
    _write_into(log)
    os.environ.update(env)
    from laststep.ranks import group

    group.MEETING_S = 0.0
    sys.argv[1:] = words
    runpy.run_module("laststep", run_name="__main__")


def _write_into(log: str) -> None:
    """Redirect what this process prints."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _rank(config: Config, env: dict[str, str], log: str, before: Callable[[], None] | None) -> None:
    """The body of a rank's process."""
    _write_into(log)
    faulthandler.register(PRINT_STACKS, file=2)
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's compiler sets it in the server
    os.environ.update(env)
    import torch

    from tests.silent import silent_backend

    torch.set_num_threads(1)
    if SILENT in os.environ:
        silent_backend.register()
    if before is not None:
        before()
    from laststep.trainer import Trainer

    try:
        print("result", json.dumps(Trainer(config)()), flush=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        # A thread that wakes in torch's C++ code while Python shuts down would abort the process: a core file, and a
        # wrong exit status.
        if left := {thread.name for thread in threading.enumerate()} & {"watch", "beat", "report", "stop", "saver"}:
            print(f"threads are left: {left}", flush=True)
            sys.exit(70)


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
