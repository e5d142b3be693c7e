"""The sender: reads metrics.jsonl and gives one tracker each step once. `python -m laststep.track.sender RUN TRACKER`.

A step that is done again has the same bits, so what was sent stays right, and nothing is ever sent again: the first
value stands, also of what a clock gives. How far it has come is `sent.json` in RUN/track/TRACKER/, replaced by a rename
after each batch; before a batch it says how far that goes, so that after a kill in between the tracker is asked which
of these it has. One process at a time sends (`lock`): that beside rank 0, or the verb `track`.

The lines of one step make one row: that of the step, and that of a validation after it, which may come much later, even
in another attempt. So the newest row waits for the next step, or until no attempt is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laststep.ranks.beside import SAY
from laststep.ranks.disk import NO_LOCKS, look_anew
from laststep.records.media import media_of
from laststep.records.metrics import curves_in, is_step, place_of
from laststep.rundir import RunDir, aside, fsync
from laststep.runs import run_config
from laststep.track import describe
from laststep.track.machines import Machines
from laststep.track.trackers import CLASSES, Row, Tracker, number
from laststep.track.wanted import Wish, made_once, wish_of

POLL_S = 2.0  # how often it looks for new steps
ROWS = 1000  # of one batch
LOOK_S = 30.0  # how often at what else there is: attempts that have ended, goodput
WHOLE = 1 << 30  # more lines than any step has
AGAIN_S = (5.0, 120.0)  # how long it waits after an error, and at most, when they repeat


@dataclass
class Sent:
    """How far one tracker has come: RUN/track/TRACKER/sent.json."""

    id: str | None = None  # of the tracker's run
    url: str | None = None
    step: int = 0  # the last step that it was given
    lines: int = 0  # how many lines of that step
    until: int = 0  # how far the batch goes that may have been sent
    sure: int = 0  # W&B sends in the background: the last step that has arrived for certain
    machines: dict[str, float] = dataclasses.field(default_factory=dict)  # the time of the last line of each node
    files: str = ""  # a fingerprint of the configuration and files that it was given
    error: str | None = None  # why it could not send; None: it could

    @classmethod
    def read(cls, folder: Path) -> Sent:
        """What the file says; a new run's where there is none. Raises OSError."""
        try:
            found = json.loads((folder / "sent.json").read_text())
        except (FileNotFoundError, ValueError):
            return cls()
        return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found})

    def write(self, folder: Path) -> None:
        """Replace the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = aside(folder / "sent.json")
        temporary.write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        fsync(temporary)
        temporary.replace(folder / "sent.json")


class Lock:
    """Held by the one process that sends to a tracker, for as long as it lives."""

    STALE_S = 120.0  # without locks on the disk: a signature that is older is of a dead process

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "lock"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._without_locks = False
        self._name = f"{os.uname().nodename} {os.getpid()}".encode()

    def take(self) -> bool:
        """Whether this process holds it now. Raises OSError."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            signed = os.pread(self._file, 200, 0)
            if signed not in (b"", self._name) and time.time() - os.fstat(self._file).st_mtime < self.STALE_S:
                return False
            self._without_locks = True
        self.sign()
        return True

    def sign(self) -> None:
        """Say that this process lives; only needed where the disk has no locks."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, self._name, 0)

    def holder(self) -> str:
        """Where the process is that holds it: its host and its process id."""
        return os.pread(self._file, 200, 0).decode(errors="replace")

    def close(self) -> None:
        """Release it."""
        if self._without_locks:
            os.ftruncate(self._file, 0)
        os.close(self._file)


class Lines:
    """The new lines of a metrics.jsonl that grows, and that is replaced by a shorter one when a run resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = -1, 0
        self._step, self._number = -1, 0  # of the last line that was read, and how many of its step came before

    def begins_anew(self) -> bool:
        """Whether the file has been replaced, or cut, since the last call of `read`, so that this will read it anew."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        return found.st_ino != self._inode or found.st_size < self._offset

    def read(self, step: int) -> Iterator[tuple[dict[str, Any], int]]:
        """The whole lines that are new since the last call, of this step and later ones, each with its number among the
        lines of its step, from 1."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self._step = found.st_ino, place_of(file, step), -1
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and isinstance(record.get("step"), int):
                        self._number = self._number + 1 if record["step"] == self._step else 1
                        self._step = record["step"]
                        if self._step >= step:
                            yield record, self._number

    def again(self) -> None:
        """Read anew, next time."""
        self._inode = -1


class Sender:
    """Sends to one tracker."""

    def __init__(self, run: RunDir, wish: Wish, say: Callable[[str], None]) -> None:
        self.run, self._wish, self._say = run, wish, say
        self.folder = run.track(wish.tracker)
        self.sent = Sent.read(self.folder)
        self._lines = Lines(run.metrics)
        self._held: list[dict[str, Any]] = []  # the unsent lines of the newest step, which wait for the next
        self._count = 0  # how many lines that step has so far
        self._tracker: Tracker | None = None
        self._machines = Machines(run, {})
        self._refused = ""  # why the tracker took no measures of machines
        self._looked_at = 0.0
        self._told: tuple[Any, ...] = ()
        self.given = 0  # how many rows this process has sent

    @property
    def name(self) -> str:
        """The tracker's."""
        return self._wish.tracker

    def send(self, last: bool = False) -> int:
        """Send what is new; `last`: also the newest row, as no attempt is under way. Returns how many rows. Raises what
        the tracker's package raises."""
        if self._tracker is None:
            self._tracker = self._open()
        before = self.given
        for rows in self._batches(last):
            if self._tracker.measures_with_rows:
                self._measure()
            self._give(rows)
        if last or not self._tracker.measures_with_rows:
            while self._measure():
                pass
        if last or time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            self._describe()
        return self.given - before

    def create(self) -> str:
        """The id of the tracker's run, which is made if there is none; for a script that sends to it. Raises what the
        tracker's package raises."""
        if self.sent.id is None:
            self._open()
        return str(self.sent.id)

    def close(self) -> None:
        """End the tracker's part. Raises what its package raises."""
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.close(describe.has_finished(self.run))
            self.sent.sure = self.sent.step
            self.sent.write(self.folder)

    def forget(self) -> None:
        """After an error: begin anew, from what is known to be sent."""
        self._tracker, self._held = None, []
        self._lines.again()

    def behind(self) -> bool:
        """Whether there is anything to send, without a look at the tracker."""
        return any(self._is_new(*line) for line in Lines(self.run.metrics).read(self.sent.step))

    def weights(self, file: Path) -> None:
        """Send the exported weights."""
        assert self._tracker is not None
        self._tracker.weights(file)

    def failed(self, error: BaseException) -> str:
        """Remember why it could not send, for `status`; returns that, without secrets."""
        text = self._said(error)
        if self.sent.error != text:
            self.sent.error = text
            with contextlib.suppress(OSError):
                self.sent.write(self.folder)
        return text

    def _said(self, error: BaseException) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return describe.secrets_of(self.run).hide(text)

    def _open(self) -> Tracker:
        mark = made_once(self.run, self.name)
        tracker = CLASSES[self.name](self._wish, self.run, mark, self.sent.id if self.name == "mlflow" else mark)
        facts = describe.facts(self.run)
        has = tracker.open(facts)
        # It knows best: what a killed sender had not got through is sent again.
        if has is not None and (step := max(has, self.sent.sure)) != self.sent.step:
            self.sent.step, self.sent.lines = step, WHOLE
        if (known := tracker.measured()) is not None:
            self.sent.machines = known
        self._machines = Machines(self.run, self.sent.machines)
        new = tracker.url != self.sent.url and tracker.url is not None
        self.sent.id, self.sent.url, self.sent.error = tracker.id, tracker.url or self.sent.url, None
        self.sent.write(self.folder)
        if new:
            self._say(f"{self._wish.tracker} shows this run at {tracker.url}")
        self._lines.again()
        self._held = []
        self._looked_at = 0.0
        return tracker

    def _is_new(self, line: dict[str, Any], count: int) -> bool:
        return (line["step"], count) > (self.sent.step, self.sent.lines)

    def _batches(self, last: bool) -> Iterator[list[tuple[Row, int]]]:
        """The new rows, in batches, each with the number of its step's lines; the newest only if it is the `last`."""
        rows: list[tuple[Row, int]] = []
        if self._lines.begins_anew():
            self._held = []
        for line, count in self._lines.read(self.sent.step):
            if not self._is_new(line, count):
                continue
            if self._held and line["step"] > self._held[-1]["step"]:
                rows.append((self._row(self._held), self._count))
                self._held = []
                if len(rows) >= ROWS:
                    yield rows
                    rows = []
            self._held.append(line)
            self._count = count
        if last and self._held:
            rows.append((self._row(self._held), self._count))
            self._held = []
        if rows:
            yield rows

    def _row(self, lines: list[dict[str, Any]]) -> Row:
        step = lines[0]["step"]
        at = next((line["time"] for line in lines if is_step(line)), time.time())
        values = {name: number(value) for line in lines for name, value in curves_in(line).items()}
        epoch = next((line["epoch"] for line in lines if "epoch" in line), None)
        numbers = {name: value for name, value in values.items() if value is not None}
        if epoch is not None and any(map(is_step, lines)):
            numbers["epoch"] = epoch
        return Row(step, at, numbers, tuple(media_of(self.run, step)))

    def _give(self, rows: list[tuple[Row, int]]) -> None:
        assert self._tracker is not None
        (newest, lines), doubtful = rows[-1], self.sent.until
        self.sent.until = max(doubtful, newest.step)
        self.sent.write(self.folder)
        self._tracker.send([row for row, _ in rows], doubtful)
        self.given += len(rows)
        self.sent.step, self.sent.lines, self.sent.error = newest.step, lines, None
        if newest.step >= doubtful:
            self.sent.until = 0
        self.sent.write(self.folder)

    def _measure(self) -> bool:
        """Send what the machines did; returns whether there was anything. The steps do not depend on it."""
        assert self._tracker is not None
        try:
            if not (measures := self._machines.read()):
                return False
            self._tracker.measure(measures)
        except Exception as error:  # of a tracker's package: there are many types
            self._machines = Machines(self.run, self.sent.machines)
            text = self._said(error)
            if text != self._refused:
                self._say(f"WARNING: {self.name} takes no telemetry just now: {text}")
            self._refused = text
            return False
        self._refused = ""
        self.sent.machines |= {measure.node: measure.time for measure in measures}
        self.sent.write(self.folder)
        return True

    def _describe(self) -> None:
        assert self._tracker is not None
        facts = describe.facts(self.run)
        files = describe.fingerprint(facts)
        told = (facts.about, files)
        if told != self._told:
            self._tracker.describe(facts, files != self.sent.files)
            self._told, self.sent.files = told, files
            self.sent.write(self.folder)


def create() -> None:
    """Print the id of a tracker's run, which is made if there is none; for a script that sends to it. The words of the
    command are RUN and TRACKER."""
    run = RunDir(sys.argv[1])
    print(Sender(run, wish_of(run_config.as_submitted(run), sys.argv[2]), lambda text: None).create())


def follow(sender: Sender, ending: threading.Event, is_over: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Send until `ending` is set or the run `is_over`. Nothing that a tracker does ends this."""
    wait_s, told = AGAIN_S[0], ""
    while True:
        asked, over = ending.is_set(), is_over()
        try:
            look_anew(sender.run.path)
            sender.send(last=over)
            wait_s, told = AGAIN_S[0], ""
            if asked or over:
                return sender.close()
            pause_s = POLL_S
        except (Exception, SystemExit) as error:
            text = sender.failed(error)
            if told != text:
                say(f"WARNING: {sender.name} refuses: {text}; the run is not affected, and nothing is left out later")
            told = text
            sender.forget()
            if asked:
                return
            pause_s, wait_s = wait_s, min(2 * wait_s, AGAIN_S[1])
        ending.wait(pause_s)


def main() -> int:
    """The process beside rank 0."""
    run, tracker = RunDir(sys.argv[1]), sys.argv[2]
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())

    def say(text: str) -> None:
        print(f"{SAY}{text}", flush=True)

    wish = wish_of(run_config.as_submitted(run), tracker)
    lock = Lock(run.track(tracker))
    while not lock.take():  # the verb `track` sends just now
        if ending.wait(POLL_S):
            return 0
    sender = Sender(run, wish, say)
    while not sender.behind():  # to import a tracker's package takes seconds, which a run that begins does not have
        if ending.wait(POLL_S):
            break
    follow(sender, ending, lambda: ending.is_set() and describe.is_resting(run), say)
    lock.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
