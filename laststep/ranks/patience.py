"""Patience: tries again what a disk refuses. An error that passes says nothing about what is there.

A network file system answers with ESTALE, EIO or ENOSPC while a server fails over, a quota is raised or a mount comes
back. So what an attempt needs to begin and to end is tried until it succeeds or the patience ends. Each such work must
leave the same behind however often it is done, also after it was done and reported as failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

POLL_S = 0.5

LASTING = (FileExistsError, IsADirectoryError, NotADirectoryError)  # errors that do not pass

T = TypeVar("T")


class Patience:
    """Time in which a disk may come back. All looks share it, so that they do not add up.

    Calls `warn` with each error that it waits for, once.
    """

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError,)  # the errors that may pass

    def __init__(self, seconds: float, warn: Callable[[str], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._warn = warn
        self._said: set[str] = set()

    def insist(self, work: Callable[[], T], before_again: Callable[[], object] = lambda: None) -> T:
        """What `work` returns. While it raises an error that may pass and there is time left, do it again."""
        while True:
            try:
                return work()
            except self.passing as error:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0 or isinstance(error, LASTING):
                    raise
                if str(error) not in self._said:
                    self._said.add(str(error))
                    self._warn(f"{error}; looking again for {left_s:.0f} s")
            time.sleep(min(POLL_S, left_s))
            before_again()


NO_PATIENCE = Patience(0.0, lambda text: None)
