"""What a configuration wants of trackers: what cannot send is refused before anything is submitted, in one line with
the fix; and what the core asks for: variables of a script that sends by itself, senders, links."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from laststep import rooms
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.rundir import RunDir
from laststep.track import wanted
from tests.support.records import a_world

HERE = Machine(Way.LOCAL)


def refusal(*words: str) -> str:
    """The one line."""
    with pytest.raises(ConfigError) as found:
        wanted.check(Config.load(None, words), HERE)
    text = str(found.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "word, says",
    [
        ("track.wandb.projet=p", "track.wandb.projet: no such word; did you mean project?"),
        ("track.wandb.entity=e", "track.wandb: project is missing; add track.wandb.project=NAME"),
        ("track.wandb={project: p, mode: of}", "track.wandb.mode=of: must be one of online, offline"),
        ("track.trackio={project: a/b}", "at most 128 characters"),
        ("track.mlflow={experiment: e, by: me}", "track.mlflow.by=me: must be one of laststep, script"),
        ("track.mlflow={experiment: e, uri: [1]}", "track.mlflow.uri=[1]: must be a name"),
        ("track.mlflow={experiment: e, uri: localhost}", "must begin with http:// or https://"),
        ("track.mlflow={experiment: e, uri: 'sqlite:////no/where/x.db'}", "there is no folder /no/where"),
        ("track.mlflow={experiment: e, uri: 'sqlite:///x.db'}", "needs a whole path, with four slashes"),
        ("track.mlflow={experiment: e, uri: 'localhost:5000'}", "must begin with http:// or https://"),
        ("track.mlflow={experiment: e, uri: 'htp://h'}", "uri=htp://h: must begin with http:// or https://"),
        ("track.mlflow={experiment: e, uri: 'http://'}", "uri=http://: no address; write http://HOST:PORT"),
        ("track.mlflow={experiment: e, uri: 'http://[::1'}", "no address; write http://HOST:PORT"),
        ("track.mlflow={experiment: e, uri: 'http://h:port'}", "no address; write http://HOST:PORT"),
        ("track.mlflow={experiment: e, uri: 'http://u:hush@h:99999'}", "http://(hidden)@h:99999: no address"),
        ("track.wandb={project: p, tags: [[a]]}", "track.wandb.tags=[['a']]: must be a list of words"),
        ("track.wandb.project=", "track.wandb.project=null: must be a name"),
    ],
)
def test_wrong_words(word: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt word would leave the run without a tracker, which is noticed when it is over."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: True)
    assert says in refusal(word)


class Server(HTTPServer):
    """Answers each request with this status and text."""

    status, text = 200, ""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(found.text.encode())

        do_POST = do_GET

        def log_message(self, *words: object) -> None: ...

    found = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_wrong_address_or_key(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of them is found out in the first minute of a job that has waited for hours, else."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: True)
    place = f"http://127.0.0.1:{server.server_port}"
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    mlflow = f"track.mlflow={{experiment: e, uri: '{place}'}}"
    wandb = ("track.wandb.project=p", f"launch.env.WANDB_BASE_URL={place}", "launch.env.WANDB_API_KEY=" + 40 * "a")
    assert "no key for W&B: type `wandb login`" in refusal(wandb[0])
    server.status, server.text = 401, "{}"
    assert f"{place} refuses this key or password (401)" in refusal(mlflow)
    assert f"{place} refuses this key or password (401)" in refusal(*wandb)
    server.status = 404
    assert "is no MLflow server" in refusal(mlflow)
    assert "is no W&B server" in refusal(*wandb)
    server.status = 200
    for server.text in ("<html>", "[1]"):
        assert "is no MLflow server" in refusal(mlflow)
        assert "is no W&B server" in refusal(*wandb)
    server.text = json.dumps({"data": [1], "experiment": "e"})
    wanted.check(Config.load(None, [mlflow.replace(place, f"{place}/a b")]), HERE)
    assert "does not know this key" in refusal(*wandb)
    server.text = json.dumps({"data": {"viewer": None}})
    assert "does not know this key" in refusal(*wandb)
    server.text = json.dumps({"experiment": {"lifecycle_stage": "deleted"}})
    assert "track.mlflow.experiment=e: was deleted there" in refusal(mlflow)
    server.text = json.dumps({"data": {"viewer": {"id": "x"}}, "experiment": {"lifecycle_stage": "active"}})
    wanted.check(Config.load(None, [mlflow, *wandb]), HERE)
    server.status, server.text = 404, json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST"})
    wanted.check(Config.load(None, [mlflow]), HERE)  # a new experiment
    offline = mlflow.replace("}", ", mode: offline}")
    server.status = 401
    wanted.check(Config.load(None, [offline]), HERE)


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the way that needs none."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        text = refusal(f"track.mlflow={{experiment: e, uri: 'http://127.0.0.1:{taken.getsockname()[1]}'}}")
    assert "does not answer (Connection refused); with track.mlflow.mode=offline" in text
    assert "track RUN" in text


def test_a_resume_needs_no_tracker(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A server that is down for an hour must not keep a run of weeks from its next job."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: True)
    config = Config.load(None, ["track.mlflow={experiment: e, uri: 'http://127.0.0.1:9'}"])
    wanted.check(config, Machine(Way.SLURM, new=False))
    assert "WARNING: track.mlflow: http://127.0.0.1:9 does not answer" in capfd.readouterr().err


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender would find out, in a log that nobody reads."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: None)
    assert "this Python lacks trackio: pip install trackio" in refusal("track.trackio.project=p")
    for other in ("launch.container=image.sif", "launch.uv=true", "launch.python=python3"):  # which may have it
        wanted.check(Config.load(None, ["track.trackio.project=p", other]), HERE)


def test_a_server_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program listens at this port, such as sshd."""
    monkeypatch.setattr(wanted, "find_spec", lambda name: True)

    def answer(listening: socket.socket) -> None:
        other, _ = listening.accept()
        with other:
            other.recv(1000)
            other.sendall(b"SSH-2.0-x\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,)).start()
        place = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert f"{place} answers, but is no MLflow server" in refusal(f"track.mlflow={{experiment: e, uri: '{place}'}}")


def test_a_script_that_sends_by_itself(tmp_path: Path) -> None:
    """Rank 0 finds the same run in each attempt, or there would be one per attempt; the other ranks find nothing, or
    they would write to that run, too. And no sender of ours does."""
    run = RunDir(tmp_path / "own")
    words = ["track.wandb={project: p, entity: e, by: script}", f"launch.root={tmp_path}", "launch.name=own"]
    config = Config.load(None, words)
    run.path.mkdir()
    first = wanted.environment(config, run, a_world(0, 2))
    assert first == wanted.environment(config, run, a_world(0, 2))
    assert wanted.environment(config, run, a_world(1, 2)) == {}
    assert first["WANDB_RESUME"] == "allow" and len(first["WANDB_RUN_ID"] or "") == 12
    assert (first["WANDB_PROJECT"], first["WANDB_ENTITY"], first["WANDB_NAME"]) == ("p", "e", "own")
    assert wanted.programs(config, run) == []


def test_a_script_that_is_only_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prove`, --smoke and a replay: nothing leads its tracker to a run or a server, and no server makes a run."""
    run = RunDir(tmp_path / "own")
    words = ["track.wandb={project: p, by: script, mode: offline}", "track.mlflow={experiment: e, by: script}"]
    config = Config.load(None, [*words, f"launch.root={tmp_path}", "launch.name=own"])
    monkeypatch.setenv(rooms.PROBED, "{}")
    monkeypatch.setenv("MLFLOW_RUN_ID", "another")
    undo = rooms.export(config, run, a_world(0, 1))
    assert not {"WANDB_RUN_ID", "WANDB_MODE", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"} & os.environ.keys()
    assert not run.path.exists()
    undo()
    assert os.environ["MLFLOW_RUN_ID"] == "another"


def test_who_sends(tmp_path: Path) -> None:
    """A process of its own for each tracker, as one that hangs would hold up the others; none where the job cannot."""
    words = ["track.wandb={project: p, mode: offline}", "track.mlflow={experiment: e, uri: 'http://h'}"]
    config = Config.load(None, [*words, "track.trackio.project=p"])
    assert [one.name for one in wanted.programs(config, RunDir(tmp_path))] == ["track-mlflow", "track-trackio"]


def test_links(tmp_path: Path) -> None:
    """Where the run is, or why it is not there."""
    run = RunDir(tmp_path)
    for tracker, sent in {
        "mlflow": {"id": "1", "url": "http://h/#/1", "step": 5, "error": None},
        "trackio": {"id": "2", "url": None, "step": 5, "error": "OSError: full"},
        "wandb": {"id": None, "url": None, "step": 0, "error": "CommError: 403"},
    }.items():
        run.track(tracker).mkdir(parents=True)
        (run.track(tracker) / "sent.json").write_text(json.dumps(sent))
    assert wanted.links(run) == {
        "mlflow": "http://h/#/1",
        "trackio": "run 2, not sent since step 5: OSError: full",
        "wandb": "not sent since step 0: CommError: 403",
    }
