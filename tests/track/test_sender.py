"""The sender, with trackers that lose, refuse and hang: each step arrives once, in order, with its first value."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from laststep.rundir import RunDir
from laststep.track import sender as sending
from laststep.track.sender import Lock, Sender, Sent
from laststep.track.trackers import CLASSES, Facts, Row, Tracker
from laststep.track.wanted import Wish, made_once
from tests.support.project import wait_until

WISH = Wish("trackio", "tests")
Key = tuple[int, str]


class Killed(BaseException):
    """The sender's process was killed at this place."""


class Recording(Tracker):
    """Keeps everything, as a server does. Where it is `doubtful`, the rows are compared with what is there."""

    kept: ClassVar[dict[Key, float]] = {}
    twice: ClassVar[list[Key]] = []
    fails: ClassVar[Iterator[str]] = iter(())

    def open(self, facts: Facts) -> int | None:
        return None

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        what = next(self.fails, "")
        if what == "refuse":
            raise OSError("refused")
        rows = rows[: len(rows) // 2 + 1] if what == "half" else rows
        for row in rows:
            for name, value in row.values.items():
                key = (row.step, name)
                if key in self.kept:
                    if row.step > doubtful:
                        self.twice.append(key)
                    continue
                self.kept[key] = value
        if what in ("half", "whole"):
            raise Killed

    def describe(self, facts: Facts, files: bool) -> None:
        """See Tracker."""


class Background(Recording):
    """Like W&B: what was given arrives later, if at all, and it knows what has arrived; lower steps are dropped."""

    def open(self, facts: Facts) -> int | None:
        self.waiting: list[Row] = []
        return max((step for step, _ in self.kept), default=0)

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        self.waiting += rows
        what = next(self.fails, "")
        arrived = self.waiting[: len(self.waiting) // 2] if what == "half" else self.waiting
        self.waiting = self.waiting[len(arrived) :]
        newest = max((step for step, _ in self.kept), default=0)
        for row in arrived:
            for name, value in row.values.items():
                if row.step < newest or (row.step, name) in self.kept:
                    self.twice.append((row.step, name))
                self.kept[row.step, name] = value
        if what:
            raise Killed


@pytest.fixture(params=[Recording, Background])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """The class of the tracker, empty."""
    kind: type[Recording] = request.param
    for name, value in {"kept": {}, "twice": [], "fails": iter(())}.items():
        monkeypatch.setattr(Recording, name, value)
    monkeypatch.setitem(CLASSES, "trackio", kind)
    return kind


def line(step: int, clock: float) -> str:
    """Of a step: the same bits each time, but for its clock. After each fifth step a validation."""
    text = json.dumps({"step": step, "epoch": 1, "loss": 1 / step, "samples_per_s": clock, "time": clock}) + "\n"
    return text + (json.dumps({"epoch": step // 5, "step": step, "val_loss": 2 / step}) + "\n") * (step % 5 == 0)


def test_any_history(tmp_path: Path, tracker: type[Recording]) -> None:
    """Attempts that begin anew at earlier steps, senders that are killed at any moment or refused: twelve runs."""
    dice = random.Random(0)
    for number in range(12):
        tracker.kept.clear()
        run = RunDir(tmp_path / f"run{number}")
        run.path.mkdir()
        done = clock = 0
        sender: Sender | None = None
        while done < 60:
            lines = run.metrics.read_text().splitlines(keepends=True) if run.metrics.exists() else []
            if dice.random() < 0.3 and done:  # a new attempt, from a checkpoint
                done -= dice.randrange(done)
                kept = [text for text in lines if json.loads(text)["step"] <= done]
                (run.path / "new").write_text("".join(kept))
                (run.path / "new").replace(run.metrics)
            with run.metrics.open("a") as file:
                for _ in range(dice.randrange(12)):
                    done, clock = done + 1, clock + 1
                    file.write(line(done, float(clock)))
                file.flush()
            tracker.fails = iter([dice.choice(["", "", "half", "whole", "refuse"])])
            sender = sender or Sender(run, WISH, lambda text: None)
            try:
                sender.send(last=dice.random() < 0.1)
            except Killed:
                sender = None
            except OSError:
                sender.forget()
        tracker.fails = iter(())
        last = Sender(run, WISH, lambda text: None)
        last.send(last=True)
        last.close()
        assert not tracker.twice, f"run {number}: sent twice"
        steps = range(1, done + 1)
        assert {step: value for (step, name), value in tracker.kept.items() if name == "train/loss"} == {
            step: 1 / step for step in steps
        }
        validated = {step for step, name in tracker.kept if name == "val/loss"}
        assert validated == {step for step in steps if step % 5 == 0}


def test_the_newest_step_waits_for_its_validation(tmp_path: Path, tracker: type[Recording]) -> None:
    """W&B takes no value for a step that it has, so the two lines of a step must arrive together."""
    run = RunDir(tmp_path)
    run.metrics.write_text(json.dumps({"step": 1, "loss": 1.0, "time": 1.0}) + "\n")
    sender = Sender(run, WISH, lambda text: None)
    assert sender.send() == 0
    with run.metrics.open("a") as file:
        file.write(json.dumps({"epoch": 1, "step": 1, "val_loss": 2.0}) + "\n")
        file.write(json.dumps({"step": 2, "loss": 1.0, "time": 1.0}) + "\n" + '{"step": 3, "lo')
    assert sender.send() == 1
    assert {name for step, name in tracker.kept if step == 1} >= {"train/loss", "val/loss"}
    assert sender.send(last=True) == 1


@pytest.mark.parametrize("tracker", [Recording], indirect=True)
def test_a_tracker_that_refuses(tmp_path: Path, tracker: type[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, which is said once, and nothing is left out."""
    monkeypatch.setattr(sending, "AGAIN_S", (0.01, 0.02))
    monkeypatch.setattr(sending, "POLL_S", 0.01)
    run, said = RunDir(tmp_path), list[str]()
    run.metrics.write_text("".join(line(step, 1.0) for step in range(1, 10)))
    tracker.fails = iter(["refuse"] * 5)
    ending = threading.Event()
    sender = Sender(run, WISH, said.append)
    thread = threading.Thread(target=sending.follow, args=(sender, ending, ending.is_set, said.append))
    thread.start()
    wait_until(lambda: len({step for step, _ in tracker.kept}) >= 8, "nothing was sent after the refusals")
    ending.set()
    thread.join(10)
    assert not thread.is_alive() and len({step for step, _ in tracker.kept}) == 9
    assert len(said) == 1 and "trackio refuses: OSError: refused" in said[0]
    assert Sent.read(run.track("trackio")).error is None


def test_two_senders(tmp_path: Path) -> None:
    """That of a login node, and that beside a run which begins just then: both would send the same steps."""
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert first.take() and not second.take()
    assert str(first.holder()).split()[0]
    first.close()
    assert second.take()
    second.close()


def test_the_id_is_made_once(tmp_path: Path) -> None:
    """Rank 0 and the sender may ask at the same time; two ids would be two runs."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(made_once(RunDir(tmp_path), "wandb"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_nothing_is_known_of_a_damaged_record(tmp_path: Path) -> None:
    """A power cut may leave an empty file; the sender begins anew, and asks the tracker."""
    (tmp_path / "sent.json").write_text("")
    assert Sent.read(tmp_path) == Sent()
