"""The attempt's seal: an HMAC on every message between the ranks, so that no other program can steer the run.

Anybody who reaches rank 0's port can read and write torch's key-value store. So rank 0 draws a secret for the attempt
and leaves it in the run folder, readable by its user alone, until all ranks have read it. Every value that the ranks
leave in the store, and every file in which the survivors of a fault agree, carries an HMAC-SHA256 of its key and its
text under that secret. A value without it counts as absent, and the log says so once.

A message is valid only under the key that it was written for (which names the rank, and the number of the save or
barrier) and only in this attempt. An earlier value of the same key stays valid. Only heartbeats change, and the
watchdog ignores one that is older than the last.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainer.say import say

SECRET_BYTES = 32
POLL_S = 0.1  # between two looks at a key that holds a value without the seal


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
                "silently: another program reaches this run; see docs/security.md"
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
    def load(cls, file: Path, fingerprint: str, timeout: timedelta) -> Seal | None:
        """The seal that another rank has saved, as soon as this host sees it; None if it does not in time.

        A file with another fingerprint was left by a killed attempt.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            with suppress(FileNotFoundError):
                found = cls(file.read_bytes())
                if found.fingerprint == fingerprint:
                    return found
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S / 2)

    def _mac(self, key: str, text: bytes) -> bytes:
        message = f"{len(key)} {key} ".encode() + text  # the same for no other key and text
        return hmac.digest(self._secret, message, "sha256").hex().encode()


class SealedStore:
    """A connection to the store in which every value carries the seal; a value without it counts as absent.

    Its methods are those of torch's Store, so that a caller need not know which of the two it has. There is no `add`: a
    counter cannot carry a seal.
    """

    def __init__(self, store: dist.Store, seal: Seal, prefix: str = "") -> None:
        self._store, self._seal, self._prefix = store, seal, prefix

    def clone(self) -> SealedStore:
        """A connection for another thread, since each serves one caller at a time."""
        return SealedStore(self._store.clone(), self._seal, self._prefix)

    def with_prefix(self, prefix: str) -> SealedStore:
        """The same connection, with `prefix` before every key."""
        return SealedStore(self._store, self._seal, f"{self._prefix}{prefix}/")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `multi_get` wait."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        key = self._prefix + key
        self._store.set(key, self._seal.seal(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises torch.distributed.DistError when there is none in time."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys. Raises torch.distributed.DistError when one is missing in time."""
        return self._wait(keys, self._store.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys have values. Raises torch.distributed.DistError when one is missing in time."""
        self._store.wait([self._prefix + key for key in keys], timeout)
        self._wait(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._store.check([self._prefix + key for key in keys]) and None not in self._read(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Store a value unless there is one; returns the value that is there now. `expected_value` must be empty."""
        assert not expected_value, "only the first value counts"
        key = self._prefix + key
        expected, desired = b"", self._seal.seal(key, desired_value)
        while (text := self._seal.open(key, found := self._store.compare_set(key, expected, desired))) is None:
            # It has no seal: replace it. The store returns what was expected where there is nothing (any more).
            expected = b"" if found == expected else found
        return text.encode()

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._store.delete_key(self._prefix + key))

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            texts = self._read(keys)
            values = [text.encode() for text in texts if text is not None]
            if len(values) == len(keys):
                return values
            if time.monotonic() > deadline:
                missing = ", ".join(key for key, text in zip(keys, texts) if text is None)
                raise dist.DistStoreError(f"no signed message within {timeout.total_seconds():g} s, keys: {missing}")
            time.sleep(POLL_S)

    def _read(self, keys: Sequence[str]) -> list[str | None]:
        """The texts of all keys, as soon as each has a value; None for a value without the seal."""
        keys = [self._prefix + key for key in keys]
        return [self._seal.open(key, value) for key, value in zip(keys, self._store.multi_get(keys))]


def with_prefix(prefix: str, store: dist.Store) -> dist.Store:
    """The store, sealed or not, with `prefix` before every key."""
    return store.with_prefix(prefix) if isinstance(store, SealedStore) else dist.PrefixStore(prefix, store)
