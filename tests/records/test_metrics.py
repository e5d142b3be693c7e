"""metrics.jsonl: each step exactly once, even if the machine went down in the middle of a write."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.records.metrics import MetricsFile, first_step_since, newest_step, read_lines


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 40)), max_size=6))
def test_each_step_once(attempts: list[tuple[int, int, int]]) -> None:
    """Attempts keep some steps, lose others, and are cut off within a line. A curve with a gap, or with a step twice,
    cannot be trusted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        step = 0
        for kept, lost, cut in attempts:
            metrics = MetricsFile(path, writes=True)
            metrics.rewind(step)
            metrics.append({"step": step + i + 1} for i in range(kept))
            metrics.sync()
            step += kept
            assert metrics.count == step
            metrics.append({"step": step + i + 1, "lost": True} for i in range(lost))
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
    metrics.rewind(0)
    assert read_lines(metrics.path) == []


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
    size = metrics.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))  # room for half a line
    try:
        metrics.append([{"step": 2}])
        metrics.append([{"step": 3}])
        with pytest.raises(OSError):
            metrics.sync()
        assert metrics.path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.append([{"step": 4}])
    assert [line["step"] for line in read_lines(metrics.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("done", [0, 1, 10, 5000])
def test_the_first_and_the_newest_step_since_a_moment(done: int, tmp_path: Path) -> None:
    """`drill` asks for the first step of an attempt, which may have done many since: fast steps fill any fixed tail."""
    path = tmp_path / "metrics.jsonl"
    assert first_step_since(path, 0.0) is None and newest_step(path) is None
    metrics = MetricsFile(path, writes=True)
    metrics.append({"step": step, "time": 100.0 + step, "loss": 0.1} for step in range(1, 301))
    metrics.append([{"epoch": 1, "step": 300, "val_loss": 0.1}])
    metrics.append({"step": step, "time": 900.0 + step, "loss": 0.1} for step in range(301, 301 + done))
    first, newest = first_step_since(path, 1000.0), newest_step(path)
    assert (first and first["step"]) == (301 if done else None)
    assert newest is not None and newest["step"] == 300 + done
