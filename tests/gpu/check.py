"""The check: runs the parts one after another, each in a process of its own, until the time is used up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.parts import Part
from tests.gpu.report import TAIL, TESTS, Report, Result

PROJECT = Path(__file__).resolve().parents[2]
DRIVER_S = 300.0  # a driver that has not answered by then hangs
STACKS_S = 10.0  # for a process that hangs to print its stacks
GIGABYTES = "2"  # of the states that benchmarks save: little enough for any GPU and disk
# Names of variables that tell a process its place in a job. The tests start jobs of their own, also in an allocation.
PLACES = (
    *("SLURM", "SUBMITIT_", "LASTSTEP_", "PMI", "OMPI_", "TORCHELASTIC_", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_"),
    "PYTEST_",
)


class NoMachine(Exception):
    """The GPUs cannot be used; one line says why."""


class Outcome(NamedTuple):
    """How a part ended."""

    result: Result
    seconds: float = 0.0
    why: str = ""
    more: dict[str, Any] = {}  # noqa: RUF012  for the report


class Check:
    """Runs parts on one kind of device, cuda or cpu, and stops at a SIGINT or SIGTERM."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.stopped: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.machine: dict[str, Any] = {}

    def stop(self, number: int, _: object = None) -> None:
        """The handler of a signal: end what runs now, and start nothing more."""
        self.stopped = self.stopped or signal.Signals(number)
        self._kill()

    def read_machine(self) -> None:
        """Find out what this machine has. Raises NoMachine."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            status = self._python(["-m", "tests.gpu.machine"], {}, output, DRIVER_S)
            output.seek(0)
            said = output.read()
        if self.stopped:
            return
        if status is None:
            raise NoMachine(f"the GPU driver has not answered within {DRIVER_S:.0f} s")
        if status:
            raise NoMachine(f"torch cannot use this machine: {last_line(said)}")
        self.machine = json.loads(last_line(said))
        if self.device == "cpu":
            self.machine["gpus"] = []
        elif not self.machine["gpus"]:
            raise NoMachine("torch finds no GPU on this machine")

    def run(self, parts: Sequence[Part], report: Report, deadline: float) -> str:
        """Run the parts until `deadline`, by time.monotonic(). Returns why it ended; parts that did not start are left
        out in the report."""
        end = ""
        for place, part in enumerate(parts, 1):
            if not end and self.stopped:
                end = f"stopped by {self.stopped.name}"
            if not end and time.monotonic() >= deadline:
                end = "the time was used up"
            if end:
                report.part(part.name, "left out", why=end)
                continue
            print(f"[{place}/{len(parts)}] {part.name}: {part.shows}", flush=True)
            done = self._run(part, report)
            if self.stopped and done.result == "failed":
                done = done._replace(result="left out", why=f"stopped by {self.stopped.name}")
            report.part(part.name, done.result, done.seconds, why=done.why, **done.more)
            said = f": {last_line(done.why)}" if done.why else ""
            print(f"    {done.result}, {done.seconds:.0f} s{said}", flush=True)
        return end or (f"stopped by {self.stopped.name}" if self.stopped else "finished")

    def _run(self, part: Part, report: Report) -> Outcome:
        """Run one part."""
        if lack := self._lack(part):
            return Outcome("skipped", why=lack)
        began, before = time.monotonic(), _figures(part.benchmark)
        files = tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True)
        with files as folder, open(Path(folder, "output"), "w+", errors="replace") as output:
            tests = Path(folder, "tests.jsonl")
            words = ["-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *part.files]
            if part.benchmark:
                words = ["-m", "benchmarks.gpu", part.benchmark, "--gigabytes", GIGABYTES]
            status = self._python(words, {TESTS: str(tests), "TMPDIR": folder}, output, part.limit_s)
            output.seek(0)
            said = output.read()[-TAIL:]
            found = report.tests(part.name, tests)
        seconds = time.monotonic() - began
        count = {name: sum(test["result"] == name for test in found) for name in ("passed", "failed", "skipped")}
        more: dict[str, Any] = {"tests": count} if found else {}
        if (figures := _figures(part.benchmark)) != before:
            more["figures"] = figures
        if status is None:
            return Outcome("failed", seconds, f"{said}\nno end within {part.limit_s:.0f} s", more)
        if status or count["failed"]:
            return Outcome("failed", seconds, said, more)
        if found and not count["passed"]:
            return Outcome("skipped", seconds, "; ".join(sorted({test["why"] for test in found})), more)
        return Outcome("passed", seconds, more=more)

    def _lack(self, part: Part) -> str | None:
        """Why a part cannot run here; None if it can."""
        if self.device == "cpu":
            return None if part.on_cpus else "needs a GPU"
        gpus = self.machine["gpus"]
        if len(gpus) < part.gpus:
            return f"needs {part.gpus} GPUs"
        if gpus[0]["gib"] < part.gib:
            return f"needs a GPU with {part.gib:.0f} GiB"
        return f"needs {self.machine['compile lacks']}" if part.compiles and self.machine["compile lacks"] else None

    def _python(self, words: Sequence[str], env: dict[str, str], output: Any, limit_s: float) -> int | None:
        """Run Python with these words and return its exit status; None if it does not end in time, and then pytest has
        printed the stacks of its threads. Whatever it has started ends with it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PLACES)}
        fixed = {"LASTSTEP_GPU_CHECK": self.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd=PROJECT,
            env={**kept, **fixed, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if self.stopped:  # a moment ago, when there was nothing to kill
                self._kill()
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
            return None
        finally:
            self._kill()
            process.wait()
            self._process = None

    def _kill(self) -> None:
        """Kill the process that runs now, with all in its session."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """The last line of a text that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _figures(benchmark: str) -> Any:
    """What a benchmark has measured on a GPU, now or earlier; None if it has not."""
    with contextlib.suppress(OSError, ValueError):  # none, or half a file
        results = json.loads((PROJECT / "benchmarks/results/gpu.json").read_text())["gpu"]
        return results.get(benchmark) if isinstance(results, dict) else None
    return None
