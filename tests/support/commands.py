"""The command as a user types it: in this process, in one of its own, in a terminal, or into a shell line by line.
And a fake Slurm that takes its jobs."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest

from laststep.cli.main import main
from laststep.config.schema import Launch
from laststep.job.after_ranks import AfterRanks
from laststep.ranks.world import World
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.runs.queue import SEPARATOR
from tests.support.forked import forked_python, process_of
from tests.support.project import DEADLINE_S, PROJECT, wait_until

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
    """The relative paths of everything under a folder, sorted; without the configs/ of the fixture `here`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path != folder / "configs")


def launch(*words: str, stdin: str = "", python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run `python launch.py WORDS` in the current folder."""
    return subprocess.run(
        [python, str(PROJECT / "launch.py"), *words],
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


def types(
    folder: Path,
    *command: str,
    env: Mapping[str, str] | None = None,
    status: int = 0,
    python: str = sys.executable,
) -> str:
    """What a command in `folder` says to its end, with its errors. `python` is started wherever it names Python."""
    words = [python if word == sys.executable else word for word in command]
    return "".join(end(begin(folder, words, env), status))


# Steps of 80 ms that take hardly any CPU time: each of their samples is read from a slow disk.
SLOW_STEPS = (
    "task=tests.support.tasks.Unhurried", "data.name=fake", "data.args.samples=400", "data.args.image_size=8",
    "train.batch_size=4",
)  # fmt: skip
LONG = (*SLOW_STEPS, "train.epochs=1000")


class Terminal:
    """A terminal in the project's folder, with a folder of its own for runs.

    `python` starts the command, which starts its ranks alike: by default forked processes, see tests/support/forked.
    """

    def __init__(self, root: Path, python: str | None = None, **env: str) -> None:
        self.root = root
        self.python = python or forked_python()
        self.env = {**os.environ, **env}

    def starts(self, *words: str) -> subprocess.Popen[str]:
        """Start `python launch.py WORDS`."""
        command = [self.python, "launch.py", *words, f"launch.root={self.root}"]
        return subprocess.Popen(
            command, cwd=PROJECT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def types(self, *words: str, status: int = 0) -> str:
        """Run the same to its end; return what it printed. Any other exit status fails the test."""
        process = self.starts(*words)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == status, said
        return said

    def run(self, name: str) -> RunDir:
        """The folder of the run with this name."""
        return RunDir(self.root / name)

    def waits_for_step(self, name: str) -> None:
        """Wait until the run has finished its first steps."""
        wait_until(lambda: read_lines(self.run(name).metrics), f"{name} did not begin to train")


class Screen:
    """A terminal's screen, on which a command redraws itself in place, and its keyboard."""

    HOME, BACK = "\x1b[H", "\x1b[?1049l"  # codes: the cursor goes to the upper left; the screen of before is back

    def __init__(self, command: list[str], columns: int, lines: int, env: dict[str, str]) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            os.execvpe(command[0], command, {**env, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)})
        ioctl(self._terminal, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._printed = ""

    def shows(self, text: str) -> list[str]:
        """The lines of the screen, once it is drawn with this text. Ends the command if that does not appear."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in (drawn := self._printed.rpartition(self.HOME)[2]):
            if time.monotonic() > deadline or not self._read():
                os.close(self._terminal)  # which ends it
                raise AssertionError(f"{text!r} was not shown:\n{drawn}")
        return plain(drawn)

    def presses(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def left(self) -> tuple[list[str], int]:
        """The lines that the command leaves on the terminal at its end, and its exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                raise AssertionError(f"the command did not end; it last drew:\n{self._printed[-2000:]}")
        os.close(self._terminal)
        _, status = os.waitpid(self._pid, 0)
        return plain(self._printed.rpartition(self.BACK)[2]), os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Wait for more output; False when there will be none."""
        assert select.select([self._terminal], [], [], DEADLINE_S)[0], f"no more output after:\n{self._printed}"
        try:
            more = os.read(self._terminal, 65536)
        except OSError:  # EIO: the command has ended
            return False
        self._printed += more.decode(errors="replace")
        return bool(more)


def plain(text: str) -> list[str]:
    """The lines of what a terminal has received, without its codes and the spaces at the ends."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).strip().splitlines()]


def ranks_of(launcher: subprocess.Popen[str] | subprocess.Popen[bytes]) -> list[int]:
    """Pids of the ranks that are up, which the supervisors of this launcher have forked, rank 0 first."""
    return [rank for supervisor in children(_python(launcher.pid)) for rank in children(_python(supervisor))]


def _python(pid: int) -> int:
    """The process that this one stands for, if it is a client of a stand-in for Python, else itself."""
    try:
        return process_of(pid, os.readlink(f"/proc/{pid}/exe"))
    except (OSError, ValueError):  # it has just ended, or its process is just being made
        return pid


def children(pid: int) -> list[int]:
    """The children of a process, the oldest first."""
    try:
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


PROMPT = re.compile(r"<exit (\d+)> $")
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
CTRL_C = b"\x03"


class Shell:
    """A fresh bash in a terminal of 140 columns: it reads no startup file and has no variables but `env`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        pid, self._terminal = pty.fork()
        if not pid:
            os.chdir(folder)
            quiet = {"PS1": "<exit $?> ", "HISTFILE": "/dev/null", "TERM": "xterm", "COLUMNS": "140"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], {**env, **quiet})
        self._pid = pid
        self._said = ""
        self._wait_for(PROMPT)

    def types(self, line: str, interrupt_at: str | None = None) -> tuple[str, int]:
        """Type a line; returns what it printed, without colours, and its exit status. Once it has printed a match of
        `interrupt_at`, Ctrl-C is typed."""
        self._said = ""
        os.write(self._terminal, f"{line}\n".encode())
        if interrupt_at:
            self._wait_for(re.compile(interrupt_at, re.DOTALL))
            os.write(self._terminal, CTRL_C)
        status = self._wait_for(PROMPT)[1]
        return PROMPT.sub("", self._said), int(status)

    def close(self) -> None:
        """End the shell, and with it the terminal: what still runs in the foreground gets SIGHUP."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def _wait_for(self, text: re.Pattern[str]) -> re.Match[str]:
        """Read until the output since the last line typed has this text; the test fails at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := text.search(self._said)):
            ready, _, _ = select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text.pattern!r} within {DEADLINE_S:.0f} s:\n{self._said}"
            chunk = os.read(self._terminal, 65536).decode(errors="replace").replace("\r\n", "\n")
            self._said = COLOURS.sub("", self._said + chunk)
        return found


class FakeSlurm:
    """Answers scontrol, scancel and srun as a cluster with one job would. Its `answer` replaces subprocess.run."""

    def __init__(self, *nodes: str) -> None:
        self.job: dict[str, Any] | None = {"JobState": "RUNNING", "Restarts": 0}  # None: slurmctld is away
        self.states = dict.fromkeys(nodes, "MIXED")  # of the job's nodes
        self.silent: set[str] = set()  # nodes that are dead, which Slurm does not know yet
        self.partition_nodes = 5
        self.refuses = self.missing = False  # orders; every command
        self.lies = False  # it carries out an order, and reports an error
        self.busy: list[str] = []  # orders that time out, as `scontrol requeue` does; it still shows the job
        self.carries_out = False  # an order that times out is carried out
        self.away_for = 0  # how often an order, or the question that follows it, finds slurmctld away
        self.requeues = 0
        self._asked = False
        self.cancelled: list[str] = []
        self.updated: list[tuple[str, ...]] = []

    @property
    def excluded(self) -> list[str]:
        """The nodes that the job was kept from, by each update."""
        return [word.partition("=")[2] for words in self.updated for word in words if word.startswith("ExcNodeList=")]

    def answer(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """What a command prints, and its exit status. Any other program prints nothing."""
        if words[0] not in ("scontrol", "scancel", "srun"):
            return _done(words)
        if self.missing:
            raise FileNotFoundError(words[0])
        if self.job is None:
            return _failed(words, "Unable to contact slurm controller (connect failure)")
        if self.away_for and (words[1] == "requeue" or self._asked):
            self._asked = words[1] == "requeue"
            self.away_for -= 1
            return _failed(words, "Unable to contact slurm controller (connect failure)")
        if words[1] == "--version":
            return _done(words, "slurm 22.05.8")
        if words[1] in self.busy:
            self.busy.remove(words[1])
            if self.carries_out:
                self.requeues += 1
                self.job["JobState"] = "PENDING"
            return _failed(words, f"{words[-1]}: Socket timed out on send/recv operation\n")
        if words[0] == "srun":
            (node,) = (word.partition("=")[2] for word in words if word.startswith("--nodelist="))
            return _failed(words, "") if node in self.silent else _done(words)
        if words[0] == "scancel":
            self.cancelled.append(words[1])
            return _done(words)
        if words[1] == "update":
            self.updated.append(tuple(words[2:]))
            if not self.refuses:
                self.job |= {key: value for key, _, value in (word.partition("=") for word in words[3:])}
        elif words[1] == "requeue":
            self.requeues += not self.refuses
        else:
            return _done(words, self._shown(words[2:]))
        if self.lies and words[1] == "requeue":
            self.job["Restarts"] = 1
        return _failed(words, "Operation disabled\n") if self.refuses or self.lies else _done(words)

    def _shown(self, words: list[str]) -> str:
        assert self.job is not None
        if words[0] == "job":
            shown = {"NodeList": ",".join(self.states), **self.job}
            return (" " if "--oneliner" in words else "\n   ").join(f"{key}={value}" for key, value in shown.items())
        if words[0] == "node":
            return "\n".join(f"NodeName={node} State={state}" for node, state in self.states.items())
        if words[0] == "hostnames":
            return "\n".join(words[1].split(","))
        return f"PartitionName=main Default=YES TotalNodes={self.partition_nodes}"


def _done(words: list[str], out: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, 0, out and f"{out}\n", "")


def _failed(words: list[str], error: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, 1, "", error)


def after_ranks(run: RunDir, world: World, launch: Launch, status: int, *words: Any, **more: Any) -> bool:
    """What the batch shell of a job does once srun has ended with this status; whether it starts the ranks again."""
    return AfterRanks(run, world, launch).act(status, *words, **more)
