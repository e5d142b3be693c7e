"""A framework that is not installed: one line, with the command that installs it. One that is not used: no import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laststep import frameworks
from laststep.code.task_check import check_task
from laststep.config.errors import ConfigError
from tests.support.forked import forked_python
from tests.support.needs import OPTIONAL, require_package
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.runs import SMALL

LOOPS = "tests.support.custom_loops"


@pytest.mark.parametrize("adapter", ["fabric", "lightning", "ray", "transformers"])
def test_an_adapter_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    """In a rank, which may have another environment than the command."""
    name = f"laststep.frameworks.{adapter}"
    package = frameworks.PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    for each in frameworks.PACKAGES:  # one may import another
        monkeypatch.delitem(sys.modules, each, raising=False)
    with pytest.raises(ConfigError, match=rf"laststep.frameworks.\w+ needs {package}: pip install '{package}.*>=\d"):
        importlib.import_module(name)


def test_the_command_says_so_before_it_submits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without importing the script: a job that fails after hours in the queue would be worse."""
    (tmp_path / "mine.py").write_text("from laststep.frameworks.lightning import Trainer\ndef main(run): ...\n")
    monkeypatch.setitem(frameworks.PACKAGES, "laststep.frameworks.lightning", "not_installed")
    monkeypatch.setitem(frameworks.VERSIONS, "not_installed", "not_installed>=1")
    with pytest.raises(ConfigError, match=r"task=mine.main: .*needs not_installed: pip install 'not_installed>=1'"):
        check_task("mine.main", [tmp_path])


def test_a_rank_imports_no_framework_by_itself(tmp_path: Path) -> None:
    """Each would add seconds to every start of every rank, of those too who use none."""
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('laststep', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end\n"
        f"print('imported', sorted({{name.split('.')[0] for name in sys.modules}} & {set(OPTIONAL)}))\n"
    )
    for words in (
        [*SMALL, "train.max_steps=2"],
        [f"task={LOOPS}.as_long_as_configured", "train.epochs=1", "device=cpu"],
    ):
        done = subprocess.run(
            [forked_python(), "-c", code, *words, f"launch.root={tmp_path}", "--name", f"run{len(words)}"],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.stdout.splitlines()[-1:] == ["imported []"], done.stdout + done.stderr


def test_lightning_by_its_other_name(tmp_path: Path) -> None:
    """Most tutorials write `import pytorch_lightning`. Its classes are not those of `lightning`: the adapter takes the
    ones that the script has imported, or says so."""
    require_package("pytorch_lightning")
    (tmp_path / "named.py").write_text(
        "import pytorch_lightning as pl, torch\n"
        "from laststep.frameworks.lightning import Trainer\n"
        "class Module(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch, number):\n"
        "        return self.layer(batch[0]).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "def main(run):\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
        "    loader = torch.utils.data.DataLoader(data, 2, shuffle=True)\n"
        "    trainer = Trainer(run, max_epochs=1, accumulate_grad_batches=2, logger=False)\n"
        "    trainer.fit(Module(), loader)\n"
        "    return {'steps': trainer.global_step}\n"
    )
    done = subprocess.run(
        [forked_python(), "-m", "laststep", "task=named.main", "device=cpu", "launch.root=runs", "--name", "named"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROJECT}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0 and "finished: steps 2" in done.stdout, done.stdout + done.stderr
