"""What the core asks alerts for (see laststep/rooms.py), and the process that looks at a run and sends what is due:
`python -m laststep.alert.looker FOLDER [once]`.

Beside rank 0 it looks every LOOK_S, and a last time when it is asked to end. With `once` it looks once: beside the rank
that has recorded an end, in the batch shell, and for a command that watches the run. Under `--local` the command looks
once the ranks have ended, so that none of them waits for a server.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laststep.alert import KINDS, events
from laststep.alert.post import SEND_S, is_url, post
from laststep.config import secret
from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.ranks.beside import Beside
from laststep.records.attempt_record import AttemptRecord
from laststep.records.metrics import newest_step, steps_from
from laststep.rundir import RunDir
from laststep.runs.run_status import records_of
from laststep.say import say

MODULE = "laststep.alert.looker"
LOOK_S = 5.0
ONCE_S = int(2 * SEND_S)  # a process that looks once ends itself after that
LEAVE_S = 5.0  # how long a command waits for it
CLOCKS_S = 60.0  # that the clocks of two hosts may differ
BACK = events.WINDOW + events.STEPS  # steps to read again at a start: their range


def programs(config: Any, run: RunDir) -> Iterator[Beside]:
    """One beside rank 0, and one beside the rank that records an end, which may be another."""
    if config.alert.to and run.secrets.exists():
        yield Beside("alert", MODULE, "run", memory_gb=2.0)
        if not _is_local():
            yield Beside("alert", MODULE, "end", memory_gb=2.0)


def _is_local() -> bool:
    """Whether this is beside a rank of `--local`: its command looks once the ranks have ended."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "local"


def check(config: Any, machine: Any) -> None:
    """Raise ConfigError for an event or a target that cannot be."""
    for kind in config.alert.when:
        if kind not in KINDS:
            raise ConfigError(f"alert.when={kind}: {nearest(kind, KINDS)}")
    for target in config.alert.to:
        if secret.is_mask(target):  # kept in the run's folder
            continue
        if is_url(target):
            _check_url(target)
        elif not (words := _words(target)) or shutil.which(words[0]) is None:
            name = words[0] if words else target
            raise ConfigError(f"alert.to: {name or 'an empty word'} is neither a URL nor a command on this machine")


def _check_url(target: str) -> None:
    try:
        apprise = importlib.import_module("apprise")
    except ImportError:
        raise ConfigError(
            f"alert.to={secret.masked(target)}: needs apprise, which {sys.executable} lacks: pip install apprise"
        ) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its words hold the secret
    if not apprise.Apprise().add(target):
        raise ConfigError(
            f"alert.to={secret.masked(target)}: no URL that apprise can send to; it lists them at "
            "https://appriseit.com/services"
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"alert.to: a command cannot be read: {error}") from None


def outside(run: RunDir) -> None:
    """Send what nobody has sent: all ranks may have been killed."""
    if run.secrets.exists():
        look_once(run.path)


class Watch:
    """Looks at one run, again and again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        config: Any = Config.load(run.config)
        self._alert = config.alert
        self._launch = config.launch
        self._targets = secret.read(run.secrets, "alert.to")
        # What happened before there was anybody to tell is old.
        self._since = run.secrets.stat().st_mtime - CLOCKS_S if self._targets else 0.0
        newest = newest_step(run.metrics)
        self._loss, self._next = events.Loss(), max(1, (newest["step"] if newest else 0) - BACK)

    def look(self, settled: Sequence[AttemptRecord] | None = None) -> int:
        """Send what is due; returns how many messages were sent. `settled`: the records, with the end of an attempt
        that could not record it, see `run_status.settled`."""
        return post(self._run, self._due(settled), self._targets) if self._targets else 0

    def _due(self, settled: Sequence[AttemptRecord] | None) -> Iterator[events.Event]:
        run, when = self._run, self._alert.when
        records = records_of(run) if settled is None else settled
        yield from events.of_attempts(run, records, self._launch, when, self._since)
        if "idle" in when and records and not records[-1]["reason"] and (idle := _idle(run)) is not None:
            yield events.of_idle(run, idle, records[-1]["attempt"])
        if "diverged" in when:
            newest = newest_step(run.metrics)
            if newest and newest["step"] < self._next - 1:  # steps were lost, and are done again with the same bits
                return
            lines = list(steps_from(run.metrics, self._next))
            if lines:
                self._next = lines[-1]["step"] + 1
            for event in events.of_loss(run, iter(lines), self._loss):
                if not self._was_said(event):
                    yield event

    def _was_said(self, event: events.Event) -> bool:
        """Whether a jump of the loss near there was said: who begins to look elsewhere finds another first step."""
        step = int(event.key.partition("-")[2])
        said = {int(path.name.partition(".")[0].partition("-")[2]) for path in self._run.alerts.glob("loss-*")}
        return any(abs(step - other) <= BACK and step != other for other in said)


def _idle(run: RunDir) -> Any:
    with contextlib.suppress(ImportError):  # a room that is not here
        from laststep.telemetry import readings

        return readings.idle(run, time.time())
    return None


def look_once(folder: Path) -> None:
    """Have a process of its own look at a run: for commands and the batch shell. A command leaves it to itself after
    LEAVE_S. Never raises."""
    package = str(Path(__file__).parent.parent.parent)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from laststep.alert.looker import main; main(sys.argv[1:])"
    log = RunDir(folder).beside_log("alert")
    with contextlib.suppress(OSError):
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:  # who waits for the end of this command's output is not to wait for that process
            begins = file.tell()
            process = subprocess.Popen(
                [sys.executable, "-c", code, package, str(folder), "once"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        waiting = threading.Thread(target=process.wait, name="alert", daemon=True)  # reaps it, however late
        waiting.start()
        waiting.join(ONCE_S + LEAVE_S if _ends_with_us() else LEAVE_S)
        with log.open("rb") as file:
            file.seek(begins)
            sys.stdout.write(file.read().decode(errors="replace"))
        if waiting.is_alive():
            say(f"alerts are still being sent, for up to {ONCE_S} s; {log} says how that ends")


def _ends_with_us() -> bool:
    """Whether what this process leaves behind is killed soon: in a job, and as a container's main program."""
    return "SLURM_JOB_ID" in os.environ or os.getppid() <= 1


def main(words: Sequence[str]) -> None:
    """Look until SIGTERM, or once."""
    run, once = RunDir(words[0]), len(words) > 1
    over = threading.Event()
    if once:
        signal.alarm(ONCE_S)  # which kills it
    else:
        signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        watch = Watch(run)
    except (ConfigError, OSError) as error:
        return say(f"no alerts: {error}")
    while True:
        last = once or over.is_set()
        if not once and last and _is_local():
            return
        with contextlib.suppress(OSError):
            watch.look()
        if last:
            return
        over.wait(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
