"""The file with the results: JSON lines, written as the results come, so that an interrupted check leaves those it had.

{"machine": {...}}                      what the check ran on, and what was asked for
{"test": ..., "part": ..., ...}         each test: passed, failed or skipped, its seconds, and why
{"part": ..., "result": ..., ...}       each part, after its tests: the same, or "left out"
{"end": {...}}                          the number of parts by result; missing if the check was killed
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

Result = Literal["passed", "failed", "skipped", "left out"]
RESULTS: tuple[Result, ...] = ("passed", "failed", "skipped", "left out")
TESTS = "LASTSTEP_GPU_TESTS"  # the file to which pytest adds a line for each test, see tests/gpu/conftest.py
TAIL = 6_000  # characters of a failure


class Report:
    """The file, and the results so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Result] = {}  # by part
        self._file = path.open("x")  # never the file of an earlier check

    def machine(self, facts: dict[str, Any]) -> None:
        """Write down what the check runs on."""
        self._write({"machine": facts})

    def tests(self, part: str, file: Path) -> list[dict[str, Any]]:
        """Write down, and return, the results of a part's tests, which pytest has left in a file."""
        found = []
        for line in file.read_text().splitlines() if file.exists() else []:
            with contextlib.suppress(ValueError):  # half a line: pytest was killed
                found.append(json.loads(line))
                self._write({"part": part, **found[-1]})
        return found

    def part(self, name: str, result: Result, seconds: float = 0.0, **more: Any) -> None:
        """Write down the result of a part. A part that was left out has no other result."""
        self.results[name] = result
        said = {key: value for key, value in more.items() if value}
        self._write({"part": name, "result": result, "seconds": round(seconds, 1), **said})

    def end(self, why: str) -> None:
        """Close the file, with the reason for the end."""
        self._write({"end": {"why": why, "time": time.strftime("%F %T"), **Counter(self.results.values())}})
        self._file.close()

    def names(self, result: Result) -> list[str]:
        """The parts with this result, in order."""
        return [name for name, found in self.results.items() if found == result]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
