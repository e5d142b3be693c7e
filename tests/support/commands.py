"""The command as a user types it, in this process or in one of its own; and a fake Slurm that takes its jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.runs.queue import SEPARATOR
from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S

NO_SLURM = "/nonexistent"

# A fake Slurm, up to the call of sbatch; tests/slurm/ tests what a real one does.
FAKE_SBATCH = """#!/bin/sh
cp "$1" "$(dirname "$0")/submitted.sh"
echo "Submitted batch job 4711"
"""
REFUSING_SBATCH = """#!/bin/sh
echo "sbatch: error: invalid partition specified: nope" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
exit 1
"""


def fake_squeue(*job_ids: str, **waiting: str) -> str:
    """A squeue that shows these jobs as running, and those `waiting` with their reasons (_7="Priority"): all submitted
    long ago, in the fields of laststep.runs.queue."""
    jobs = [(job_id, "RUNNING", "None") for job_id in job_ids]
    jobs += [(name.removeprefix("_"), "PENDING", reason) for name, reason in waiting.items()]
    long_ago, owner = "2000-01-01T00:00:00", str(os.getuid())
    lines = (
        SEPARATOR.join((job_id, state, "N/A", long_ago, owner, "name", "(null)", why)) for job_id, state, why in jobs
    )
    return "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines)


def files(folder: Path) -> list[str]:
    """The relative paths of everything under a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def launch(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python launch.py WORDS` in the current folder."""
    return subprocess.run(
        [sys.executable, str(PROJECT / "launch.py"), *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def refusal(words: list[str], capfd: pytest.CaptureFixture[str], folder: Path) -> str:
    """The error that a wrong command prints: one line and nothing else, exit status 2, and no file left behind."""
    before = files(folder)
    status = main(words)
    out, err = capfd.readouterr()
    assert status == 2
    assert out == ""
    assert re.fullmatch(r"error: .+\n", err), err
    assert files(folder) == before
    return err.removeprefix("error: ").strip()


def begin(folder: Path, command: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in `folder`, as on a machine without GPUs."""
    alone = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, cwd=folder, env={**alone, **(env or {})}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    """What the process printed on stdout and stderr, at its end. Any other exit status fails the test."""
    said, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, said + errors
    return said, errors
