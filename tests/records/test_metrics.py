"""metrics.jsonl: each step exactly once, even if the machine went down in the middle of a write, and no step waits for
the disk."""

from __future__ import annotations

import errno
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.ranks.disk import Patience
from laststep.records import append_only
from laststep.records.metrics import MetricsFile, newest_step, read_lines, steps_from
from tests.support.disk import refusing
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import add_metrics


def steps(path: Path) -> list[int]:
    """The steps in a metrics.jsonl."""
    return [line["step"] for line in read_lines(path)]


def in_file(path: Path, expected: list[int]) -> bool:
    """Whether a metrics.jsonl has these steps."""
    return steps(path) == expected


def test_two_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in two containers may have the same host name, process id and thread id. If both replace a file, neither
    may write into the other's temporary file: the run would end with an error, or with a mixture of both."""
    path, sync = tmp_path / "metrics.jsonl", os.fsync
    path.write_bytes(b'{"step": 1}\n')

    def meanwhile(file: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        os.close(append_only.replace(path, 1, b'{"step": 20}\n'))
        assert steps(path) == [1, 20]
        sync(file)

    monkeypatch.setattr(os, "fsync", meanwhile)
    os.close(append_only.replace(path, 1, b'{"step": 2}\n'))
    assert steps(path) == [1, 2]
    assert os.listdir(tmp_path) == [path.name], "no temporary file is left"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.integers(0, 40)), max_size=6))
def test_each_step_once(attempts: list[tuple[int, int, bool, int]]) -> None:
    """Attempts keep some steps, lose others, and are cut off within a line. A curve with a gap, or with a step twice,
    cannot be trusted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        step = 0
        for kept, lost, written, cut in attempts:
            metrics = MetricsFile(path, writes=True)
            metrics.rewind(step)
            metrics.append({"step": step + i + 1} for i in range(kept))
            metrics.sync()
            step += kept
            assert metrics.count == step
            metrics.append({"step": step + i + 1, "lost": True} for i in range(lost))
            if written:
                metrics.sync()
            with path.open("a") as file:
                file.write(json.dumps({"step": 999, "text": "cut off within this line"})[:cut])
            assert len(read_lines(path)) <= step + lost + 1
        MetricsFile(path, writes=True).rewind(step)
        assert read_lines(path) == [{"step": i + 1} for i in range(step)]


def test_no_file_yet(tmp_path: Path) -> None:
    """A run that has not begun is not an error."""
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    """A run whose first attempt died before its first checkpoint begins again with an empty file."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", writes=True)
    metrics.append([{"step": 1}, {"step": 2}])
    metrics.sync()
    metrics.rewind(0)
    assert read_lines(metrics.path) == []


def test_a_file_that_this_host_believes_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A client of a network file system may remember that there was no such name. The lines before the checkpoint are
    kept all the same. Where the file is really gone, the run continues and says so."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    resumed = MetricsFile(path, writes=True)
    with refusing(path, errno.ENOENT, times=1) as refused:
        resumed.begin(2, Patience(DEADLINE_S, lambda text: None))
    resumed.close()
    assert refused and [line["step"] for line in read_lines(path)] == [1, 2]
    path.unlink()
    again = MetricsFile(path, writes=True)
    again.begin(2)
    again.append([{"step": 3}])
    again.close()
    assert [line["step"] for line in read_lines(path)] == [3] and again.count == 3
    assert "is gone, with the lines of 2 records" in capsys.readouterr().out


@pytest.mark.parametrize("written", range(5))
@pytest.mark.parametrize("torn", ["", '{"st'])
def test_another_rank_replaces_rank_0(written: int, torn: str, tmp_path: Path) -> None:
    """Rank 0 died, perhaps before its last lines reached the disk, perhaps within a line. A rank that saves in its
    place must leave neither a gap nor a repetition, and must not change the lines that a checkpoint includes."""
    path = tmp_path / "metrics.jsonl"
    writer, other = MetricsFile(path, writes=True), MetricsFile(path, writes=False)
    for metrics in (writer, other):
        metrics.rewind(0)
        metrics.append({"step": step} for step in (1, 2, 3))
    writer.sync()
    other.mark_checkpointed(2)
    writer.append({"step": 4 + i} for i in range(written))
    writer.sync()
    with path.open("a") as file:
        file.write(torn)
    other.append({"step": step} for step in (4, 5, 6, 7))
    assert len(read_lines(path)) == 3 + written, "until then the other rank writes nothing"
    other.rewrite_tail()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert other.count == 7 and path.read_bytes().count(b"\n") == 7


def test_what_a_full_disk_refused_is_written_later(tmp_path: Path) -> None:
    """A full disk must neither end training nor leave half a line. Once there is room, the refused lines come first."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", writes=True)
    metrics.append([{"step": 1}])
    metrics.sync()
    size = metrics.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))  # room for half a line
    try:
        for step in (2, 3):
            metrics.append([{"step": step}])
            with pytest.raises(OSError):
                metrics.sync()
        assert metrics.path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.append([{"step": 4}])
    metrics.sync()
    assert steps(metrics.path) == [1, 2, 3, 4]


class Disk:
    """Takes the place of `os` for metrics.jsonl: `before` is called with the name of each call that uses the disk."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self._before = before

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "close", "fsync"):
            return real

        def call(*words: Any) -> Any:
            self._before(name)
            return real(*words)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Sets what happens before each call that uses the disk."""
    return lambda before: monkeypatch.setattr(append_only, "os", Disk(before))


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[MetricsFile]:
    """Rank 0's metrics.jsonl while it trains."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", writes=True)
    metrics.begin(0)
    yield metrics
    metrics.close()


class StuckDisk:
    """A disk on which writes do not return until `free` is set."""

    def __init__(self) -> None:
        self.reached, self.free = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name == "write":
            self.reached.set()
            assert self.free.wait(DEADLINE_S)


def test_lines_appear_while_training(metrics: MetricsFile) -> None:
    """`status`, `logs -f` and the curves read the file while the run trains, without asking it to write."""
    for done in ([1], [1, 2], [1, 2, 3]):
        metrics.append([{"step": done[-1]}])
        wait_until(partial(in_file, metrics.path, done), f"step {done[-1]} is not in metrics.jsonl")


def test_a_step_is_printed_once_it_is_in_the_file(
    metrics: MetricsFile, disk: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a user has seen steps of which nothing is left after SIGKILL of all ranks: `every step is saved`, said the
    last line, with eight printed steps gone. On a disk that refuses for long the log goes on, after a warning."""
    said: list[list[int]] = []
    metrics.append([{"step": 1}], lambda: said.append(steps(metrics.path)))
    wait_until(lambda: said == [[1]], "nothing was said of step 1")
    stuck = StuckDisk()
    disk(stuck)
    metrics.append([{"step": 2}], lambda: said.append(steps(metrics.path)))
    assert stuck.reached.wait(DEADLINE_S) and said == [[1]], "step 2 is not in the file yet"
    stuck.free.set()
    wait_until(lambda: said == [[1], [1, 2]], "nothing was said of step 2")

    def refuse(name: str) -> None:
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk(refuse)
    metrics.append([{"step": 3}], lambda: said.append(steps(metrics.path)))
    wait_until(lambda: len(said) == 3, "a full disk silences the log")
    assert "WARNING" in capsys.readouterr().out


def test_a_slow_disk_does_not_slow_steps_down(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """A network file system may take 20 ms for each close. 500 steps that each waited for it would take 20 s more."""
    disk(lambda name: time.sleep(0.02))
    began = time.perf_counter()
    for step in range(500):
        metrics.append([{"step": step + 1}])
    took_s = time.perf_counter() - began
    assert took_s < 10, f"500 steps took {took_s:.1f} s"
    metrics.sync()
    assert steps(metrics.path) == list(range(1, 501))


def test_a_stuck_disk_does_not_stop_training(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """A file server that restarts may not answer for minutes. Training continues, and no line is lost or repeated."""
    stuck = StuckDisk()
    disk(stuck)
    metrics.append([{"step": 1}])
    assert stuck.reached.wait(DEADLINE_S), "nothing was written"
    metrics.append([{"step": 2}])
    assert steps(metrics.path) == []
    stuck.free.set()
    metrics.sync()
    assert steps(metrics.path) == [1, 2]


def test_rank_0_is_stuck_in_a_write_while_another_rank_saves(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """The disk lets rank 0 go once another rank has written the lines in its place. They must not be there twice."""
    other, stuck = MetricsFile(metrics.path, writes=False), StuckDisk()
    for each in (metrics, other):
        each.append([{"step": 1}, {"step": 2}])
    metrics.sync()
    other.mark_checkpointed(1)
    disk(stuck)
    metrics.append([{"step": 3, "by": 0}, {"step": 4, "by": 0}])
    assert stuck.reached.wait(DEADLINE_S), "nothing was written"
    disk(lambda name: None)
    other.append([{"step": 3, "by": 1}])
    other.rewrite_tail()
    stuck.free.set()
    metrics.close()
    assert read_lines(metrics.path) == [{"step": 1}, {"step": 2}, {"step": 3, "by": 1}]


def test_rank_0_itself_saves_while_its_write_is_stuck(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """The rescue runs in a thread of rank 0, and must not wait for the one that is stuck."""
    stuck = StuckDisk()
    disk(stuck)
    metrics.append([{"step": 1}])
    assert stuck.reached.wait(DEADLINE_S), "nothing was written"
    metrics.append([{"step": 2}])
    disk(lambda name: None)
    metrics.rewrite_tail()
    assert steps(metrics.path) == [1, 2]
    stuck.free.set()
    metrics.close()
    assert steps(metrics.path) == [1, 2]


def test_a_hung_rank_0_of_an_older_attempt(metrics: MetricsFile) -> None:
    """Where a file system has no locks, or has given up those of a node that went silent, the next attempt may begin
    while the old rank 0 lives. It must neither write into the new attempt's lines nor commit a checkpoint."""
    metrics.append([{"step": 1}, {"step": 2}])
    metrics.sync()
    newer = MetricsFile(metrics.path, writes=True)
    newer.rewind(1)
    metrics.append([{"step": 3, "old": True}])
    with pytest.raises(OSError, match="another process has replaced this file"):
        metrics.sync()
    newer.append([{"step": 2}])
    newer.sync()
    assert steps(metrics.path) == [1, 2]


def test_a_rescue_of_an_older_attempt_comes_too_late(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """A rank that hangs just before it puts its lines in place must not undo those of the next attempt."""
    other, newer = MetricsFile(metrics.path, writes=False), MetricsFile(metrics.path, writes=True)
    other.append([{"step": 1, "old": True}])

    def next_attempt(name: str) -> None:
        if name == "fsync":
            disk(lambda name: None)
            newer.rewind(0)
            newer.append([{"step": 1}])

    disk(next_attempt)
    with pytest.raises(FileNotFoundError):
        other.rewrite_tail()
    newer.sync()
    assert read_lines(metrics.path) == [{"step": 1}]


def test_a_disk_that_reports_at_close_that_it_is_full(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """NFS takes what is written and may refuse it at close. Then it is written again, and must not be there twice."""
    refused = threading.Event()

    def refuse_once(name: str) -> None:
        if name == "close" and not refused.is_set():
            refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    disk(refuse_once)
    metrics.append([{"step": 1}])
    assert refused.wait(DEADLINE_S), "no descriptor was closed: other nodes would not see the lines"
    metrics.sync()
    assert steps(metrics.path) == [1]


def test_a_full_disk_at_the_beginning(metrics: MetricsFile, disk: Callable[..., None]) -> None:
    """A run resumes although the disk has no room for a copy of metrics.jsonl: there may be room when it saves."""
    metrics.append([{"step": step} for step in (1, 2, 3)])
    metrics.sync()

    def full(name: str) -> None:
        if name == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    disk(full)
    MetricsFile(metrics.path, writes=True).rewind(2)
    assert steps(metrics.path) == [1, 2]
    assert [file.name for file in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


def test_the_end_writes_what_is_left(tmp_path: Path) -> None:
    """Without a last save, as after a loss that is not finite, the last lines show what happened."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", writes=True)
    metrics.begin(0)
    metrics.append([{"step": 1}])
    metrics.close()
    assert steps(metrics.path) == [1]


def test_no_thread_before_training(tmp_path: Path) -> None:
    """A process that is forked while a thread holds a lock would wait for that lock without end."""
    before = threading.active_count()
    metrics = MetricsFile(tmp_path / "metrics.jsonl", writes=True)
    assert threading.active_count() == before
    metrics.begin(0)
    assert threading.active_count() == before + 1
    metrics.close()
    assert threading.active_count() == before, "the thread outlives the attempt"


VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=5), max_size=30))
def test_lines_are_json(records: list[dict[str, Any]]) -> None:
    """A user may log values of any name and size; a line that json.dumps would write differently breaks readers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        add_metrics(path, records)
        assert path.read_text() == "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("done", [0, 1, 10, 5000])
def test_the_steps_from_one_on_and_the_newest(done: int, tmp_path: Path) -> None:
    """`drill` asks for the first step of an attempt, which may have done many since: fast steps fill any fixed tail."""
    path = tmp_path / "metrics.jsonl"
    assert not list(steps_from(path, 1)) and newest_step(path) is None
    metrics = MetricsFile(path, writes=True)
    metrics.append({"step": step, "time": 100.0 + step, "loss": 0.1} for step in range(1, 301))
    metrics.append([{"epoch": 1, "step": 300, "val_loss": 0.1}])
    metrics.append({"step": step, "time": 900.0 + step, "loss": 0.1} for step in range(301, 301 + done))
    metrics.sync()
    assert [line["step"] for line in steps_from(path, 301)] == list(range(301, 301 + done))
    newest = newest_step(path)
    assert newest is not None and newest["step"] == 300 + done
