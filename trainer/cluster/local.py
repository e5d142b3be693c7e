"""Running a run's ranks on this machine, as processes that are told who they are as submitit's local executor would."""

from __future__ import annotations

import contextlib
import os
import pdb
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from trainer.cluster import runs
from trainer.config import Config, ConfigError
from trainer.rundir import RunDir
from trainer.trainer import Trainer

# How long the other ranks have, once one failed, to notice and say so before they are ended.
GRACE_S = 10.0


def run_local(config: Config, run: RunDir) -> int:
    """Run all ranks here, rank 0's output on the terminal and every rank's in `logs/`; returns the exit status.

    Ctrl-C, SIGTERM, SIGUSR2 and a closed terminal are passed on to the ranks as a stop; a second Ctrl-C kills them.
    """
    job_id = f"local{os.getpid()}"
    with _forwarded_signals() as received:
        ranks = [_start(config, run, job_id, rank) for rank in range(config.launch.world_size)]
        logs = [run.logs / f"{job_id}_{rank}_log.out" for rank in range(len(ranks))]
        copies = [(ranks[0].stdout, sys.stdout), (ranks[0].stderr, sys.stderr)]
        readers = [threading.Thread(target=_copy, args=(*copy, logs[0]), daemon=True) for copy in copies]
        for reader in readers:
            reader.start()
        sent = 0
        failed_at: float | None = None
        while any(rank.poll() is None for rank in ranks):
            if len(received) > sent:
                sent = len(received)
                kill = received.count(signal.SIGINT) > 1
                _send(ranks, signal.SIGKILL if kill else received[-1])
                if not kill:
                    print("\n[laststep] stopping after this step; Ctrl-C again to kill", file=sys.stderr, flush=True)
            if failed_at is None and any(rank.returncode for rank in ranks):
                failed_at = time.monotonic()
            if failed_at is not None and not received and time.monotonic() > failed_at + GRACE_S:
                _send(ranks, signal.SIGKILL)
            time.sleep(0.05)
        for reader in readers:
            reader.join(timeout=5)
    status = _status([rank.returncode for rank in ranks])
    if status in (1, 2):
        _show_failure([rank.returncode for rank in ranks], logs)
    return status


def run_debug(config: Config) -> int:
    """Run one rank in this process; an error opens the post-mortem debugger where it was raised."""
    try:
        Trainer(config)()
    except ConfigError:
        raise
    except Exception:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is the debugger's now
        pdb.post_mortem()
        return 1
    return 0


def _start(config: Config, run: RunDir, job_id: str, rank: int) -> subprocess.Popen[bytes]:
    """One rank. A session of its own keeps a Ctrl-C at the terminal from reaching it twice."""
    launch = config.launch
    environment = {
        **os.environ,
        "PYTHONPATH": runs.python_path(),
        **launch.env,
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job_id,
        "SUBMITIT_LOCAL_NTASKS": str(launch.world_size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }
    command = [sys.executable, "-u", "-m", "trainer", str(run.path)]
    if rank == 0:
        return subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    with (run.logs / f"{job_id}_{rank}_log.out").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _copy(source: IO[bytes] | None, terminal: TextIO, log: Path) -> None:
    """Rank 0's output, to its log and to the terminal, as it comes."""
    assert source is not None
    with log.open("ab") as file:
        while data := os.read(source.fileno(), 1 << 16):
            file.write(data)
            file.flush()
            with contextlib.suppress(OSError):  # the terminal may be gone; the log is not
                terminal.buffer.write(data)
                terminal.flush()


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask for a stop, instead of dying of them."""
    received: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        stop = signal.SIGTERM if number == signal.SIGHUP else number
        signal.signal(number, lambda _n, _f, stop=stop: received.append(stop))  # type: ignore[misc]
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _status(codes: list[int]) -> int:
    """The command's exit status: what is wrong with the configuration wins over what followed from it."""
    if not any(codes):
        return 0
    if 2 in codes:
        return 2
    stopped = [code for code in codes if code > 128]
    return stopped[0] if len(stopped) == len(codes) else 1


def _show_failure(codes: list[int], logs: list[Path]) -> None:
    """Rank 0's words are on the terminal already; show those of the others that failed."""
    for rank, code in enumerate(codes):
        if rank and code and not codes[0]:
            print(logs[rank].read_text(errors="replace")[-4000:], file=sys.stderr)
        if code < 0:
            print(f"[laststep] rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    if 2 not in codes:  # what is wrong with the configuration is on one line already
        print(f"[laststep] failed; each rank's log is in {logs[0].parent}", file=sys.stderr)
