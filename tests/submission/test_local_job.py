"""`submit(config, local=True)`: the run that a program or a notebook trains on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from laststep import Config, submit
from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.commands import LONG
from tests.support.forked import forked_python
from tests.support.needs import require_program
from tests.support.project import PROJECT, wait_until
from tests.support.ranks import reasons

TINY = ("data.name=fake", "data.args.samples=64", "data.args.image_size=8", "train.max_steps=3", "device=cpu")
TASK = """
from laststep.tasks.classification import Classification

class Mine(Classification):
    def datasets(self):
        print("numbers:", open("numbers.txt").read(), flush=True)
        return super().datasets()
"""


def config(root: Path, name: str, *words: str) -> Config:
    return Config.load("mnist", [f"launch.root={root}", f"launch.name={name}", *words])


def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell shows the run as it trains, with a task from the notebook's folder, and gets its metrics."""
    require_program("jupyter-execute", "pip install nbclient ipykernel", str(Path(sys.executable).parent))
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "numbers.txt").write_text("1 2 3")
    words = [*TINY, "launch.name=cell", "task=my_task.Mine"]
    cell = nbformat.v4.new_code_cell(
        "from laststep import Config, submit\n"
        f"job = submit(Config.load('mnist', {words!r}), local=True)\n"
        "print('its result is of step', job.result()['step'])\n"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for output in cell["outputs"])
    assert "step 3/3" in said and "numbers: 1 2 3" in said and "its result is of step 3" in said
    assert reasons(RunDir(tmp_path / "runs" / "cell")) == ["finished"]


def test_interrupted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in a program, or a notebook's stop button: the last step is saved before the program continues."""
    job = submit(config(tmp_path, "long", *LONG), local=True)
    what = "[laststep] config from Python, task tests.support.tasks.Unhurried, runs in "
    assert capfd.readouterr().err.startswith(what), "as every start says"

    def interrupt() -> None:
        wait_until(lambda: read_lines(job.run.metrics), "the run did not begin to train")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        job.result()
    (attempt,) = read_lines(job.run.attempts)
    assert job.done() and attempt["lost_steps"] == 0 and attempt["end_step"] > 0


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only torch can check is refused as a wrong configuration, and leaves nothing behind."""
    monkeypatch.setattr(sys, "executable", forked_python())
    job = submit(config(tmp_path, "wrong", *TINY, "model.args.depth=3"), local=True)
    with pytest.raises(ConfigError, match=r"model.args=\{'depth': 3\}: convnet does not take them"):
        job.result()
    assert not job.run.path.exists()


def test_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has started a run learns which rank failed, why and where, not only in which folder to look."""
    monkeypatch.setattr(sys, "executable", forked_python())
    words = [word for word in TINY if "max_steps" not in word]
    two = ("launch.tasks_per_node=2", "task=tests.support.tasks.Broken", "train.batch_size=16", "train.epochs=1")
    job = submit(config(tmp_path, "broken", *words, *two), local=True)
    where = r"rank 1 on \S+ failed: ValueError: a bad sample \(tasks.py, line \d+, in forward\)"
    with pytest.raises(RuntimeError, match=rf"broken failed before its end: {where}; the ranks' logs are in "):
        job.result()
