"""`launch.py tensorboard`: TensorBoard shows each run under its own name."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from laststep.records.tensorboard_writer import TensorBoard
from laststep.rundir import RunDir
from tests.support.commands import begin, end, refusal
from tests.support.project import PROJECT, read_until, wait_until

STEP = {"step": 1, "epoch": 1, "loss": 0.5, "lr": 0.1, "samples_per_s": 50.0, "time": 1e9}


def trained(root: Path, name: str) -> RunDir:
    """A run with curves."""
    run = RunDir(root / "runs" / name)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text("{}\n")
    run.metrics.write_text(f"{json.dumps(STEP)}\n")
    TensorBoard(run, 1, writes=True).complete()
    return run


def asked(url: str, question: str, body: bytes | None = None) -> Any:
    """What the TensorBoard at `url` answers."""
    request = urllib.request.Request(url + question, body, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


@pytest.mark.parametrize("fast", ["true", "false"])
def test_runs_have_their_names(fast: str, tmp_path: Path) -> None:
    """A list of `first/tensorboard`, `second/tensorboard` is hard to read, and so is the tab HPARAMS of a sweep. Both
    of TensorBoard's loaders follow the links. A run that begins later appears, and nothing is left at the end."""
    trained(tmp_path, "first")
    varied = [{"run": f"scan-lr_{lr}", "optim.lr": lr} for lr in (0.1, 0.2)]
    (tmp_path / "runs" / "scan" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "scan" / "sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in varied))
    for line in varied:
        (tmp_path / "runs" / str(line["run"])).mkdir()
        (tmp_path / "runs" / str(line["run"]) / "logs").symlink_to("../scan/logs")
        trained(tmp_path, str(line["run"]))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, str(PROJECT / "launch.py"), "tensorboard", "--port", "0", "--host", "127.0.0.1"]
    command += ["--", "--reload_interval", "1", f"--load_fast={fast}"]
    process = begin(tmp_path, command, {"TMPDIR": str(temporary)})
    url = read_until(process, "Ctrl-C").split("is at ")[1].partition(";")[0]
    names = {"first", "scan-lr_0.1", "scan-lr_0.2"}
    wait_until(lambda: set(asked(url, "data/runs")) == names, "the runs are not listed by their names", 0.2)
    trained(tmp_path, "later")
    wait_until(lambda: set(asked(url, "data/runs")) == {*names, "later"}, "the new run does not appear", 0.2)
    wanted = {"experimentName": "", "allowedStatuses": ["STATUS_SUCCESS"], "startIndex": 0, "sliceSize": 9}
    found = asked(url, "data/plugin/hparams/session_groups", json.dumps({**wanted, "colParams": []}).encode())
    shown = {group["name"]: group["hparams"] for group in found["sessionGroups"]}
    assert shown == {line["run"]: {"optim.lr": line["optim.lr"]} for line in varied}
    process.send_signal(signal.SIGINT)
    _, errors = end(process, 130)
    assert "Traceback" not in errors
    assert not list(temporary.glob("laststep-*"))


def test_no_curves_yet(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An empty TensorBoard would leave open what is missing."""
    run = RunDir(here / "runs" / "first")
    run.path.mkdir(parents=True)
    run.config.write_text("{}\n")
    assert refusal(["tensorboard"], capfd, here).startswith("no run has curves yet")
    assert refusal(["tensorboard", "firts"], capfd, here).endswith("did you mean first?")


def test_two_runs_of_one_name(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard would take them for one."""
    for root in ("one", "two"):
        trained(here / root, "first")
    words = ["tensorboard", "one/runs/first", "two/runs/first"]
    assert refusal(words, capfd, here).startswith("first: two runs have this name")


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of a library in tensorboard
def test_what_tensorboard_refuses(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, not a page of tensorboard's options or a traceback."""
    trained(here, "first")
    said = refusal(["tensorboard", "--", "--prot=7"], capfd, here)
    assert said == "unrecognized arguments: --prot=7"
    said = refusal(["tensorboard", "--bind_all", "--host", "here"], capfd, here)
    assert said == "Must not specify both --host and --bind_all."
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["tensorboard", "--host", "127.0.0.1", "--port", str(port), "--", "--load_fast=false"]
        assert f"{port}" in refusal(words, capfd, here)
