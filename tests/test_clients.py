"""The simulated clients of a network file system really remember what NFS clients remember, and no longer.

If they forgot too early, the tests that run on them would prove nothing. "Never" is an hour here.
"""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.clients import Client, Clients, missing
from tests.support.needs import require
from tests.support.project import DEADLINE_S, wait_until

NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def needed() -> None:
    require(missing())


@pytest.fixture
def views(tmp_path: Path) -> Iterator[list[Path]]:
    """What two clients see of a folder, which they look at anew only for a reason."""
    with Clients(tmp_path, 2, NEVER_S) as clients:
        yield [client.view for client in clients]


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda folder: (folder / "own").touch(),
    "mkdir": lambda folder: (folder / "own").mkdir(),
    "rename": lambda folder: (folder / "before").rename(folder / "after"),
    "unlink": lambda folder: (folder / "before").unlink(),
    "link": lambda folder: (folder / "own").hardlink_to(folder / "before"),
    "symlink": lambda folder: (folder / "own").symlink_to("before"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_own_change_refreshes(views: list[Path], change: str) -> None:
    """What another client creates, deletes and lists is unseen until this client changes the folder."""
    one, other = views
    (one / "before").touch()
    (one / "gone").touch()
    assert not (one / "new").exists() and (one / "gone").exists() and len(os.listdir(one)) == 2
    (other / "new").write_text("text")
    (other / "gone").unlink()
    assert not (one / "new").exists() and (one / "gone").exists() and len(os.listdir(one)) == 2
    CHANGES[change](one)
    assert (one / "new").exists() and not (one / "gone").exists() and "new" in os.listdir(one)


@pytest.mark.parametrize(
    "refused",
    [
        lambda folder: (folder / "file").write_text("text"),
        lambda folder: (folder / "file").open("a").close(),
        lambda folder: os.mkdir(folder / "file"),
        lambda folder: os.utime(folder / "known"),
    ],
)
def test_what_is_no_change(views: list[Path], refused: Callable[[Path], object]) -> None:
    """Neither what is refused, nor what is written into files that are there, shows what else has changed."""
    one, other = views
    (one / "known").touch()
    (other / "file").touch()
    assert not (one / "new").exists()
    (other / "new").touch()
    with suppress(FileExistsError):
        refused(one)
    assert not (one / "new").exists()


def test_a_change_elsewhere_refreshes_nothing(views: list[Path]) -> None:
    """Each folder is believed for itself."""
    one, other = views
    (one / "a").mkdir()
    (one / "b").mkdir()
    assert not (one / "a/new").exists()
    (other / "a/new").touch()
    (one / "b/own").touch()
    assert not (one / "a/new").exists()


def test_it_expires(tmp_path: Path) -> None:
    """An absence, a presence, a listing and a size are believed for a while, not forever."""
    with Clients(tmp_path, 2, 0.2) as clients:
        one, other = (client.view for client in clients)
        (other / "gone").touch()
        (other / "grows").touch()
        assert not (one / "new").exists() and (one / "gone").exists()
        assert (one / "grows").stat().st_size == 0 and os.listdir(one)
        (other / "new").touch()
        (other / "gone").unlink()
        (other / "grows").write_text("text")
        wait_until((one / "new").exists, "a new file is never seen")
        wait_until(lambda: not (one / "gone").exists(), "a deleted file is seen forever")
        wait_until(lambda: "new" in os.listdir(one), "the listing never changes")
        wait_until(lambda: (one / "grows").stat().st_size == 4, "the file never grows")


def test_who_opens_sees_what_was_closed(views: list[Path]) -> None:
    """A file's attributes are old until it is opened. Whoever has it open keeps what it saw."""
    one, other = views
    (one / "file").write_text("old")
    assert (other / "file").stat().st_size == 3
    with (other / "file").open() as opened:
        assert opened.read() == "old"
        with (one / "file").open("a") as file:
            file.write("+new")
        assert (other / "file").stat().st_size == 3 and opened.read() == ""
    assert (other / "file").read_text() == "old+new"
    assert (other / "file").stat().st_size == 7


def test_who_opens_sees_the_file_that_replaced_it(views: list[Path]) -> None:
    """As on NFS, where the server no longer knows the file that the client remembers."""
    one, other = views
    (one / "file").write_text("old")
    (one / "gone").write_text("old")
    (other / "file").stat()
    (other / "gone").stat()
    (one / "next").write_text("newer")
    (one / "next").rename(one / "file")
    (one / "gone").unlink()
    assert (other / "file").stat().st_size == 3 and (other / "gone").exists()
    assert (other / "file").read_text() == "newer"
    with pytest.raises(FileNotFoundError):
        (other / "gone").read_text()


def test_what_is_written_stays_until_it_is_closed_or_synced(views: list[Path]) -> None:
    """A process that keeps its file open has to sync what others are to read."""
    one, other = views
    with (one / "file").open("w", buffering=1) as file:
        file.write("first\n")
        assert (other / "file").read_text() == ""
        os.fsync(file.fileno())
        assert (other / "file").read_text() == "first\n"
        file.write("second\n")
        os.close(os.dup(file.fileno()))
        assert (other / "file").read_text() == "first\nsecond\n"
        file.write("third\n")
        assert (one / "file").read_text() == "first\nsecond\nthird\n", "it sees its own"
        file.write("fourth\n")
        assert (other / "file").read_text() == "first\nsecond\nthird\n"
    assert (other / "file").read_text() == "first\nsecond\nthird\nfourth\n"


def test_what_is_written_is_sent_after_a_while(tmp_path: Path) -> None:
    """As the kernel does it: nothing stays unwritten because a process does not close its log."""
    with Clients(tmp_path, 1, 0.2) as clients, (clients[0].view / "log").open("w", buffering=1) as log:
        log.write("line\n")
        wait_until(lambda: (tmp_path / "log").read_text() == "line\n", "what was written stays with the client")


def test_the_server_decides(views: list[Path]) -> None:
    """A client that does not see a name cannot create it a second time; then it sees it."""
    one, other = views
    for name, create in (("file", lambda path: path.open("xb").close()), ("folder", os.mkdir)):
        assert not (one / name).exists()
        create(other / name)
        assert not (one / name).exists()
        with pytest.raises(FileExistsError):
            create(one / name)
        assert (one / name).exists()


def test_flock_holds_between_clients(views: list[Path]) -> None:
    """And ends with the process that has it, and lets another wait for it."""
    one, other = views
    with ExitStack() as files:
        held = files.enter_context((one / "lock").open("w"))
        fcntl.flock(held, fcntl.LOCK_EX)
        second = files.enter_context((other / "lock").open("r+"))
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits = subprocess.Popen(["flock", str(other / "lock"), "true"])
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(0.3)
        held.close()
        assert waits.wait(DEADLINE_S) == 0
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_process_on_a_client(tmp_path: Path) -> None:
    """It sees the client's view under the folder's own path; the test sees what is true."""
    with Clients(tmp_path, 2, NEVER_S) as clients:
        file = tmp_path / "file"
        look = ["sh", "-c", f"[ -e {file} ] || echo absent"]

        def absent_on(client: Client) -> bool:
            return subprocess.run(client.command(*look), capture_output=True, text=True, check=True).stdout != ""

        assert absent_on(clients[0])
        file.touch()
        assert absent_on(clients[0]) and not absent_on(clients[1]) and file.exists()


def test_one_client_alone_is_a_file_system(tmp_path: Path) -> None:
    """A thousand random operations have the same results as on the disk itself."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "served").mkdir()
    drawn = random.Random(0)
    with Clients(tmp_path / "served", 1, NEVER_S) as clients:
        tops = [tmp_path / "disk", clients[0].view]
        for number in range(1000):
            names = [f"{drawn.choice('ab')}{drawn.choice(['', '/c', '/d', '/c/e'])}" for _ in range(2)]
            act = drawn.choice(ACTS)
            results = [_result(act, top / names[0], top / names[1], number) for top in tops]
            assert results[0] == results[1], f"{names}, operation {number}"
        trees = [
            {path.relative_to(top): path.read_bytes() if path.is_file() else None for path in top.rglob("*")}
            for top in (tmp_path / "disk", tmp_path / "served")
        ]
    assert trees[0] == trees[1] and len(trees[0]) > 3


ACTS: list[Callable[[Path, Path, int], object]] = [
    lambda one, other, number: one.write_text(f"{number}" * (number % 50)),
    lambda one, other, number: one.mkdir(),
    lambda one, other, number: one.mkdir(),
    lambda one, other, number: one.rename(other),
    lambda one, other, number: one.unlink(),
    lambda one, other, number: one.rmdir(),
    lambda one, other, number: os.truncate(one, number),
    lambda one, other, number: one.chmod(0o600 | number % 8),
    lambda one, other, number: os.utime(one, (number, number + 0.5)),
    lambda one, other, number: other.hardlink_to(one),
    lambda one, other, number: _append(one, b"%d" % number),
    lambda one, other, number: one.read_bytes(),
    lambda one, other, number: sorted(os.listdir(one)),
    lambda one, other, number: (found := one.stat()) and (found.st_mode, found.st_nlink, one.is_dir() or found.st_size),
]


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _result(act: Callable[[Path, Path, int], object], one: Path, other: Path, number: int) -> object:
    try:
        result = act(one, other, number)
    except OSError as error:
        return error.errno
    return None if isinstance(result, Path) else result
