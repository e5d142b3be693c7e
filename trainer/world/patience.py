"""Patience: insists on what a disk refuses, for some seconds. An error that passes says nothing about what is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

POLL_S = 0.5

T = TypeVar("T")


class Patience:
    """Time in which a disk may come back. All looks share it, so that they do not add up.

    Calls `warn` with each error that it waits for, once.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)  # that may pass

    def __init__(self, seconds: float, warn: Callable[[str], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._warn = warn
        self._said: set[str] = set()

    def insist(self, look: Callable[[], T], before_again: Callable[[], object] = lambda: None) -> T:
        """What `look` returns. While it raises one of the `errors` and there is time left, look again."""
        while True:
            try:
                return look()
            except self.errors as error:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if str(error) not in self._said:
                    self._said.add(str(error))
                    self._warn(f"{error}; looking again for {left_s:.0f} s")
            time.sleep(min(POLL_S, left_s))
            before_again()
