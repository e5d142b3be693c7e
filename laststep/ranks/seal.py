"""The attempt's seal: an HMAC on every message between the ranks, so that no other program can steer the run.

Anybody who reaches rank 0's port can read and write torch's key-value store. So rank 0 draws a secret for the attempt
and leaves it in the run folder, readable by its user alone, until all ranks have read it. Every value in the store, and
every file in which the survivors of a fault agree, carries an HMAC-SHA256 of its key and its text under that secret. A
value without it counts as absent, and the log says so once.

A message is valid only under its key, which names the rank and the number of the save or barrier, and in its attempt.
An earlier value of the same key stays valid; only heartbeats change, and the watchdog ignores one older than the last.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from datetime import timedelta
from pathlib import Path

from laststep.ranks.disk import FreshView
from laststep.ranks.process import run_time
from laststep.say import say

SECRET_BYTES = 32
POLL_S = 0.05  # between two looks for the file with the secret


class Seal:
    """Marks a message as one of this attempt's ranks, and recognises that mark."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._unsaid = threading.Lock()  # taken for good by the one who reports a message without the seal

    @property
    def fingerprint(self) -> str:
        """A hash of the secret, which may be public."""
        return hashlib.sha256(self._secret).hexdigest()

    def seal(self, key: str, text: str) -> bytes:
        """The message to store under `key`."""
        return self._mac(key, text.encode()) + b" " + text.encode()

    def open(self, key: str, data: bytes) -> str | None:
        """The text of the message found under `key`; None if it does not carry the seal."""
        mac, _, text = data.partition(b" ")
        if hmac.compare_digest(mac, self._mac(key, text)):
            return text.decode()
        if self._unsaid.acquire(blocking=False):
            say(
                f"WARNING: ignored a message that no rank of this attempt has signed ({key}), and will ignore others "
                "silently: another program reaches this run"
            )
        return None

    def save(self, file: Path) -> None:
        """Write the secret into a new file that replaces `file`, and that nobody else may read."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(self._secret)
        temporary.replace(file)

    @classmethod
    def load(cls, file: Path, fingerprint: str, timeout: timedelta, ranks: int = 1) -> Seal | None:
        """The seal that another rank has saved, as soon as this host sees it; None if it does not in time. A file with
        another fingerprint was left by a killed attempt. `ranks`: how many may wait for the file. Raises OSError if the
        disk still refuses then."""
        deadline, view = run_time() + timeout.total_seconds(), FreshView(ranks, file.parent)
        while True:
            view.refresh()
            failure: OSError | None = None
            try:
                found = cls(file.read_bytes())
                if found.fingerprint == fingerprint:
                    return found
            except FileNotFoundError:
                pass
            except OSError as error:  # which may pass
                failure = error
            if run_time() > deadline:
                if failure is not None:
                    raise failure
                return None
            time.sleep(POLL_S)

    def _mac(self, key: str, text: bytes) -> bytes:
        message = f"{len(key)} {key} ".encode() + text  # the same for no other key and text
        return hmac.digest(self._secret, message, "sha256").hex().encode()
