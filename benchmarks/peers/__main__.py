"""What Laststep loses to each fault, beside submitit's plain checkpointable job and Lightning's auto-requeue.

`python -m benchmarks.peers`: half an hour on a throwaway Slurm (Debian or Ubuntu, as root); needs `pip install -e
.[bench]`. Writes results/peers.json and docs/peers.md. Exit status: 1 when a run of Laststep ended with other weights
than its undisturbed one, 2 when something is not installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks._measure import PROJECT, machine, write_results
from tests.slurm.cluster import Cluster, missing

PAGE = PROJECT / "docs" / "peers.md"
TEXT = """\
# What each fault costs

The same training (the small network on 4,000 digits, 2 ranks on 2 nodes, {steps} steps of {step_ms} ms in {epochs}
epochs) under three trainers, hit once in the middle of its second epoch, on a real Slurm with KillWait at {kill_wait}
s. Both peers write a checkpoint after each epoch, and are kinder than what is usually copied: they go on from their
newest checkpoint however they were started. The usual submitit script looks for it at SIGUSR2 alone, and Lightning's
page on Slurm for the one of its own signal alone, so that both start from nothing after a preemption. The steps are
read from the model's own count, by one harness for all (`python -m benchmarks.peers`).

*Lost* are steps that had to be done again. *Back in* is the time from the last step before to the first step beyond
it, queue included; *by hand*: the job was gone or hung for {deadline} s, and somebody had to start it again. *Same
weights*: in the end they are, bit for bit, those of the same trainer's undisturbed run.

{table}

{machine}.
"""


def main() -> int:
    """Measure, print the table, write the results and the page."""
    lacks = missing()
    if importlib.util.find_spec("lightning") is None:
        lacks = "benchmarks.peers needs Lightning beside Laststep: pip install -e '.[bench]'"
    if lacks:
        print(lacks, file=sys.stderr)
        return 2

    # Not before: they import torch.
    from benchmarks.peers import harness, workload

    outcomes: dict[str, dict[str, harness.Outcome]] = {fault: {} for fault in harness.FAULTS}
    kill_wait_s = 15
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = Cluster.start(folder / "slurm", kill_wait_s=kill_wait_s)
        try:
            for trainer in harness.COMMANDS:
                place = folder / trainer.split(",")[0]
                weights = harness.undisturbed(harness.Training(trainer, place / "undisturbed", cluster))
                for number, (fault, strike) in enumerate(harness.FAULTS.items()):
                    training = harness.Training(trainer, place / str(number), cluster)
                    outcomes[fault][trainer] = outcome = harness.hit(training, strike, weights)
                    print(f"{fault:<22}{trainer:<26}{in_words(outcome)}", flush=True)
        finally:
            cluster.stop()

    results = {fault: {t: dataclasses.asdict(o) for t, o in row.items()} for fault, row in outcomes.items()}
    versions = {"lightning": version("lightning"), "slurm": slurm_version()}
    write_results("peers", {**versions, "kill_wait_s": kill_wait_s, "faults": results})
    PAGE.write_text(
        TEXT.format(
            steps=harness.TOTAL_STEPS,
            step_ms=round(1000 * workload.STEP_S),
            epochs=workload.EPOCHS,
            kill_wait=kill_wait_s,
            deadline=round(harness.DEADLINE_S),
            table=table(outcomes),
            machine=", ".join(f"{k} {v}" for k, v in {**machine(), **versions}.items()),
        )
    )
    return int(not all(row["Laststep"].same_weights for row in outcomes.values()))


def in_words(outcome: Any) -> str:
    """An outcome as a cell of the table."""
    back = "by hand" if outcome.standstill_s is None else f"back in {outcome.standstill_s:.0f} s"
    weights = {True: "same weights", False: "other weights", None: "did not finish"}[outcome.same_weights]
    return f"{outcome.lost} of {outcome.reached} lost, {back}, {weights}"


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """A row per fault, a column per trainer."""
    trainers = list(next(iter(outcomes.values())))
    rows = [["fault", *trainers], ["---"] * (len(trainers) + 1)]
    rows += [[fault, *(in_words(row[trainer]) for trainer in trainers)] for fault, row in outcomes.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def slurm_version() -> str:
    """Of the Slurm that is installed here."""
    return subprocess.run(["sinfo", "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
