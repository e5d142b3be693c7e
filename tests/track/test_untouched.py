"""What a tracker does is nothing to the training: one that hangs, one that refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.records.media import media_of
from laststep.records.metrics import is_step, read_lines
from laststep.records.probes import TO_TRACKERS, without_trackers
from laststep.rundir import RunDir
from tests.alert.server import webhook
from tests.support.project import wait_until
from tests.support.ranks import Attempt, reasons
from tests.support.runs import config
from tests.track.test_once import send_the_rest, shown

ALL_TRACKERS = """
import json, os, sys
for name in json.loads(sys.argv[1]):
    os.environ.pop(name, None)
import mlflow, trackio, wandb
wandb.init(project="p", id="own", resume="must").log({"loss": 1.0})
trackio.init(project="p", name="own", resume="allow")
trackio.log({"loss": 1.0})
trackio.finish()
mlflow.log_metric("loss", 1.0)  # begins a run, which ends with the process
mlflow.log_artifact(__file__)
"""


def test_silent_trackers(tmp_path: Path) -> None:
    """What keeps a script's own trackers silent does so in the packages that are installed: they fail nowhere, write
    into the one folder, and ask no server."""
    for name in ("mlflow", "trackio", "wandb"):
        pytest.importorskip(name)
    (tmp_path / "here").mkdir()
    (tmp_path / "all.py").write_text(ALL_TRACKERS)
    with webhook() as server:
        url = server.url.replace("json://someone:hush@", "http://")
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HOME")}
        env |= {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": url, "WANDB_API_KEY": 40 * "a", "WANDB_RUN_ID": "own"}
        env |= {"MLFLOW_RUN_ID": "own", "MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_REGISTRY_URI": url}
        env |= {"TRACKIO_SERVER_URL": f"{url}?write_token=t", "TRACKIO_WEBHOOK_URL": url}
        env |= without_trackers(tmp_path / "silent")
        words = [sys.executable, str(tmp_path / "all.py"), json.dumps(TO_TRACKERS)]
        done = subprocess.run(words, cwd=tmp_path / "here", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not server.asked
    assert {path.name for path in (tmp_path / "silent").iterdir()} == {"mlflow", "trackio"}
    assert not list((tmp_path / "here").iterdir())


def hurried() -> None:
    """Programs get a second at the end of a run, not ten."""
    from laststep.ranks import beside

    beside.LAST_S = 1.0


def test_a_server_that_hangs(tmp_path: Path) -> None:
    """It takes the connection and never answers. The run ends as ever, its sender is killed, and `status` knows."""
    pytest.importorskip("mlflow")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        attempt = Attempt(
            config(tmp_path, "hanging", 1, ("track.mlflow.experiment=e", f"track.mlflow.uri={place}")), before=hurried
        )
        assert attempt.wait() == [0], attempt.output()
    run = RunDir(tmp_path / "hanging")
    assert reasons(run) == ["finished"]
    assert [line["step"] for line in read_lines(run.metrics) if is_step(line)] == list(range(1, 15))
    wait_until(lambda: not senders(run), "the sender outlives the run")


def test_pictures(tmp_path: Path) -> None:
    """They are kept once, with the step that they were logged in, though that was done twice; W&B's package takes
    each."""
    pytest.importorskip("wandb")
    words = ["task=tests.track.tasks.pictures", "device=cpu", f"launch.root={tmp_path}", "launch.name=pictures"]
    settings = Config.load(None, [*words, "track.wandb={project: p, mode: offline}"])
    killed = Attempt(settings, {"LASTSTEP_TEST_SIGNAL": "SIGKILL step 4 rank 0"})
    assert killed.wait() == [-9], killed.output()
    last = Attempt(settings)
    assert last.wait() == [0], last.output()
    run = RunDir(tmp_path / "pictures")
    assert reasons(run) == ["lost", "finished"]
    kept = {step: [path.name for path in media_of(run, step)] for step in range(7)}
    assert {step: names for step, names in kept.items() if names} == {
        3: ["rows.json", "said.txt", "seen.png", "spread.json"],
        5: ["last.png"],
    }
    env = {"WANDB_MODE": "offline"}
    send_the_rest(run, env)
    curves = shown("wandb", str(run.track("wandb")), run, env)["curves"]
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5]
    for name, step in {"seen": 3, "spread": 3, "rows": 3, "said": 3, "last": 5}.items():
        assert any(curve.partition("/")[0] == name and points[0][0] == step for curve, points in curves.items()), curves


def senders(run: RunDir) -> list[str]:
    """The processes that send for a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "laststep.track.sender" in words and str(run.path) in words:
            found.append(path.parent.name)
    return found
