"""Sends messages, each once, however many processes on however many hosts see the same event.

For each event and target there are files in the run's folder of alerts:

    KEY.TARGET.1       made by the one who sends, with O_EXCL, which one process can
    KEY.TARGET.sent    made once it is sent

A claim without `sent` after CLAIM_S is of somebody who died, or could not send: the next try has a claim of its own
(.2), up to TRIES. So a message is sent at least once where that is possible: of one who dies between sending and saying
so, it arrives twice. An alert that arrives twice is better than one that is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from laststep.alert.events import Event
from laststep.config.secret import masked
from laststep.rundir import RunDir, write_whole
from laststep.say import say

SEND_S = 15.0  # one message to one target may take so long
CLAIM_S = 60.0  # longer than SEND_S, and than the clocks of two hosts may differ
TRIES = 5


def is_url(target: str) -> bool:
    """Whether apprise sends to it; else it is a command."""
    return "://" in target.partition(" ")[0]


def post(run: RunDir, events: Iterable[Event], targets: Sequence[str]) -> int:
    """Send what nobody has sent; returns the number of messages sent. Never raises: what fails is said, and tried again
    by the next who looks."""
    sent = 0
    for event in events:
        for number, target in enumerate(targets):
            with contextlib.suppress(OSError):  # a disk that refuses: the next look may have more luck
                sent += _post(run, event, number, target)
    return sent


def _post(run: RunDir, event: Event, number: int, target: str) -> bool:
    name = f"{event.key}.{number}"
    done = run.alerts / f"{name}.sent"
    if done.exists() or not _claim(run.alerts, name):
        return False
    problem = send(event, target, run)
    if problem:
        say(f"WARNING: alert {event.kind} to {masked(target)}: {problem}")
        return False
    write_whole(done, json.dumps({"time": time.time(), "kind": event.kind, "to": masked(target)}) + "\n")
    say(f"alert {event.kind} sent to {masked(target)}")
    return True


def _claim(folder: Path, name: str) -> bool:
    """Whether this process is the one to send it now."""
    folder.mkdir(exist_ok=True)
    for number in range(1, TRIES + 1):
        path = folder / f"{name}.{number}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - path.stat().st_mtime) < CLAIM_S:
                    return False
    return False


def send(event: Event, target: str, run: RunDir, deadline_s: float = SEND_S) -> str:
    """Send one message to one target. Returns what is wrong, in plain words without the target; empty if it is sent."""
    if not is_url(target):
        return _run_command(event, target, run, deadline_s)
    said: list[str] = []
    # In a thread: a server may accept the connection, and never answer.
    thread = threading.Thread(target=lambda: said.append(_notify(event, target)), name="alert", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return said[0] if said else f"no answer within {deadline_s:.0f} s"


def _notify(event: Event, target: str) -> str:
    try:
        apprise = importlib.import_module("apprise")
    except ImportError:
        return "apprise is not installed here: pip install apprise"
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its words hold the secret
    try:
        sender = apprise.Apprise()
        kind = {"finished": "success", "requeued": "info"}.get(event.kind, "warning")
        if not sender.add(target):
            return "no URL that apprise can send to"
        return "" if sender.notify(event.text, event.title, kind, body_format="text") else "refused, or out of reach"
    except Exception as error:  # of any of its hundred services
        return f"{type(error).__name__}"


def _run_command(event: Event, line: str, run: RunDir, deadline_s: float) -> str:
    """Run a command with the text on its stdin, in a session of its own."""
    # Kills it if this process is killed before it can.
    limit = ["timeout", "-s", "KILL", f"{deadline_s + 1:g}"] if shutil.which("timeout") else []
    about = {"LASTSTEP_ALERT": event.kind, "LASTSTEP_ALERT_TITLE": event.title, "LASTSTEP_RUN": str(run.path)}
    try:
        process = subprocess.Popen(
            [*limit, "/bin/sh", "-c", line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **about},
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or str(error)
    try:
        process.communicate(f"{event.title}\n\n{event.text}\n", timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the command has not ended within {deadline_s:.0f} s"
    except OSError:  # it did not read its stdin
        process.wait()
    return "" if process.returncode == 0 else f"the command ended with {process.returncode}"
