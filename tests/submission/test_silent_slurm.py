"""Slurm's controller does not answer: every command says so soon, and nothing is left behind.

A command that hangs for half a minute is pressed Ctrl-C on, and what it leaves then must not stand in the way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.rundir import RunDir
from laststep.submission import local
from tests.support.commands import begin, fake_squeue, refusal
from tests.support.project import DEADLINE_S, PROJECT

SILENT = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture
def run(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> RunDir:
    """A run that was submitted; then Slurm fell silent."""
    assert main(["--name", "mine"]) == 0
    capfd.readouterr()
    for name in ("squeue", "scancel", "scontrol", "sbatch"):
        (slurm / name).write_text(SILENT)
        (slurm / name).chmod(0o755)
    return RunDir(here / "runs" / "mine")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["status", "mine"], 0, "squeue does not answer"),
        (["cancel", "mine"], 1, "squeue does not answer"),
        (["resume", "mine"], 2, "squeue does not answer, so a job of this run may still be alive"),
        (["resume", "mine", "--local"], 2, "train here: python launch.py resume mine --local --force"),
        (["logs", "mine"], 0, ""),
        (["--name", "another"], 2, "error: Slurm does not answer (scontrol ping); try again later"),
        (["--name", "another", "--follow", "launch.grace_s=30"], 2, "Slurm does not answer (scontrol ping)"),
        (["sweep", "--name", "scan", "seed=0,1"], 2, "Slurm does not answer (scontrol ping)"),
        (["--name", "another", "--dry-run"], 0, "#SBATCH"),
    ],
)
def test_answers_soon(run: RunDir, words: list[str], status: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Within seconds. sbatch alone would say nothing for a minute."""
    began = time.monotonic()
    assert main(words) == status
    assert time.monotonic() - began < 20
    assert says in "".join(capfd.readouterr())


def test_a_busy_controller(run: RunDir, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On a large cluster squeue takes seconds. As long as the controller answers a ping, its answer is worth the wait:
    without it the run would be called unknown."""
    (slurm / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (slurm / "squeue").write_text(fake_squeue("4711").replace("\n", "\nsleep 2\n", 1))
    assert main(["status", "mine", "--json"]) == 0
    assert '"state": "unknown"' not in capfd.readouterr().out


def test_a_new_sweep_without_a_cluster(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """None of its runs was ever submitted, so there is nothing to ask squeue: the line names what is wrong."""
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: fatal: no configuration source' >&2\nexit 1\n")
    assert main(["sweep", "--name", "scan", "seed=0,1"]) == 2
    assert capfd.readouterr().err.startswith("error: no Slurm answers here (no configuration source)")
    assert not list((here / "runs").iterdir())


def test_force(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """When the cluster is gone, its queue cannot be asked ever again. The run's lock still protects it."""
    monkeypatch.setattr(local, "run_local", lambda *_: 0)
    assert main(["resume", "mine", "--local", "--force"]) == 0
    capfd.readouterr()
    assert "--force: needs --local" in refusal(["resume", "mine", "--force"], capfd, here)


def test_force_is_no_licence(run: RunDir, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Slurm answers, and shows a job of the run: two attempts at once are never right."""
    (slurm / "squeue").write_text(fake_squeue("4711"))
    assert "job 4711 of this run is in the queue" in refusal(["resume", "mine", "--local", "--force"], capfd, here)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_submission_that_is_interrupted(slurm: Path, here: Path, number: signal.Signals) -> None:
    """No name is taken: the same command can be typed again."""
    (slurm / "sbatch").write_text(f"#!/bin/sh\necho $$ > {slurm}/asked\nexec sleep 600\n")
    process = begin(here, [sys.executable, str(PROJECT / "launch.py"), "--name", "mine"])
    deadline = time.monotonic() + DEADLINE_S
    while not (slurm / "asked").exists():
        assert time.monotonic() < deadline and process.poll() is None, "sbatch was not called"
        time.sleep(0.02)
    process.send_signal(number)
    try:
        assert process.wait(10) == 128 + number
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((slurm / "asked").read_text()), signal.SIGKILL)
        process.communicate()
    assert not (here / "runs" / "mine").exists()


def test_an_interrupted_resume(run: RunDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run keeps the configuration of its last submission."""
    for name in ("squeue", "scontrol"):
        (slurm / name).write_text("#!/bin/sh\n")
    before = run.config.read_text()

    def interrupted(*_: object) -> None:
        assert run.config.read_text() != before
        raise KeyboardInterrupt

    monkeypatch.setattr("laststep.submission.sbatch.submit_jobs", interrupted)
    assert main(["resume", "mine", "--nodes", "2"]) == 130
    assert run.config.read_text() == before
