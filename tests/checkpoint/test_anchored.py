"""checkpoint.anchors in a real run: the disk holds what was configured, and never more."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint.store import CheckpointStore
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, train
from tests.support.runs import config


def _note_disk(notes: Path) -> None:
    """Have rank 0 note what the disk holds after each save."""
    prune = CheckpointStore.prune

    def noted(self: CheckpointStore, *words: Any) -> None:
        before = _held(self)
        prune(self, *words)
        with notes.open("a") as file:
            file.write(json.dumps({"before": before, "after": _held(self)}) + "\n")

    CheckpointStore.prune = noted  # type: ignore[method-assign,assignment]


def _held(store: CheckpointStore) -> list[tuple[int, int]]:
    """The steps of the checkpoints that are there, each with the bytes of all of its files."""
    return [(step, sum(path.stat().st_size for path in store.path(step).iterdir())) for step in store.steps()]


@pytest.mark.parametrize("anchors", ["4", "0.2MB"])
def test_the_disk_of_a_run(root: Path, tmp_path: Path, anchors: str) -> None:
    """Besides the newest and the best one, it holds one checkpoint per N steps, or no more bytes than were given, also
    after a stop and a resume. A run that held more would fill everybody's disk in weeks; one that held less could not
    be replayed from where its user was told."""
    words = (f"checkpoint.anchors={anchors}", "checkpoint.keep_last=1", "checkpoint.keep_best=1", "model.args.width=8")
    small = config(root, f"anchored-{anchors}", 2, (*words, "checkpoint.every_steps=1", "train.epochs=4"))
    before = functools.partial(_note_disk, tmp_path / "notes")
    stopped = Attempt(small, {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 12 rank 1"}, before=before)
    assert set(stopped.wait()) == {143}, stopped.output()
    run = train(small, before=before)
    notes = read_lines(tmp_path / "notes")
    assert len(notes) >= 28, "a save after each step"
    size = max(bytes for note in notes for _, bytes in note["before"])
    for note in notes:
        held = dict(note["after"])
        newest = max(held)
        if anchors == "4":
            assert set(range(4, newest + 1, 4)) <= held.keys(), "an anchor is missing"
            assert len([step for step in held if step % 4 and step != newest]) <= 1, "more than the best one"
        else:
            assert sum(held.values()) <= 200_000 + 2 * size, "with the newest and the best"
    left = CheckpointStore(run.checkpoints).steps()
    assert left == [step for step, _ in notes[-1]["after"]]
    assert anchors == "4" or len(left) >= 200_000 // size, "as many as fit"
