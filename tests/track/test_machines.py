"""What the machines did reaches the trackers: each line once, and the steps do not wait for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest

from laststep.config.config import Config
from laststep.records.metrics import TAIL, place_of
from laststep.rundir import RunDir
from laststep.track import machines
from laststep.track.machines import Machines, Measure
from laststep.track.sender import Sender
from laststep.track.trackers import CLASSES, Facts, Row, Tracker
from laststep.track.wanted import Wish
from tests.track.shown import wandb as shown_by_wandb


def write(run: RunDir, node: str, lines: range, step_s: int = 100) -> None:
    """Lines of a node every ten seconds, in which its GPUs are busier each time; a step takes `step_s`."""
    run.telemetry.mkdir(parents=True, exist_ok=True)
    with (run.telemetry / f"{node}.jsonl").open("a") as file:
        for number in lines:
            line = {"time": 10.0 * number, "seconds": 10.0, "node": node, "step": 10 * number // step_s}
            line |= {"gpu_use": [number, None, number + 2], "gpu_throttled": [[], ["heat"]], "cpu_cores": 2}
            file.write(json.dumps(line | {"total": {"gpu_s": 1.0}, "doing": {"training": 1.0}}) + "\n")


def train(run: RunDir, steps: range) -> None:
    """Lines of metrics.jsonl."""
    with run.metrics.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "epoch": 1, "loss": 1 / step, "time": 100.0 * step}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "seen")
    found.path.mkdir()
    Config.load(None, ["launch.name=seen"]).save(found.config)
    return found


class Recording(Tracker):
    """Keeps the measures and the steps."""

    kept: ClassVar[list[Measure]] = []
    steps: ClassVar[list[int]] = []
    refusals: ClassVar[Iterator[bool]] = iter(())

    def open(self, facts: Facts) -> int | None:
        return None

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        self.steps.extend(row.step for row in rows)

    def measure(self, measures: Sequence[Measure]) -> None:
        """See Tracker."""
        if next(self.refusals, False):
            raise OSError("quota of measures")
        self.kept.extend(measures)

    def describe(self, facts: Facts, files: bool) -> None:
        """See Tracker."""


def test_each_line_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over files that grow, refusals, and senders that begin anew; a refusal holds up no step, and is said once."""
    monkeypatch.setitem(CLASSES, "trackio", Recording)
    monkeypatch.setattr(machines, "LINES", 7)
    for name, value in {"kept": [], "steps": [], "refusals": iter([False, True, True, False])}.items():
        monkeypatch.setattr(Recording, name, value)
    said: list[str] = []
    for part in range(4):
        train(run, range(5 * part + 1, 5 * part + 6))
        for node in ("n1", "n2.far.away"):
            write(run, node, range(10 * part + 1, 10 * part + 11))
        with (run.telemetry / "n1.jsonl").open("a") as file:
            file.write("" if part < 3 else '{"time": 1e9, "cpu_co')
        sender = Sender(run, Wish("trackio", "tests"), said.append)
        sender.send(last=True)
        assert len(Recording.steps) == 5 * part + 5
        sender.send(last=True)
        sender.close()
    for node in ("n1", "n2_far_away"):
        assert [one.time for one in Recording.kept if one.node == node] == [10.0 * n for n in range(1, 41)]
    assert Recording.kept[0] == Measure("n1", 10.0, 0, {"gpu_use": 2.0, "cpu_cores": 2.0})
    assert [text for text in said if "quota" in text] == [
        "WARNING: trackio takes no telemetry just now: OSError: quota of measures"
    ]


def test_a_long_file_is_not_read_again(run: RunDir) -> None:
    """Each attempt of a run of weeks would read gigabytes first."""
    write(run, "n1", range(1, 3001))
    reader = Machines(run, {"n1": 29_900.0})
    assert [one.time for one in reader.read()] == [10.0 * number for number in range(2991, 3001)]
    with (run.telemetry / "n1.jsonl").open("rb") as file:
        place = place_of(file, 29_900.0, "time")
        assert place > file.seek(0, 2) - 2 * TAIL


def test_wandb(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps must rise, so a step has the mean of the lines that are new: none is left out or stands twice, over
    senders that know no more than its own files. Steps take a hundred seconds here, ten lines."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for part in range(2):
        train(run, range(3 * part + 1, 3 * part + 4))
        write(run, "n1", range(30 * part + 1, 30 * part + 31))
        sender = Sender(run, Wish("wandb", "tests"), lambda text: None)
        sender.sent.machines = {"n1": 10.0}
        sender.send()
        if part:
            sender.send(last=True)
        sender.close()
    found: dict[str, Any] = shown_by_wandb(str(run.track("wandb")), "seen")["curves"]
    assert [step for step, _ in found["train/loss"]] == list(range(1, 7))
    times = [int(value) // 10 for _, value in found["system/n1/time"]]
    assert times == sorted(set(times)) and times[-1] == 60
    begins = [0, *times[:-1]]
    wanted = [fmean(range(begin + 2, end + 2)) for begin, end in zip(begins, times)]
    assert [value for _, value in found["system/n1/gpu_use"]] == wanted


@pytest.mark.filterwarnings("ignore")  # theirs
def test_databases(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's and trackio's: at their time, and once although a killed sender did not remember that it has sent."""
    pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.chdir(tmp_path)  # MLflow's files
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    train(run, range(1, 4))
    write(run, "n1", range(1, 31))
    place = f"sqlite:///{tmp_path}/runs.db"
    for wish in (Wish("mlflow", "tests", uri=place), Wish("trackio", "tests")):
        for _ in range(2):
            sender = Sender(run, wish, lambda text: None)
            sender.sent.machines = {}
            sender.send(last=True)
            sender.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=place)
    (made,) = client.search_runs(["1"])
    history = client.get_metric_history(made.info.run_id, "system/n1/gpu_use")
    assert [(one.timestamp, one.step, one.value) for one in history] == [
        (10_000 * number, number // 10, number + 1) for number in range(1, 31)
    ]
    rows = SQLiteStorage.get_system_logs("tests", "seen")
    assert [row["system/n1/gpu_use"] for row in rows] == [number + 1 for number in range(1, 31)]
