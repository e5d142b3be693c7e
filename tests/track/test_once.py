"""One run in each tracker for one training, each step once, with the values of metrics.jsonl, whatever happened."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint import export
from laststep.config.config import Config
from laststep.records.metrics import CLOCK, curves_in, is_step, read_lines
from laststep.rundir import RunDir
from tests.support.needs import require_package
from tests.support.project import DEADLINE_S, PROJECT, wait_until
from tests.support.ranks import Attempt, reasons
from tests.support.runs import config
from tests.track.shown import read
from tests.track.tasks import ENDS, sent

SECRET = "correct-horse-battery"


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server, on a database of its own."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "files")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, "--port", str(port), "--workers", "1"],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    place = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{place}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(answers, "MLflow's server does not answer")
        yield place
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(DEADLINE_S)


def shown(tracker: str, place: str, run: RunDir, env: dict[str, str]) -> dict[str, Any]:
    """What a tracker shows of a run. Trackio alone is asked in a process of its own: it reads where its
    database is as it is imported."""
    if tracker != "trackio":
        return read(tracker, place, run.name)
    done = subprocess.run(
        [sys.executable, "-m", "tests.track.shown", tracker, place, run.name],
        cwd=PROJECT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def send_the_rest(run: RunDir, env: dict[str, str], *options: str) -> str:
    """The verb `track`, as on a login node."""
    done = subprocess.run(
        [sys.executable, str(PROJECT / "launch.py"), "track", str(run.path), *options],
        cwd=run.path.parent,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expected(run: RunDir) -> dict[str, list[list[Any]]]:
    """The curves in metrics.jsonl."""
    curves: dict[str, list[list[Any]]] = {}
    for line in read_lines(run.metrics):
        for name, value in curves_in(line).items():
            curves.setdefault(name, []).append([line["step"], value])
    return curves


def assert_each_step_once(found: dict[str, Any], run: RunDir) -> None:
    """All curves, but what a clock gives: there the first value stands, which need not be in the file any more."""
    wanted = expected(run)
    steps = [line["step"] for line in read_lines(run.metrics) if is_step(line)]
    assert steps == list(range(1, len(steps) + 1))
    for name, points in wanted.items():
        if name.partition("/")[2] in CLOCK:
            assert [step for step, _ in found["curves"][name]] == [step for step, _ in points], name
        else:
            assert found["curves"][name] == points, name


def test_whatever_ends_the_attempts(tmp_path: Path, mlflow_server: str) -> None:
    """A preemption, a killed rank, a kill of all ranks, and a resume on one rank: this is what no other integration
    shows as one run. The ranks wait in each attempt until every tracker has been sent something new."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "GRADIO_ANALYTICS_ENABLED": "False"}
    trackers = [
        *("track.wandb.project=tests", "track.trackio.project=tests"),
        *("track.mlflow.experiment=tests", f"track.mlflow.uri={mlflow_server}"),
    ]
    words = [
        *("task=tests.track.tasks.Tracked", "train.epochs=5", "train.shares=2", "train.log_every=1"),
        *(f"launch.env.MY_SETTING={SECRET}", f"args.api_key={SECRET}", "checkpoint.every_steps=3"),
    ]
    big = config(tmp_path, "ended", 2, (*trackers, *words))
    run = RunDir(tmp_path / "ended")
    for ends in ("SIGUSR1 1", "SIGKILL 1", "SIGKILL 0,1"):
        before = {name: sent(run, name) for name in ("wandb", "mlflow", "trackio")}
        attempt = Attempt(big, {**env, ENDS: ends, "LASTSTEP_TEST_SENT": json.dumps(before)})
        attempt.wait()
    small = config(tmp_path, "ended", 1, (*trackers, *words))
    last = Attempt(small, env)
    assert last.wait() == [0], last.output()
    assert reasons(run) == ["preempted", "failed", "lost", "finished"]
    send_the_rest(run, env)
    places = {"wandb": str(run.track("wandb")), "mlflow": mlflow_server, "trackio": "tests"}
    for tracker, place in places.items():
        found = shown(tracker, place, run, env)
        assert_each_step_once(found, run)
        text = json.dumps(found)
        assert SECRET not in text, f"{tracker} was sent a secret"
        about = {name.rpartition("laststep.")[2].removeprefix("laststep/"): v for name, v in found["about"].items()}
        assert str(about["attempts"]) == "4" and about["state"] == "finished", about
        assert about["sizes"].startswith("from step 0: 2 ranks, from step ") and about["sizes"].endswith(": 1 rank")
        assert "lost" in about["attempt_002"]


def test_nodes_without_internet(tmp_path: Path, mlflow_server: str) -> None:
    """`track --follow` on a login node sends while the run trains, and ends with it; `--weights` sends what `export`
    writes. Each step stands once."""
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline"}
    trackers = (
        "track.wandb={project: tests, mode: offline}",
        f"track.mlflow={{experiment: tests, uri: '{mlflow_server}', mode: offline}}",
    )
    attempt = Attempt(config(tmp_path, "inland", 1, (*trackers, "train.epochs=2")), env)
    run = RunDir(tmp_path / "inland")
    wait_until(lambda: run.config.exists() and any(map(is_step, read_lines(run.metrics))), "no step was done")
    send_the_rest(run, env, "--follow")
    assert attempt.wait() == [0], attempt.output()
    said = send_the_rest(run, env, "--weights")
    assert "wandb: sent up to step" in said and "mlflow: sent up to step" in said
    found = shown("mlflow", mlflow_server, run, env)
    assert_each_step_once(found, run)
    assert_each_step_once(shown("wandb", str(run.track("wandb")), run, env), run)
    assert "weights" in found["files"]
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    (sent_run,) = client.search_runs(["1"], "attributes.run_name = 'inland'")
    got = client.download_artifacts(sent_run.info.run_id, "weights/inland.safetensors", str(tmp_path))
    weights = export.read_run(run)
    (wanted, *_) = export.write(tmp_path / "own.safetensors", weights.tensors, {"format": "pt"})
    assert Path(got).read_bytes() == wanted.read_bytes()
    packed = b"".join(path.read_bytes() for path in run.track("wandb").glob("wandb/*/*.wandb"))
    assert b"inland-weights" in packed


@pytest.mark.parametrize(
    ("task", "package", "places"),
    [
        ("lightning_whole", "lightning", ("validation 4", "step 2", "step 3")),
        ("transformers_whole", "transformers", ("step 3", "step 4", "validation 2")),
    ],
)
def test_scripts_of_frameworks(
    tmp_path: Path, mlflow_server: str, task: str, package: str, places: tuple[str, str, str]
) -> None:
    """What their loops log goes the same way; a step that is struck within an accumulation is done again. The rest is
    sent between the attempts, as from a login node."""
    require_package(package)
    pytest.importorskip("trackio")
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    words = [f"task=tests.support.framework_loops.{task}", "device=cpu", "launch.tasks_per_node=2"]
    words += [
        "launch.hang_timeout_s=20",
        f"launch.root={tmp_path}",
        f"launch.name={task}",
        "track.trackio.project=tests",
        "track.wandb.project=tests",
    ]
    words += ["track.mlflow.experiment=tests", f"track.mlflow.uri={mlflow_server}"]
    struck, run = Config.load(None, words), RunDir(tmp_path / task)
    for place, number, rank in zip(places, ("SIGTERM", "SIGKILL", "SIGTERM"), (1, 0, 1)):
        attempt = Attempt(struck, {**env, "LASTSTEP_TEST_SIGNAL": f"{number} {place} rank {rank}"})
        assert 0 not in attempt.wait(), attempt.output()
        send_the_rest(run, env)
    last = Attempt(struck, env)
    assert last.wait() == [0, 0], last.output()
    send_the_rest(run, env)
    places_of = {"mlflow": mlflow_server, "trackio": "tests"}
    if package == "lightning":  # the other's last validation ends after W&B has its step, so it is in the summary
        places_of["wandb"] = str(run.track("wandb"))
    for tracker, place in places_of.items():
        assert_each_step_once(shown(tracker, place, run, env), run)
