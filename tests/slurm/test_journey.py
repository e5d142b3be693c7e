"""README's journey: its lines, typed as they stand into a fresh shell, each with its outcome.

A newcomer types these lines before reading anything else, and stops at the first that does not do what README says.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.cluster import Cluster
from tests.support.commands import Shell
from tests.support.forked import forked_python
from tests.support.project import PROJECT

LASTSTEP = "#!{python}\nimport sys\nfrom laststep import main\nsys.exit(main())\n"  # as pip writes it
NOT_IN_A_CLONE = (
    ".git",
    ".venv",
    ".slurm",
    ".releases",
    ".*_cache",
    ".cache",
    ".hypothesis",
    "__pycache__",
    "runs",
    "data",
    "site",
)


@dataclass(frozen=True)
class Outcome:
    """What a line must do."""

    prints: tuple[str, ...] = ()  # regular expressions, each of which must match
    status: int = 0
    interrupt_at: str | None = None  # type Ctrl-C once this is printed
    typed: bool = True  # False: the test has done it in another way


Journey = Sequence[tuple[str, Outcome]]
INSTALL: Journey = [
    ("pip install .", Outcome(typed=False)),  # see test_packaging.py; here the command is a file of the same text
    ("laststep init demo && cd demo", Outcome((r"wrote  demo/digits\.py", r"next   laststep --local"))),
    (
        "laststep --local --name first",
        Outcome((r"every step is saved\nnext   laststep resume first --local",), 130, r"step \d+/630 "),
    ),
    ("laststep resume first --local", Outcome((r"resuming after step \d+:", r"finished: .*val_accuracy 0\.9"))),
    ("laststep evaluate first", Outcome((r"first: step 630, epoch 10\n  .*accuracy 0\.9\d+ \(as the run itself has",))),
    (
        "laststep export first model.safetensors",
        Outcome((r"model\.safetensors: first, step 630, .*\n.*\n  .* parameters in",)),
    ),
    ("make train", Outcome(typed=False)),  # it installs into .venv, then types `launch.py --local`
    ("make test", Outcome(typed=False)),  # it runs this test
]
FOLLOW = "python launch.py logs first -f"
RESUMED = r"attempt begins.*resuming after step \d+: .*step \d+/630 "
PREEMPTED: Journey = [
    ("make slurm", Outcome(typed=False)),  # the fixture `cluster` does the same, in another folder
    ("export SLURM_CONF=$PWD/.slurm/slurm.conf", Outcome()),
    (". .venv/bin/activate", Outcome()),
    ("python launch.py --nodes 2 --tasks-per-node 2 --name first", Outcome((r"job    \d+: 2 nodes x 2 ranks",))),
    (FOLLOW, Outcome((r"starting: 630 steps, 63 per epoch, 4 ranks on cpu",), 130, r"step \d+/630 ")),
    ('sbatch -o /dev/null -p high -N4 --exclusive --wrap "sleep 5"', Outcome((r"Submitted batch job \d+",))),
    (FOLLOW, Outcome((r"SIGTERM.*saved step \d+", RESUMED), 130, RESUMED)),
    ("python launch.py status first", Outcome((r"preempted",))),
    ("python launch.py drill first", Outcome((r"first: 0 lost steps, [\d.]+ s from the preemption to the next step",))),
    ("python launch.py verify first", Outcome((r"intact, weights [0-9a-f]+",))),
]


def lines_of(section: str) -> list[str]:
    """The lines that README invites the reader to type in this section, without their comments."""
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", (PROJECT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].rstrip() for line in re.findall(r"^    (.+)$", text, re.MULTILINE)]


def type_all(folder: Path, env: Mapping[str, str], lines: list[str], journey: Journey) -> None:
    """Type README's lines into a fresh shell, and check what each of them does."""
    assert lines == [line for line, _ in journey], "README types other lines than this test knows"
    shell = Shell(folder, env)
    try:
        for line, outcome in journey:
            if outcome.typed:
                said, status = shell.types(line, outcome.interrupt_at)
                assert status == outcome.status, f"{line}: exit status {status}:\n{said}"
                for text in outcome.prints:
                    assert re.search(text, said, re.DOTALL), f"{line}: does not print {text!r}:\n{said}"
    finally:
        shell.close()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """What a newcomer's shell has; the ranks are forked processes, see tests/support/forked."""
    site = tmp_path / "site.yaml"
    site.write_text(f"launch: {{python: {forked_python()}}}\n")
    kept = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LASTSTEP_SITE": str(site)}


def test_install(tmp_path: Path, env: dict[str, str]) -> None:
    """From an empty folder to the weights of a run that was stopped and continued."""
    command = tmp_path / "bin" / "laststep"
    command.parent.mkdir()
    command.write_text(LASTSTEP.format(python=forked_python()))
    command.chmod(0o755)
    env |= {"PATH": f"{command.parent}:{env['PATH']}", "PYTHONPATH": str(PROJECT)}
    type_all(tmp_path, env, lines_of("Install"), INSTALL)
    assert (tmp_path / "demo" / "model.safetensors").exists()


@pytest.fixture
def clone(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A clone of this repository, with the environment and the cluster that `make slurm` makes."""
    folder = tmp_path / "laststep"
    ignored = shutil.ignore_patterns(*NOT_IN_A_CLONE)
    # Only at the top: laststep/runs is a room.
    shutil.copytree(
        PROJECT, folder, symlinks=True, ignore=lambda at, names: ignored(at, names) if at == str(PROJECT) else ()
    )
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".slurm").symlink_to(cluster.folder)
    yield folder
    cluster.run("scancel", "--me")


def test_a_preempted_and_resumed_run(clone: Path, env: dict[str, str]) -> None:
    """On a cluster: submitted, preempted, resumed, preempted once more on purpose; nothing is lost."""
    type_all(clone, env, lines_of("A preempted and resumed run"), PREEMPTED)
    ended = read_lines(RunDir(clone / "runs" / "first").attempts)[:2]
    assert [(attempt["reason"], attempt["lost_steps"]) for attempt in ended] == [("preempted", 0)] * 2
