"""Who is not a rank of this attempt cannot steer it: not over the network, not with a message of an earlier moment."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from laststep.ranks.fault import Fault, MeetingError
from laststep.ranks.group import _load_seal
from laststep.ranks.process import Signals
from laststep.ranks.seal import Seal
from laststep.ranks.stop import Stop
from laststep.ranks.store import SealedStore, with_prefix
from laststep.ranks.watchdog import Beat, Probes, Watchdog
from tests.support.project import DEADLINE_S, wait_until
from tests.support.ranks import Attempt, fingerprint, reasons
from tests.support.records import a_world
from tests.support.runs import config, undisturbed

SECOND = timedelta(seconds=1)


def test_a_message_is_valid_under_its_key_and_in_its_attempt_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the report of one rank could be replayed as another's, or that of yesterday's attempt as today's."""
    seal = Seal()
    message = seal.seal("save/1/0", "written")
    assert seal.open("save/1/0", message) == "written"
    for forged in (b"written", b"", b" ", b"\xff\xfe", message[:-1], message + b"!", message.replace(b"w", b"W")):
        assert seal.open("save/1/0", forged) is None, forged
    assert seal.open("save/1/1", message) is None, "another rank's key"
    assert seal.open("save/1/01", seal.seal("save/1/0", "1")) is None, "the border between key and text"
    assert Seal().open("save/1/0", message) is None, "another attempt"


def test_an_unsigned_message_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """One line shows the user that somebody else writes to the store; thousands would bury the rest of the log."""
    seal = Seal()
    for key in ("stop/notice", "watch/fault", "stop/notice"):
        seal.open(key, b"15")
    said = "".join(capsys.readouterr())
    assert said.count("ignored a message that no rank of this attempt has signed (stop/notice)") == 1
    assert said.count("\n") == 1


def test_the_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    """Whatever the umask; and a secret that a killed attempt left is not taken for this attempt's."""
    file, seal = tmp_path / "meeting" / "7.key", Seal()
    Seal().save(file)
    assert Seal.load(file, seal.fingerprint, timedelta()) is None
    seal.save(file)
    found = Seal.load(file, seal.fingerprint, timedelta())
    assert found is not None and found.open("key", seal.seal("key", "text")) == "text"
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]


def test_a_run_folder_that_the_nodes_do_not_share(tmp_path: Path) -> None:
    """With MASTER_ADDR the ranks reach each other without a common disk, but not the secret. One line says where it is
    and asks the right question."""
    file = tmp_path / "7.key"
    with pytest.raises(MeetingError, match=rf"this attempt's secret in {file}, which .* did not find .* see its disk"):
        _load_seal(a_world(1, 2), file, Seal().fingerprint, timedelta())


def test_in_the_store_a_forged_value_counts_as_absent() -> None:
    """A rank that waits for a value waits for a signed one, and the first signed one counts."""
    raw = dist.HashStore()
    raw.set_timeout(SECOND)
    store = SealedStore(raw, Seal())
    raw.set("report", "forged")
    assert not store.check(["report"])
    with pytest.raises(dist.DistError, match=r"no signed message within 0\.2 s, keys: report"):
        store.wait(["report"], timedelta(seconds=0.2))
    late = threading.Timer(0.3, store.set, ("report", "genuine"))
    late.start()
    assert store.get("report") == b"genuine" and store.check(["report"])
    late.join()

    for forged in (b"15", b"\xff", b""):
        raw.set("notice", forged)
        assert store.compare_set("notice", "", "10") == b"10", "in place of the forged value"
    assert store.compare_set("notice", "", "12") == b"10", "the first one counts"
    store.delete_key("notice")
    assert store.compare_set("notice", "", "12") == b"12"


def test_a_prefix_belongs_to_the_key() -> None:
    """A report on a save must not be valid as anything else's message."""
    raw, seal = dist.HashStore(), Seal()
    saves, others = with_prefix("save", SealedStore(raw, seal)), SealedStore(raw, seal).with_prefix("other")
    saves.set("1/0", "written")
    assert SealedStore(raw, seal).get("save/1/0") == b"written"
    raw.set("other/1/0", raw.get("save/1/0"))
    assert not others.check(["1/0"])
    plain = with_prefix("save", dist.HashStore())
    plain.set("1/0", "written")
    assert plain.get("1/0") == b"written"


def test_a_forged_notice_stops_nobody_and_a_real_one_still_does() -> None:
    """The notice and the answers to it are written by the outsider before the ranks write theirs."""
    raw, seal = dist.HashStore(), Seal()
    for key in ("stop/notice", "stop/tick/0", "stop/tick/1"):
        raw.set(key, "15")
    failures: list[str] = []
    stops = [Stop(a_world(rank, 2), SealedStore(raw, seal), Signals(), failures.append) for rank in range(2)]
    for stop in stops:
        assert all(stop.begin_tick() for _ in range(3))
    stops[1].begin_tick()
    stops[0]._notify(signal.SIGUSR2)
    for stop in stops:
        stop._thread.join(DEADLINE_S)
        assert not stop._thread.is_alive() and stop.signal == signal.SIGUSR2
    assert [stop.begin_tick() for stop in stops] == [True, False], "both end after the fourth tick"
    assert not failures


def test_a_replayed_heartbeat_is_not_a_sign_of_life() -> None:
    """An outsider who repeats a hung rank's earlier heartbeats would keep the others waiting for it."""
    watch = Watchdog(Probes(world=lambda: a_world(0, 2)), 60, on_fault=print)
    try:
        beats = [Beat("here", 7, 5, "training", "?", False, 0.0)] * 2
        watch._compare(beats)
        watch._compare([replace(beat, round=8) for beat in beats])
        watch._compare([replace(beats[0], round=9), replace(beats[1], round=3, progress=1)])
        assert [silent > 0 for silent in watch._silent_s] == [False, True]
        assert watch._still_s > 0, "nor is it progress"
    finally:
        watch.close()


def test_an_outsider_with_the_stores_own_client(root: Path) -> None:
    """Another user's process on the same machine reaches the port. Without the secret it finds the keys, asks for a
    stop, reports a fault, a save and a heartbeat; it sends garbage and leaves connections open. The run trains on to
    its end, with the same weights, and its log names the first unsigned message."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = root / "hold"
    folder.mkdir()
    options = ("checkpoint.every_steps=2",)
    mine = ("task=tests.support.tasks.Held", f"launch.init_method=tcp://localhost:{port}")
    attempt = Attempt(config(root, "attacked", 2, (*options, *mine)), {"LASTSTEP_TEST_HOLD": f"5 {folder}"})
    wait_until(lambda: len(list(folder.iterdir())) == 2, "the ranks did not reach their fifth step")

    outsider = dist.TCPStore("localhost", port, None, False, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
    assert outsider.check(["watch/beat/0", "stop/notice"]) is False and outsider.check(["watch/beat/0"])
    fault = json.dumps(asdict(Fault("failed", "forged", retry="no")))
    report = json.dumps({"files": {}, "error": None})
    forged = {"stop/notice": "15", "stop/tick/0": "99", "watch/fault": Seal().seal("watch/fault", fault).decode()}
    saves = {f"save/{number}/{key}": report for number in (3, 4) for key in (0, 1, "result")}
    for key, text in {**forged, **saves, "watch/beat/1": "{}", "save/token": "../../elsewhere"}.items():
        outsider.set(key, text)
    outsider.set("watch/beat/1", outsider.get("watch/beat/0"))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 4096, b""):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(garbage)
    with contextlib.ExitStack() as half_open:
        for _ in range(20):
            half_open.enter_context(socket.create_connection(("localhost", port)))
        for rank in range(2):
            attempt.wait_for("ignored a message that no rank of this attempt has signed", rank)
        (folder / "go").touch()
        codes = attempt.wait()

    assert codes == [0, 0], attempt.output()
    assert reasons(attempt.run) == ["finished"] and fingerprint(attempt.run) == undisturbed(2, options)
    for log in attempt.logs:
        assert log.read_text().count("no rank of this attempt has signed") == 1, log.read_text()
    assert not list(attempt.run.path.rglob("*.key")), "the secret is not left behind"
