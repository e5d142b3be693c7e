"""The plain loop that README starts from runs, and the parts of a custom training loop can be used alone."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.forked import forked_python
from tests.support.project import DEADLINE_S, PROJECT, read_until

PAGE = (PROJECT / "docs" / "custom-loops.md").read_text()


def test_the_plain_loop_runs() -> None:
    """What the other is compared with is a real one."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    code = "from examples import plain_loop; plain_loop.EPOCHS = 1; plain_loop.main()"
    done = subprocess.run(
        [forked_python(), "-c", code],
        cwd=PROJECT,
        env={**os.environ, **place, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert re.search(r"epoch 0: loss [\d.]+, accuracy 0\.[5-9]", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(laststep(?:\.\w+)+\.\w+)`", PAGE))))
def test_the_parts_are_where_the_page_says(name: str) -> None:
    """A page that names what is not there sends its readers into the source."""
    module, _, part = name.rpartition(".")
    assert hasattr(importlib.import_module(module), part)


def start(folder: Path) -> subprocess.Popen[str]:
    """The example, on two ranks."""
    launcher = [forked_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "parts.py"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        launcher, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_the_parts_together(tmp_path: Path) -> None:
    """An example that users copy, with nothing of ours around it: stopped in the middle, it continues where it was, and
    each sample is counted once an epoch."""
    shutil.copy(PROJECT / "examples" / "parts.py", tmp_path)
    first = start(tmp_path)
    said = read_until(first, "from step 0")
    first.send_signal(signal.SIGTERM)
    said += first.communicate(timeout=DEADLINE_S)[0]
    stopped = re.findall(r"to step (\d+):", said)
    assert len(stopped) == 2 and stopped[0] == stopped[1] and int(stopped[0]) < 3000, said
    second = start(tmp_path)
    said = second.communicate(timeout=DEADLINE_S)[0]
    # The ranks print into one pipe, and their line ends may come late.
    assert re.findall(r"from step (\d+)", said) == 2 * stopped[:1]
    assert re.findall(r"to step 3000: (\d+)", said) == 2 * [str(24 * sum(range(1000)))], (
        "24 epochs of 0 + 1 + ... + 999"
    )
