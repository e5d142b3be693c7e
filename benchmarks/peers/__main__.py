"""The training that Laststep loses to each fault, compared with a checkpointable submitit job, Lightning, transformers.

`python -m benchmarks.peers [--runs N]`: an hour per run, on a throwaway Slurm (Debian or Ubuntu, as root); needs
`pip install -e '.[bench]'`. Writes results/peers.json and a section of docs/reports.md. Exit status: 1 if a run of
Laststep ended with different weights than the undisturbed run, 2 if something is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._measure import machine, write_results
from tests.slurm.cluster import Cluster, missing
from tools.sections import put

if TYPE_CHECKING:
    from benchmarks.peers.harness import Outcome

    Outcomes = dict[str, dict[str, list[Outcome]]]  # by fault and trainer

PEERS = ("lightning", "transformers")
WEIGHTS = {True: "the same", False: "others", None: "did not finish"}
TEXT = """\
## What each fault costs other trainers

`python -m benchmarks.peers`: the same training (the small network on 4,000 digits, 2 ranks on 2 nodes, {steps} steps of
{step_ms} ms in {epochs} epochs) under six trainers, hit {times} in the middle of the second epoch. KillWait is
{kill_wait} s. The peers write a checkpoint after each epoch, and resume from their newest one however they were
started. "On Laststep": the same scripts with [its adapter](frameworks.md).

*Lost* steps had to be done again. The time is from the last step before the fault to the first new step. *By hand*: the
job was gone, or hung for {deadline} s. *The same*: bit for bit those of its undisturbed run.

{table}

* {machine}
"""


def main() -> int:
    """Measure, print the table, write the results and the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description="What each fault costs under six trainers.")
    parser.add_argument("--runs", type=int, default=1, help="runs per fault and trainer (default: 1)")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error("--runs must be at least 1")
    lacks = missing()
    if lacking := [name for name in PEERS if importlib.util.find_spec(name) is None]:
        lacks = f"benchmarks.peers needs {' and '.join(lacking)}: pip install -e '.[bench]'"
    if lacks:
        print(lacks, file=sys.stderr)
        return 2

    # Imported late, as they import torch.
    from benchmarks.peers import harness, workload

    versions = {**{name: version(name) for name in PEERS}, "slurm": slurm_version()}
    outcomes: Outcomes = {fault: {trainer: [] for trainer in harness.COMMANDS} for fault in harness.FAULTS}
    kill_wait_s = 15
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = Cluster.start(folder / "slurm", kill_wait_s=kill_wait_s)
        try:
            for trainer in harness.COMMANDS:
                place = folder / trainer.replace(" ", "-").replace(",", "")
                weights = harness.undisturbed(harness.TaskLoop(trainer, place / "undisturbed", cluster))
                for number, (fault, strike) in enumerate(runs * list(harness.FAULTS.items())):
                    training = harness.TaskLoop(trainer, place / str(number), cluster)
                    outcome = harness.hit(training, strike, weights)
                    outcomes[fault][trainer].append(outcome)
                    print(f"{fault:<22}{trainer:<26}{in_words([outcome])}, {ended_with([outcome])}", flush=True)
        finally:
            cluster.stop()

    results = {f: {t: [dataclasses.asdict(o) for o in cell] for t, cell in row.items()} for f, row in outcomes.items()}
    write_results("peers", {**versions, "kill_wait_s": kill_wait_s, "runs": runs, "faults": results})
    put(
        TEXT.format(
            times="once" if runs == 1 else f"once in each of {runs} runs",
            steps=harness.TOTAL_STEPS,
            step_ms=round(1000 * workload.STEP_S),
            epochs=workload.EPOCHS,
            kill_wait=kill_wait_s,
            deadline=round(harness.DEADLINE_S),
            table=table(outcomes),
            machine=", ".join(f"{k} {v}" for k, v in {**machine(), **versions}.items()),
        )
    )
    ours = [cell for row in outcomes.values() for trainer, cell in row.items() if harness.is_ours(trainer)]
    return int(not all(outcome.same_weights for cell in ours for outcome in cell))


def in_words(runs: list[Outcome]) -> str:
    """The cost of a fault in each of these runs, as a cell of the table."""
    lost = " or ".join(dict.fromkeys(str(o.lost) for o in runs))
    back = [o.standstill_s for o in runs if o.standstill_s is not None]
    ways = [f"{statistics.median(back):.0f} s"] if back else []
    if by_hand := sum(not o.by_itself for o in runs):
        ways.append("by hand" if by_hand == len(runs) else f"{by_hand} of {len(runs)} times by hand")
    return ", ".join([f"{lost} lost", *ways])


def ended_with(runs: Iterable[Outcome]) -> str:
    """With which weights these runs ended."""
    return " or ".join(dict.fromkeys(WEIGHTS[o.same_weights] for o in runs))


def table(outcomes: Outcomes) -> str:
    """A Markdown table with a row per fault and a column per trainer."""
    trainers = list(next(iter(outcomes.values())))
    rows = [["fault", *trainers], ["---"] * (len(trainers) + 1)]
    rows += [[fault, *(in_words(row[trainer]) for trainer in trainers)] for fault, row in outcomes.items()]
    rows += [["weights", *(ended_with(o for row in outcomes.values() for o in row[trainer]) for trainer in trainers)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def slurm_version() -> str:
    """The version of the installed Slurm, from slurmctld: the other programs need a slurm.conf to report it."""
    return subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
