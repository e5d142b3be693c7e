"""A few dozen of the faults of `make chaos IO=1`, several in one run; and that the disk does what it is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.needs import require_program
from tests.support.project import DEADLINE_S
from tests.worst_day.disk import ACTIONS, FOLDER, ROLE, ROLES, Call, Disk, Fault, library
from tests.worst_day.plan import ERRORS, faults_of, make_plan
from tests.worst_day.scenario import USUAL, Victim, expected

WRITING = "victim/checkpoints/.writing-step_#-X"
MEETING = "victim/meeting/local-#-#-#-#-#"
EIO, ESTALE, ENOSPC, EROFS, ENOENT = errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.ENOENT


@pytest.fixture(autouse=True)
def _needs() -> None:
    require_program("cc", "apt-get install gcc libc6-dev")


def hit(process: str, name: str, pattern: str, error: int = 0, action: str = "fails", number: int = 1) -> Fault:
    """A fault of a process such as "rank 0 #2", the second process that was rank 0."""
    role, _, serial = process.partition(" #")
    return Fault(Call(ROLES.index(role), int(serial) - 1, name, pattern), number, action, error)


LOCAL = [
    # It begins.
    hit("command #1", "open", "victim/logs/local-#-#-#_#_log.out", EIO),
    hit("rank 0 #1", "create", "victim/attempt.json.X.tmp", ENOSPC),
    hit("rank 0 #1", "rename", "victim/attempt.json", EIO, "done, but fails"),
    hit("rank 0 #1", "write", f"{MEETING}.key.X", ENOSPC),
    hit("rank 0 #1", "rename", f"{MEETING}.json", EIO, "done, but fails"),
    hit("rank 1 #1", "read", f"{MEETING}.key", ESTALE),
    hit("rank 0 #1", "unlink", f"{MEETING}.key", EROFS),
    hit("rank 0 #1", "fsync", "victim/metrics.jsonl.X.tmp", EIO),
    # Rank 1 dies; rank 0 saves the step and records the end.
    hit("rank 0 #1", "write", f"{WRITING}/shard_#-part_#-of-#-by-#.bin", ENOSPC),
    hit("rank 0 #1", "rename", f"{WRITING}/shard_#-of-#.bin", EROFS),
    hit("rank 0 #1", "write", f"{WRITING}/manifest.json", action="is short"),
    hit("rank 0 #1", "rename", "victim/attempt.ended.json", EIO, "done, but fails"),
    hit("rank 0 #1", "rename", "victim/attempts.jsonl", ESTALE),
    # The ranks start again in place.
    hit("rank 0 #2", "read", "victim/attempts.jsonl", EIO),
    hit("rank 0 #2", "list", "victim/rescue", EIO),
    hit("rank 0 #2", "list", "victim/checkpoints", action="is old", number=2),
    hit("rank 1 #2", "read", "victim/checkpoints/step_#/shard_#-of-#.bin", ESTALE),
    # SIGTERM stops them.
    hit("rank 0 #2", "unlink", "victim/attempt.ended.json", EIO),
    # `resume` continues the run, which finishes.
    hit("rank 0 #3", "stat", "victim/config.yaml", ESTALE),
    hit("rank 0 #3", "stat", "victim/checkpoints/step_#/structure.pt", ENOENT),  # the client remembers that
    hit("rank 1 #3", "open", "victim/submissions.jsonl", ESTALE),
    hit("rank 0 #3", "link", f"{WRITING}/shard_#-of-#.bin", EIO, "done, but fails"),  # to frozen weights
    hit("rank 0 #3", "create", "victim/attempts.jsonl.X.tmp", ENOSPC),
]
JOB = [
    hit("rank 0 #1", "stat", "", ESTALE),  # the folder of all runs, before this one's is made
    hit("rank 0 #1", "mkdir", "victim/logs", EIO, "done, but fails"),
    hit("rank 0 #1", "rename", "victim/attempt.json", ESTALE),
    hit("rank 0 #2", "open", "victim/config.yaml", ESTALE),
    hit("rank 0 #2", "open", "victim/attempts.jsonl", EIO),
    hit("rank 0 #2", "rename", "victim/metrics.jsonl", ENOSPC),
    hit("rank 0 #3", "open", "victim/submissions.jsonl", EIO),
    hit("rank 0 #3", "list", "victim/checkpoints", ESTALE),
    hit("rank 0 #3", "read", "victim/checkpoints/step_#/manifest.json", action="is short"),
    hit("rank 0 #3", "write", "victim/attempts.jsonl.X.tmp", ENOSPC),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worst-day")


@pytest.mark.parametrize(("scenario", "faults"), [("local", LOCAL), ("job", JOB)])
def test_nothing_is_lost(folder: Path, scenario: str, faults: list[Fault]) -> None:
    """Each of these errors passes within a second, so a user must not notice it: no attempt ends of it, no command has
    to be typed again, no step is done twice, and the bits are those of the undisturbed run. Each once cost an attempt,
    steps, or the run."""
    victim = Victim(folder / scenario, faults)
    outcome = victim.lives(scenario, expected(scenario, folder))
    said = (victim.folder / "said.txt").read_text()
    assert not outcome.wrong, said
    missed = [fault for fault, fired in zip(faults, victim.disk.fired) if not fired]
    if "saved step 3 alone" not in said:  # rank 1 died when that step was saved already: nothing was left to rescue
        missed = [fault for fault in missed if not fault.call.pattern.startswith(WRITING)]
    if "resuming after step 9:" in said:  # the stop came to all ranks late: one save was left, which links nothing yet
        missed = [fault for fault in missed if fault.call.name != "link"]
    gone = ", ".join(map(str, missed))
    assert not missed, f"{gone}: these calls are gone; python -m tests.worst_day traces those that there are\n{said}"
    commands, attempts, redone = USUAL[scenario]
    assert (outcome.commands, len(outcome.reasons)) == (commands, attempts) and outcome.redone <= redone, said


# The disk itself

PROGRAM = """
import os
def do(number, work):
    try:
        print(number, work())
    except OSError as error:
        print(number, error.errno)
def write(text):
    file = os.open("new", os.O_CREAT | os.O_RDWR)
    try:
        return os.write(file, text)
    finally:
        os.close(file)
"""


OnADisk = Callable[[Fault, str], list[str]]


@pytest.fixture
def on_a_disk(tmp_path: Path) -> OnADisk:
    """Runs a program on such a disk; returns what it printed."""
    root = tmp_path / "root"
    root.mkdir()

    def run(fault: Fault, program: str) -> list[str]:
        disk = Disk(tmp_path / "disk", root, [fault], tracing=True)
        env = {**os.environ, FOLDER: str(disk.folder), ROLE: "2", "LD_PRELOAD": str(library())}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM + program], cwd=root, env=env, capture_output=True, text=True, check=True
        )
        assert min(disk.fired) >= 1 and disk.calls()[fault.call]
        return done.stdout.splitlines()

    return run


def own(name: str, pattern: str, action: str, error: int = 0, number: int = 1) -> Fault:
    return Fault(Call(2, 0, name, pattern), number, action, error, 0.05)


MKDIR = "do(1, lambda: os.mkdir('a')); do(2, lambda: os.path.isdir('a'))"
WRITE = "do(1, lambda: write(b'four')); do(2, lambda: write(b'four'))"
LIST = "write(b''); do(1, lambda: os.listdir('.')); do(2, lambda: os.listdir('.'))"
STAT = "write(b''); do(1, lambda: os.stat('new')); do(2, lambda: os.path.isfile('new'))"


@pytest.mark.parametrize(
    ("fault", "program", "said"),
    [
        (own("mkdir", "a", "fails", EIO), MKDIR, "5 False"),
        (own("mkdir", "a", "done, but fails", EIO), MKDIR, "5 True"),
        (own("write", "new", "is short"), WRITE, "2 4"),
        (own("write", "new", "fails", ENOSPC, 2), WRITE, "4 28"),
        (own("close", "new", "fails", ENOSPC), WRITE, "28 4"),
        (own("list", ".", "is old"), LIST, "[] ['new']"),
        (own("stat", "new", "fails", ENOENT), STAT, "2 True"),
    ],
)
def test_the_disk_does_what_it_is_told(on_a_disk: OnADisk, fault: Fault, program: str, said: str) -> None:
    """If a fault had no effect, or hit every call, the report would praise runs that tested nothing."""
    lines = on_a_disk(fault, program)
    assert " ".join(line.partition(" ")[2] for line in lines) == said


def test_the_whole_disk_fails_for_a_while(on_a_disk: OnADisk) -> None:
    """From one call on everything fails, and later nothing."""
    program = """
import time
do(1, lambda: os.mkdir('a'))
do(2, lambda: os.mkdir('b'))
time.sleep(0.1)
do(3, lambda: os.mkdir('b'))
"""
    root_fails = own("mkdir", "a", "whole disk fails for a while", ESTALE)
    assert on_a_disk(root_fails, program) == [f"1 {ESTALE}", f"2 {ESTALE}", "3 None"]


@pytest.mark.parametrize(
    ("fault", "size"),
    [(own("write", "new", "kills its process"), 2), (own("create", "new", "done, and kills its process"), 0)],
    ids=["in the middle of a write", "after it has made a file"],
)
def test_the_disk_kills(tmp_path: Path, fault: Fault, size: int) -> None:
    """The process ends there, and what it has done stays: else the report would praise runs that lost nothing."""
    root = tmp_path / "root"
    root.mkdir()
    disk = Disk(tmp_path / "disk", root, [fault])
    env = {**os.environ, FOLDER: str(disk.folder), ROLE: "2", "LD_PRELOAD": str(library())}
    done = subprocess.run([sys.executable, "-c", PROGRAM + WRITE], cwd=root, env=env, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL and (root / "new").stat().st_size == size


def test_the_plan_is_even() -> None:
    """Any first N runs hit as many different calls as they can: a short harness must not spend itself on one file."""
    calls = {Call(2, 0, name, f"victim/{name}"): 1 for name in ERRORS}
    plan = make_plan({"local": Counter(calls)}, seed=3)
    assert len({planned.fault.call for planned in plan[: len(calls)]}) == len(calls)
    assert len(plan) == len(set(map(str, plan))) == sum(len(list(faults_of(call, 1))) for call in calls)
    assert {planned.fault.action for planned in plan} == set(ACTIONS) - {"none"}
