"""A run on Ray is as preemption-proof as any other: a worker of Ray is killed and its node is drained, and the run ends
with the weights and metrics of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import forked_python
from tests.support.needs import require_package
from tests.support.project import PROJECT
from tests.support.ranks import fingerprint, train
from tests.support.undisturbed import undisturbed_run
from tests.support.waiting import DEADLINE_S, wait_until
from trainer.config.config import Config
from trainer.frameworks import ray_keeper
from trainer.records.metrics import read_lines

# Without statistics, metrics and tokens, Ray takes a second less to start.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3"}
STOPPED = "import signal, sys; sys.exit(128 + signal.sigwait({signal.SIGUSR2}))"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets of Ray."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_a_killed_worker_and_a_drained_node(root: Path, folder: Path) -> None:
    """In both cases the ranks outlive Ray's worker, and save the step that they are in."""
    require_package("ray")
    keys = ["task=tests.support.ray_loop.main", "device=cpu", "train.log_every=1", f"launch.root={root}"]
    keys += [
        "launch.name=ray",
        "launch.tasks_per_node=2",
        *(f"checkpoint.every_{n}=null" for n in ("epochs", "minutes")),
    ]
    config = Config.load(None, keys)
    config.save(folder / "run.yaml")
    driver = subprocess.run(
        [sys.executable, "-m", "tests.support.ray_driver", folder, forked_python(), "--config", folder / "run.yaml"],
        cwd=PROJECT,
        env={**os.environ, **RAY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "ended by PreemptionError" in driver.stdout, driver.stdout  # which does not count against max_failures
    run = train(config)
    assert fingerprint(run) == undisturbed_run(config)
    records = read_lines(run.attempts)
    assert [record["reason"] for record in records] == ["preempted", "preempted", "finished"], driver.stdout
    assert [record["start_step"] for record in records] == [0, 4, 6]
    assert [record["lost_steps"] for record in records] == [0, 0, 0]
    killed, drained = records[:2]
    assert killed["job_id"] == drained["job_id"] and (killed["restart"], drained["restart"]) == (0, 1)


def keep(*code: str) -> subprocess.Popen[bytes]:
    """Keep a process that runs this Python code, as a worker of Ray keeps its rank."""
    command = [sys.executable, "-IS", str(ray_keeper.__file__), sys.executable, "-c", *code]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.wait(DEADLINE_S) == 0
    return keeper


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", "3"), ("os.kill(os.getpid(), 9)", "-9")])
def test_a_worker_learns_how_its_rank_ended(end: str, status: str) -> None:
    with keep(f"import os, sys; {end}") as keeper:
        assert keeper.stdout and keeper.stdout.read().decode() == status


def test_a_rank_is_told_to_stop() -> None:
    """By the worker, which closes its end, or dies."""
    with keep(STOPPED) as keeper:
        assert keeper.stdin and keeper.stdout
        keeper.stdin.close()
        assert int(keeper.stdout.read()) == 128 + signal.SIGUSR2


def test_a_rank_is_out_of_reach_for_those_who_kill_its_worker(tmp_path: Path) -> None:
    """Ray kills the children of a worker, and its process group: then the rank could not save its last step."""
    place = tmp_path / "place"
    code = f"import os; print(os.getppid(), os.getsid(0), file=open({str(place)!r}, 'w'), flush=True); {STOPPED}"
    with keep(code) as keeper:
        assert keeper.stdin
        parent, session = map(int, wait_until(lambda: place.read_text() if place.exists() else "", "no start").split())
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        assert os.getpid() not in (parent, grandparent) and session != os.getsid(0)
        keeper.stdin.close()
