"""A host sees what another one has just created, although its file system's client remembers an older folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laststep.ranks import disk as fresh_view
from laststep.ranks.disk import FreshView, look_anew
from laststep.ranks.world import hostname
from tests.support.clients import Clients, missing
from tests.support.needs import require

REMEMBERED_S = 3600.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Path]]:
    """What two hosts see of the same folder."""
    require(missing())
    with Clients(tmp_path, 2, REMEMBERED_S) as clients:
        yield [client.view for client in clients]


def test_what_another_host_did_is_seen(hosts: list[Path]) -> None:
    """A name that appears, one that is gone, and a file that was replaced; and nothing is left behind."""
    here, there = hosts
    (there / "replaced").write_text("old")
    (there / "gone").touch()
    assert not (here / "new").exists() and (here / "replaced").stat().st_size == 3 and (here / "gone").exists()
    (there / "new").touch()
    (there / "next").write_text("newer")
    (there / "next").replace(there / "replaced")
    (there / "gone").unlink()
    assert not (here / "new").exists(), "the file system forgets by itself, and the test shows nothing"
    look_anew(here)
    assert (here / "new").exists() and (here / "replaced").stat().st_size == 5 and not (here / "gone").exists()
    assert sorted(os.listdir(here)) == ["new", "replaced"]


def test_a_folder_that_has_appeared(hosts: list[Path]) -> None:
    """The folders above it are looked at, too: a rescue makes a folder for each attempt, within another one."""
    here, there = hosts
    file = "rescue/attempt/file"
    assert not (here / file).exists()
    (there / file).parent.mkdir(parents=True)
    (there / file).touch()
    assert not (here / file).exists()
    look_anew((here / file).parent)
    assert (here / file).exists()


def test_what_a_killed_process_has_left(hosts: list[Path]) -> None:
    """It is in nobody's way, and is removed."""
    here, there = hosts
    (here / f".look-{hostname()}").mkdir()
    assert not (here / "new").exists()
    (there / "new").touch()
    look_anew(here)
    assert os.listdir(here) == ["new"]


def test_where_nothing_may_be_created(tmp_path: Path) -> None:
    """A folder that is read-only for this user, or no folder: then the host sees things later, and nothing fails."""
    (tmp_path / "file").touch()
    look_anew(tmp_path / "file")
    look_anew(Path("/proc/self/fd"))
    look_anew(tmp_path / "no" / "such" / "folder")
    assert os.listdir(tmp_path) == ["file"]


def test_many_ranks_refresh_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they make at most a thousand folders in a second, however many they are."""
    clock, looks = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(fresh_view, "look_anew", lambda folder: looks.append(clock[0]))
    for ranks, at_most in ((2, 100), (5000, 2)):
        looks.clear()
        view = FreshView(ranks, tmp_path)
        for _ in range(1000):  # ten seconds
            view.refresh()
            clock[0] += 0.01
        assert looks and len(looks) <= at_most + 1
