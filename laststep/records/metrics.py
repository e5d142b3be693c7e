"""metrics.jsonl: each step and each epoch of a run exactly once, however the run was interrupted."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypedDict, TypeGuard

from laststep.ranks.disk import NO_PATIENCE, Patience
from laststep.records import append_only
from laststep.say import say

TAIL = 4096  # bytes at the end of a file that hold its newest lines
WRITE_EVERY_S = 0.1  # how soon a line is in the file
MOST_REFUSED = 10  # times in a row; then it is no passing failure
CLOSE_S = 2.0
VALIDATED = ("val_", "test_")  # how the names of what a validation has measured begin
DIGEST = "digest"  # the field of a step's line that is no number: see laststep.loops.digest
PLACE = ("epoch", "step", "time", "skipped", DIGEST)  # fields that are not curves; all others are
CLOCK = ("time", "samples_per_s", "tokens_per_s", "mfu")  # fields that another run of the same training has otherwise


class _Step(TypedDict):
    step: int
    time: float  # Unix seconds


class StepLine(_Step, total=False):
    """The line of a step. A custom loop may log more, or less. An epoch's line has `epoch`, `step` and what was
    measured, under the names that the task gives it."""

    epoch: int
    loss: float | None  # None when it is not finite
    samples_per_s: float
    digest: str  # of the state that the step has left, see train.digest_every


class MetricsFile:
    """Appends records. A resumed run first rewinds the file to as many records as its checkpoint remembers.

    Steps done after that checkpoint are lost and done again, so their lines are cut off. Only rank 0 writes. Every
    other rank keeps in memory what it would have written since the newest checkpoint, so that it can replace rank 0
    (`rewrite_tail`).

    The training thread only adds to a list in memory, however slow the disk is. A thread of rank 0 writes what is new
    every `WRITE_EVERY_S`. A save calls `sync` before it is committed, so no line of a checkpoint is ever missing. What
    the log says of a step it says once the step's line is in the file: after SIGKILL of all ranks nothing else shows
    how far they had come.
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path = path
        self.count = 0  # records so far, from the start of the run
        self._writes = writes
        self._checkpointed = 0  # records that the newest checkpoint includes
        self._lines_since: list[bytes] = []  # the lines after these
        self._written = 0  # records in the file
        self._to_say: list[tuple[int, Callable[[], None]]] = []  # each to be said once the file has that many records
        self._refused = 0  # how often in a row the disk has refused the newest lines
        self._file: int | None = None  # its descriptor: see `append_only.replace` for why it stays open
        self._memory = threading.Lock()  # protects the fields above, and is never held while the disk is used
        self._disk = threading.Lock()  # held to write: the writer thread and a save take turns
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def rewind(self, count: int) -> None:
        """Cut off every line after the first `count`, half-written ones too. Raises OSError."""
        if self._writes:
            self._file = append_only.rewind(self.path, count)
        self.count = self._checkpointed = self._written = count
        self._lines_since = []

    def begin(self, count: int, patience: Patience = NO_PATIENCE) -> None:
        """`rewind`, and write in the background from now on. Call it in the process that trains: a fork has no copy of
        the thread. Raises OSError when the disk refuses for longer than the `patience`. A file that is gone by then is
        begun anew."""
        try:
            patience.insist(lambda: self.rewind(count))
        except FileNotFoundError:
            say(f"WARNING: {self.path} is gone, with the lines of {count} records: it begins with the next step")
            self._file = append_only.replace(self.path, 0, b"")
            self.count = self._checkpointed = self._written = count
            self._lines_since = []
        if self._writes:
            self._thread.start()

    def append(self, records: Iterable[Mapping[str, Any]], then: Callable[[], None] | None = None) -> None:
        """Add a line per record, soon also to the file; and `then`, in another thread, call that."""
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        with self._memory:
            self._lines_since += lines
            self.count += len(lines)
            if then is not None and self._writes:
                self._to_say.append((self.count, then))

    def sync(self) -> None:
        """Make every line survive a power cut. Call before a checkpoint is committed. Raises OSError, also if another
        process has replaced the file."""
        with self._disk:
            file = self._write()
            os.fsync(file)
            if not append_only.is_at(self.path, file):
                raise OSError(errno.ESTALE, "another process has replaced this file", str(self.path))
        self._say_written()

    def mark_checkpointed(self, count: int) -> None:
        """A checkpoint that includes the first `count` records is committed: they need not stay in memory."""
        with self._memory:
            self._lines_since = self._lines_since[count - self._checkpointed :]
            self._checkpointed = count

    def rewrite_tail(self) -> None:
        """Write all lines since the newest checkpoint, in place of rank 0, which may have died before it had written
        them, or within one, or be stuck in a write. Nothing is appended any more. Raises OSError."""
        with self._memory:
            kept, tail, count = self._checkpointed, b"".join(self._lines_since), self.count
        file = append_only.replace(self.path, kept, tail)
        with self._memory:
            self._file, self._written = file, count
        self._say_written()

    def close(self) -> None:
        """Write what is left and end the thread; the disk may take `CLOSE_S`."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        """The thread's main loop."""
        closed = False
        while not closed:
            closed = self._closed.wait(WRITE_EVERY_S)
            try:
                with self._disk:
                    self._write()
                self._refused = 0
            except OSError as error:  # what a full disk refuses stays in memory until the next try
                self._refused += 1
                if self._refused == MOST_REFUSED:
                    say(f"WARNING: {self.path}: {error.strerror}: its lines stay in memory until the disk takes them")
            self._say_written()
        with self._disk, self._memory:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self) -> int:
        """Write the lines that are not in the file yet; returns its descriptor. The caller holds `_disk`. Raises
        OSError."""
        if self._file is None:
            self._file = append_only.open_file(self.path)
        with self._memory:
            file, count = self._file, self.count
            lines = self._lines_since[self._written - self._checkpointed :]
        if lines:
            append_only.write(file, b"".join(lines))
            with self._memory:
                self._written = max(self._written, count)
        return file

    def _say_written(self) -> None:
        """Say what is due: of steps in the file; of all where the disk refuses, as the log may be on another."""
        with self._memory:
            until = self.count if self._refused >= MOST_REFUSED else self._written
            due = [then for count, then in self._to_say if count <= until]
            self._to_say = self._to_say[len(due) :]
        for then in due:
            then()


def is_step(line: Mapping[str, Any]) -> TypeGuard[StepLine]:
    """Whether a line is that of a step, not of an epoch."""
    return "time" in line


def curves_in(line: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line by the names of their curves, as TensorBoard and trackers show them: train/loss."""
    names = {name: f"train/{name}" if is_step(line) else _of_epoch(name) for name in line if name not in PLACE}
    return {curve: line[name] for name, curve in names.items()}


def _of_epoch(name: str) -> str:
    if name == "train_loss":
        return "train/epoch_loss"
    return name.replace("_", "/", 1) if name.startswith(VALIDATED) else f"epoch/{name}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. A line that a crash cut short is skipped; a file that does not exist has none."""
    try:
        return [*_records(path.read_text(errors="replace").splitlines())]
    except FileNotFoundError:
        return []


def _records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """What the lines hold, without those that are damaged."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield record


def damaged_lines(path: Path) -> int:
    """How many lines `read_lines` skips: 1 after a crash, more if the file is damaged otherwise."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return len(lines) - len(read_lines(path))


def last_lines(path: Path, size: int = TAIL, without: bytes | None = None) -> list[dict[str, Any]]:
    """The records in the last `size` bytes of a .jsonl file. A long file is read as quickly as a short one.

    Lines that contain `without` are skipped, which is quicker than parsing them.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    # The first may be cut, the last half-written.
    return [*_records(line for line in lines if not (without and without in line))]


def newest_step(path: Path) -> StepLine | None:
    """The line of the last step in metrics.jsonl, None before the first."""
    return next((line for line in reversed(last_lines(path)) if is_step(line)), None)


def steps_from(path: Path, step: int) -> Iterator[StepLine]:
    """The lines of this step and all later ones. A long file is searched by bisection, not read from its beginning."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(place_of(file, step))
        yield from (line for line in parsed(file) if is_step(line) and line["step"] >= step)


def place_of(file: IO[bytes], value: float, key: str = "step") -> int:
    """Where in a .jsonl file in which `key` rises a line begins that comes before all lines with this value or a larger
    one, but for few."""
    low, high = 0, file.seek(0, os.SEEK_END)  # the line begins between these
    while high - low > TAIL:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        if next((line[key] for line in parsed(file, high) if key in line), value) < value:
            low = middle
        else:
            high = middle
    file.seek(low)
    if low:
        file.readline()
    return file.tell()


def parsed(file: IO[bytes], until: float = math.inf) -> Iterator[dict[str, Any]]:
    """The records from here on, of lines that begin before `until`."""
    return _records(iter(lambda: file.readline() if file.tell() < until else b"", b""))


def newest_epoch(path: Path, key: str = "epoch") -> dict[str, Any] | None:
    """The line of the last epoch in metrics.jsonl that has this key, None before the first.

    Reads the file from its end, as far back as needed.
    """
    size = TAIL
    while True:
        for line in reversed(last_lines(path, size, without=b'"time":')):
            if key in line and not is_step(line):
                return line
        if not path.exists() or size >= path.stat().st_size:
            return None
        size *= 8


def metrics_in(line: Mapping[str, Any]) -> list[str]:
    """The names of the metrics in an epoch's line."""
    return [name for name in line if name not in ("epoch", "step")]
