"""A run on Ray is as preemption-proof as any other: a worker of Ray is killed and its node is drained, and the run ends
with the weights and metrics of an undisturbed one."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from laststep import compat
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.frameworks import ray_keeper
from laststep.ranks.launchers import detect_world
from laststep.records.metrics import read_lines
from tests.support.forked import forked_python
from tests.support.needs import require_package
from tests.support.project import DEADLINE_S, PROJECT, wait_until
from tests.support.ranks import fingerprint, train
from tests.support.runs import undisturbed_run

RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_METRICS_ENABLED": "0"}
SOON = {f"RAY_TRAIN_{what}_INTERVAL_S": "0.5" for what in ("HEALTH_CHECK", "PREEMPTION_POLL")}
STOP = 128 + signal.SIGUSR2
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
    keys = ["task=tests.frameworks.ray_loop.main", "device=cpu", "train.log_every=1", f"launch.root={root}"]
    keys += [
        "launch.name=ray",
        "launch.tasks_per_node=2",
        *(f"checkpoint.every_{n}=null" for n in ("epochs", "minutes")),
    ]
    config = Config.load(None, keys)
    config.save(folder / "run.yaml")
    driver = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.ray_driver", folder, forked_python(), "--config", folder / "run.yaml"],
        cwd=PROJECT,
        env={**os.environ, **RAY, **SOON, "RAY_TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * DEADLINE_S,  # on a busy machine Ray takes minutes
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


def test_a_rank_stops_when_its_worker_is_gone() -> None:
    """Then the pipe between them is closed."""
    with keep(STOPPED) as keeper:
        assert keeper.stdin and keeper.stdout
        keeper.stdin.close()
        assert int(keeper.stdout.read()) == STOP


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


class Refusal(Exception):
    """Stands for ray.exceptions.RayActorError."""

    def __init__(self, error_msg: str, preempted: bool) -> None:
        super().__init__(error_msg)
        self.preempted = preempted


class Workers:
    """Two workers of a Ray that is scripted: this process is that of rank 1, and `of_rank_0` is what rank 0 says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_rank_0: list[int] = []  # how often it started, and how its rank ended
        names = ("world_rank", "world_size", "local_rank", "local_world_size", "node_rank")
        context = SimpleNamespace(**{f"get_{name}": lambda n=n: n for name, n in zip(names, (1, 2, 0, 1, 1))})
        modules: dict[str, dict[str, Any]] = {
            "ray": {},
            "ray.exceptions": {"RayActorError": Refusal},
            "ray.train": {"Result": SimpleNamespace, "get_context": lambda: context},
            "ray.train.collective": {"broadcast_from_rank_zero": lambda _: self.of_rank_0.pop(0)},
            "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": Fitting},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "laststep.frameworks.ray", raising=False)
        monkeypatch.setattr(compat, "ray_drains_a_node", lambda: False)
        self.adapter = importlib.import_module("laststep.frameworks.ray")

    def work(self, *of_rank_0: int) -> int:
        """Do what a worker does."""
        self.of_rank_0[:] = of_rank_0
        trainer = self.adapter.TorchTrainer(["--name", "first"])
        return int(trainer.train_loop(trainer.settings))


class Fitting:
    """Stands for Ray's trainer, whose workers return what `returns` says."""

    returns = 0

    def __init__(self, train_loop: Any, train_loop_config: dict[str, Any]) -> None:
        self.train_loop, self.settings = staticmethod(train_loop), train_loop_config

    def fit(self) -> SimpleNamespace:
        return SimpleNamespace(return_value=self.returns)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    yield Workers(monkeypatch)
    sys.modules.pop("laststep.frameworks.ray", None)


@pytest.mark.parametrize(
    ("own", "of_rank_0", "restarts", "announced", "outcome"),
    [
        (0, 0, 0, False, 0),
        (0, 0, 1, True, 0),  # it has finished before the node was drained
        (-signal.SIGKILL, 1, 0, False, "rank 1 on .* was killed by SIGKILL"),
        (1, -signal.SIGKILL, 0, False, "rank 1 on .* failed with exit status 1"),
        (0, STOP, 0, True, "rank 1 on .* has stopped: Ray drains a node"),
        (0, 2, 0, False, 2),  # the configuration is wrong: a retry would fail the same way
        (1, 2, 3, False, "rank 1 on .* failed"),  # it was accepted before, so a node is to blame
        (2, 1, 0, False, "rank 1 on .* failed"),  # rank 0 accepted it
    ],
)
def test_what_a_worker_returns_or_raises(
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    own: int,
    of_rank_0: int,
    restarts: int,
    announced: bool,
    outcome: int | str,
) -> None:
    """Ray starts the workers again when one raises, and takes the run for finished when all return. All wait first for
    all ranks to end, since it kills the workers that are left."""
    monkeypatch.setattr(workers.adapter, "_keep", lambda *_: (own, announced))
    if isinstance(outcome, int):
        assert workers.work(restarts, of_rank_0) == outcome
    else:
        with pytest.raises(Exception, match=outcome) as raised:
            workers.work(restarts, of_rank_0)
        assert getattr(raised.value, "preempted", False) == announced  # then max_failures is not used up
    assert workers.of_rank_0 == []


def test_a_rank_learns_its_place(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Ray, in a Slurm job too: a rank that took itself for a task of the job would requeue it."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    found: dict[str, str] = {}
    monkeypatch.setattr(workers.adapter, "_keep", lambda _, environment: (found.update(environment), (0, False))[1])
    workers.work(3, 0)
    for name in set(os.environ) - set(found):
        monkeypatch.delenv(name)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    world = detect_world()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == (1, 2, 0, 1, 1, 2)
    assert (world.launcher, world.restart, world.on_slurm) == ("ray", 3, False)


def test_a_drained_node_stops_the_rank(workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray sends no signal: it announces a drained node to its workers, here after the rank has started."""
    (tmp_path / "rank.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'up')!r}).touch(); {STOPPED}")
    monkeypatch.setattr(workers.adapter, "PACKAGE", tmp_path / "rank.py")
    monkeypatch.setattr(workers.adapter, "POLL_S", 0.01)
    monkeypatch.setattr(compat, "ray_drains_a_node", (tmp_path / "up").exists)
    with pytest.raises(Refusal, match="has stopped: Ray drains a node"):
        workers.work(0, STOP)


def test_a_refused_configuration_is_an_error(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Ray takes the run for finished."""
    trainer = workers.adapter.TorchTrainer([])
    assert trainer.fit().return_value == 0
    monkeypatch.setattr(Fitting, "returns", 2)
    with pytest.raises(ConfigError, match="refused"):
        trainer.fit()
