"""SealedStore: the key-value store of an attempt, in which every value carries its seal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from laststep.ranks.run_time import run_time
from laststep.ranks.seal import Seal

POLL_S = 0.1  # between two looks at a key that holds a value without the seal
SLACK_S = 0.5  # by which a timeout may come early


class SealedStore:
    """A connection to the store in which every value carries the seal; a value without it counts as absent.

    Its methods are those of torch's Store, so that a caller need not know which of the two it has. There is no `add`: a
    counter cannot carry a seal. A timeout counts only the time in which this process could run: torch measures it by a
    clock, which moves on while the process is suspended, so what timed out early is waited for again.
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
        deadline, names = run_time() + timeout.total_seconds(), [self._prefix + key for key in keys]
        while True:
            try:
                self._store.wait(names, timedelta(seconds=max(0.0, deadline - run_time())))
                break
            except dist.DistStoreError:
                if run_time() > deadline - SLACK_S:
                    raise
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
        deadline = run_time() + timeout.total_seconds()
        while True:
            try:
                texts = self._read(keys)
            except dist.DistStoreError:
                if run_time() > deadline - SLACK_S:
                    raise
                continue
            values = [text.encode() for text in texts if text is not None]
            if len(values) == len(keys):
                return values
            if run_time() > deadline:
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
