"""`python -m laststep hello`: a launcher that cannot start it cannot start a run either, and it says why in seconds."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks.device import choose_backend
from tests.support.commands import begin, end, files
from tests.support.forked import forked_python
from tests.support.needs import require_program
from tests.support.project import DEADLINE_S

HELLO = ["-m", "laststep", "hello"]
PLAIN = [sys.executable, *HELLO]
TWO = {"WORLD_SIZE": "2"}  # set by any launcher that sets torch's own variables


def a_script(patch: str) -> list[str]:
    """`python -m laststep hello` in a rank that first runs this Python code."""
    code = f"import sys, os\n{patch}\nfrom laststep.cli.rank import hello\nsys.exit(hello([]))"
    return [forked_python(), "-c", code]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ([], 1),
        (["--spawn", "2"], 2),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2),
        (["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"], 2),
    ],
    ids=["python", "spawn", "torchrun", "mpirun"],
)
def test_every_launcher(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    """Every rank in rank order, the right sum, exit status 0; no warning, and nothing left behind."""
    if "mpirun" in launcher:
        require_program("mpirun", "apt-get install openmpi-bin")
    command = [*PLAIN, *launcher]
    if launcher[:1] not in ([], ["--spawn"]):
        command = [*launcher, *(HELLO if "torch.distributed.run" in launcher else PLAIN)]
    if "--spawn" in launcher or "torch.distributed.run" in launcher:  # their processes are forked, with torch loaded
        command = [forked_python() if word == sys.executable else word for word in command]
    said, errors = end(begin(tmp_path, command))
    greetings = re.findall(r"^\[(.+)\] hello from \[(\S+):(\w+)\] rank (\d)/(\d)$", said, re.MULTILINE)
    assert [(rank, size) for *_, rank, size in greetings] == [(str(rank), str(ranks)) for rank in range(ranks)]
    assert {backend for _, _, backend, *_ in greetings} == {"gloo" if ranks > 1 else "alone"}
    assert ranks == 1 or re.fullmatch(r"\S+:\d+", greetings[0][0]), "where they met"
    assert f"sum of ones: {ranks} on every rank" in said
    assert errors == ""
    assert files(tmp_path) == []


def test_variables(tmp_path: Path) -> None:
    """A node with a different environment stands out: a variable that is the same on all ranks is shown once."""
    alike = {**TWO, "NCCL_DEBUG": "INFO"}
    ranks = [
        begin(
            tmp_path,
            [forked_python(), *HELLO, "--env"],
            {**alike, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(7 + rank)},
        )
        for rank in range(2)
    ]
    (said, _), (nothing, _) = map(end, ranks)
    assert nothing == "", "only rank 0 prints"
    shown = re.findall(r"^((?:every rank|rank \d): (?:NCCL|CUDA).*)$", said, re.MULTILINE)
    assert shown == ["rank 0: CUDA_VISIBLE_DEVICES=7", "rank 1: CUDA_VISIBLE_DEVICES=8", "every rank: NCCL_DEBUG=INFO"]


def test_a_wrong_sum(tmp_path: Path) -> None:
    """A machine that sums wrongly ruins every run on it, and nothing else would show which machine it is."""
    lies = "import torch.distributed as dist\ndist.all_reduce = lambda one: one.fill_(2 + int(os.environ['RANK']))"
    ranks = [begin(tmp_path, a_script(lies), {**TWO, "RANK": str(rank)}) for rank in range(2)]
    said, errors = end(ranks[0], status=1)
    assert re.fullmatch(r"error: rank 1 on \S+: the sum of 2 ones is 3\n", errors)
    assert "on every rank" not in said
    end(ranks[1], status=1)


def test_rank_0_leaves_last(tmp_path: Path) -> None:
    """A rank that is slow to read the store for the last time: torch prints pages if the store is gone by then."""
    slow = (
        "import time\nfrom laststep.ranks.meeting import SealedStore as Store\nread = Store._read\n"
        "Store._read = lambda store, keys: (time.sleep(2 * (keys == ['closing/open'])), read(store, keys))[1]"
    )
    ranks = [begin(tmp_path, a_script(slow), {**TWO, "RANK": str(rank)}) for rank in range(2)]
    began = time.monotonic()
    assert [end(one)[1] for one in ranks] == ["", ""]
    assert time.monotonic() - began > 2, "no rank was slow"


def test_a_rank_that_does_not_start(tmp_path: Path) -> None:
    """It is named on one line, and the file that rank 0 published for it is removed."""
    impatient = "from laststep.ranks import group\ngroup.MEETING_S = 2.0"
    _, errors = end(begin(tmp_path, a_script(impatient), {**TWO, "RANK": "0"}), status=1)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert re.search(r"rank 1 on .+ did not join within 2 s", line)
    assert "Traceback" not in errors
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_ctrl_c(number: signal.Signals, tmp_path: Path) -> None:
    """It exits at once, although rank 0 waits in C for the other rank, and leaves nothing behind."""
    waiting = begin(tmp_path, [forked_python(), *HELLO], {**TWO, "RANK": "0"})
    deadline = time.monotonic() + DEADLINE_S
    while not list(tmp_path.glob("runs/.hello-*.json")):
        assert time.monotonic() < deadline and waiting.poll() is None, "rank 0 published no address"
        time.sleep(0.02)
    waiting.send_signal(number)
    _, errors = end(waiting, status=128 + number)
    assert errors == ""
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--backend", "nccl"], "launch.backend=nccl: needs a GPU for each rank, but torch finds no GPU"),
        (["--backend", "nccl", "--spawn", "2"], "launch.backend=nccl: needs a GPU for each rank"),
        (["--backend", "nccl2"], "launch.backend=nccl2: did you mean nccl?"),
        (["--spawn", "0"], "--spawn 0: must be at least 1"),
        (["--spwan", "2"], "--spwan: no such option; did you mean --spawn?"),
        (["launch.root=/proc/version/runs"], "/proc/version is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(words: list[str], says: str, tmp_path: Path) -> None:
    """One line, exit status 2."""
    said, errors = end(begin(tmp_path, [forked_python(), *HELLO, *words]), status=2)
    assert said == "" and errors.startswith("error: ") and says in errors and errors.count("\n") == 1
    assert files(tmp_path) == []


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_a_torch_without_nccl(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few users know how their torch was built, so the error names the setting that helps."""
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    config = Config.load(None, [f"launch.backend={backend}"])
    with pytest.raises(ConfigError, match=r"launch\.backend=nccl: torch .* is built without it; use gloo"):
        choose_backend(config, torch.device("cuda"))
    assert choose_backend(Config.load(None, ["launch.backend=gloo"]), torch.device("cuda")) == "gloo"
