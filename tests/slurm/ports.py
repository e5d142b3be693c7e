"""The ports of examples/ports on a real Slurm, each struck by all that a day has.

`python -m tests.slurm.ports [NAME...]` writes a section of docs/reports.md.

Each runs twice on two nodes: once undisturbed, once stopped by a signal, with one rank killed, with all ranks killed,
cancelled, and resumed. Weights and metrics must be the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.faults.report import machine_lines
from tests.faults.slurm_day import table
from tests.proof.test_ports import ALL, PORTS, changed_lines
from tests.slurm.cluster import Cluster
from tests.slurm.user import User
from tests.support.forked import forked_python
from tests.support.project import make_shared_folder, remove_shared_folder
from tests.support.ranks import fingerprint
from tools.sections import put

# Words that replace those of the tests, so that a run lasts for half a minute.
LONGER = {
    "imagenet": "--epochs 12",
    "references": "--epochs 12",
    "nanogpt": "--max_iters=600 --eval_interval=100",
    "diffusion": "--num_epochs 20",
    "ppo": "--total-timesteps 40960",
    "webdataset": "--epochs 40",
    "accelerate": "--num_epochs 40",
    "lightning": "--max_epochs 40",
    "trl": "--num_train_epochs 20",
}
OURS = ("device=cpu", "train.log_every=5", "launch.hang_timeout_s=60")
STRIKES = ("stopped", "one rank killed", "all ranks killed", "cancelled and resumed")
NODES = ("w1", "w2")


class Day(NamedTuple):
    """What became of a port."""

    name: str
    lines: int  # changed
    proved: bool
    steps: int
    lost: list[int]  # steps, by strike
    same: bool  # weights and metrics of the undisturbed run

    @property
    def wrong(self) -> bool:
        """Whether it broke what docs promise. Only where all ranks die are steps lost: those since the last save."""
        return not (self.proved and self.same) or len(self.lost) < len(STRIKES) or any(self.lost[:2] + self.lost[3:])

    def row(self) -> tuple[str, ...]:
        """As the page shows it."""
        return self.name, str(self.lines), str(self.steps), ", ".join(map(str, self.lost[2:3]))


def main(words: Sequence[str]) -> int:
    """Try these ports, or all; returns 1 if one of them broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.ports", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}; the page is written for all")
    names = parser.parse_args(words).names or list(ALL)
    make_shared_folder()
    folder = Path(tempfile.mkdtemp(prefix="laststep-ports-"))
    days = []
    cluster = Cluster.start(folder / "slurm", accounting=False, nodes=NODES)
    try:
        python = forked_python()
        for name in names:
            days.append(a_day(cluster, folder / name, name, python))
            print("  ".join(days[-1].row()), flush=True)
    finally:
        cluster.stop()
        remove_shared_folder()
    if names == list(ALL):
        put(page(days))
    if any(day.wrong for day in days):
        print(f"VIOLATION: see above; the folders of the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def a_day(cluster: Cluster, folder: Path, name: str, python: str) -> Day:
    """Train a port undisturbed, and through all strikes."""
    (place := folder / "users").mkdir(parents=True)
    shutil.copy(PORTS / name / "ported.py", place / "train.py")
    user = User(cluster, folder / "runs", python, place)
    script = ("train.py", *ALL[name].words.split(), *LONGER.get(name, "").split())
    command = [python, user.program, "prove", "--steps", "16", "device=cpu", "train.py", *ALL[name].words.split()]
    proof = subprocess.run(command, cwd=place, env=user.env, capture_output=True, text=True, timeout=900)
    if not (proved := proof.returncode == 0 and "\nEXACT\n" in proof.stdout):
        print(f"{' '.join(command)}:\n{proof.stdout}{proof.stderr}", flush=True)
    user.types("--nodes", "2", "--name", "alone", *OURS, *script)
    _comes_to(user, "alone", lambda: _ended(user, "alone"), "did not end")
    alone, steps = fingerprint(user.run("alone")), _step(user.run("alone"))
    user.types("--nodes", "2", "--name", "struck", *OURS, *script)
    job = user.job_of("struck")
    for number, strike in enumerate(STRIKES):
        goal = steps * (2 * number + 1) // 10
        _comes_to(user, "struck", partial(_trains_at, user, number, goal), f"does not come to step {goal}")
        if strike == "stopped":
            cluster.run("scancel", "--signal", "USR2", job)
        elif strike == "cancelled and resumed":
            cluster.run("scancel", job)
        else:
            user.kills("struck", *((1,) if strike == "one rank killed" else (0, 1)))
        _comes_to(user, "struck", partial(_has_ended, user, number), f"does not end once it is {strike}")
    user.waits_until_gone(job)
    user.types("resume", "struck")
    _comes_to(user, "struck", lambda: _ended(user, "struck"), "did not end")
    lost = [record["lost_steps"] for record in user.attempts("struck")][:-1]
    return Day(name, changed_lines(name), proved, steps, lost, fingerprint(user.run("struck")) == alone)


def _comes_to(user: User, name: str, condition: Callable[[], object], failure: str) -> None:
    user.waits(name, condition, failure)


def _ended(user: User, name: str) -> bool:
    records = user.attempts(name)
    if records and records[-1]["reason"] in ("failed", "lost") and not records[-1]["requeue"]:
        raise RuntimeError(f"{user.run(name).path} ended: {records[-1]['error']}")
    return bool(records) and records[-1]["reason"] == "finished"


def _has_ended(user: User, before: int) -> bool:
    return len(user.attempts("struck")) > before


def _step(run: RunDir) -> int:
    return max((line["step"] for line in read_lines(run.metrics) if "step" in line), default=0)


def _trains_at(user: User, ended: int, goal: int) -> bool:
    """Whether the attempt that follows this number of ended ones has trained, and has reached the step `goal`."""
    records = user.attempts("struck")
    if len(records) > ended:
        raise RuntimeError(f"{user.run('struck').path}: an attempt has ended too early: {records[-1]}")
    began = records[-1]["end_step"] if records else 0
    return _step(user.run("struck")) >= max(goal, began + 1)


def page(days: Sequence[Day]) -> str:
    """The page that docs show."""
    heads = ("port", "lines changed", "steps", "lost once all ranks were killed")
    return "\n".join(
        [
            "## Scripts of others",
            "",
            "`make ports`: each folder of `examples/ports` but `unaware` has a script with the habits of a well-known",
            "one, and its port. Each port was proved, and trained on two nodes, once undisturbed and once with all of",
            "these:",
            f"{', '.join(STRIKES)}.",
            "",
            f"* {len(days)} ports: EXACT by `prove` {sum(day.proved for day in days)}, "
            f"with the undisturbed weights and metrics {sum(day.same for day in days)}, "
            f"broke a promise {sum(day.wrong for day in days)}",
            *(f"* {line}" for line in machine_lines()),
            "",
            *table([heads, *(day.row() for day in days)]),
            "",
        ]
    )


if __name__ == "__main__":
    began = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    os._exit(status)
