"""The time that a submission adds to `sbatch` itself, and the submission of a thousand runs, on a throwaway Slurm.

`python -m benchmarks.submit [--rounds N]`, on Debian or Ubuntu, as root; elsewhere it says what is missing and measures
nothing. `launch.py --nodes 2` alternates with a plain `sbatch` of the script that it would submit. All jobs are held,
so that none of them runs. The run folders are in memory: how fast a disk creates their 700 files can vary tenfold with
what was deleted on it in the last minutes (ext4 leaves young inodes alone). `launch.py` may take at most 0.5 s longer
than sbatch, and a sweep of 1,000 runs, as one array, at most 10 s; if a median misses that by more than the noise, the
exit status is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._measure import PROJECT, Check, conclude, spread
from tests.slurm.cluster import Cluster, missing

OVER_SBATCH_S, SWEEP_S = 0.5, 10.0  # limits of the medians
SWEEPS = 3
RUNS = 1000
HELD = "launch.slurm.hold=true"


def main(words: list[str] | None = None) -> int:
    """Measure, print, write the results; returns 1 if either limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.submit", description="How long a submission takes.")
    parser.add_argument("--rounds", type=int, default=15, help="submissions of each kind (default: 15)")
    rounds = parser.parse_args(words).rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2")
    if lack := missing():
        print(f"not measured: {lack}")
        return 0

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        cluster = Cluster.start(Path(name) / "slurm")
        try:
            slurm = cluster.run("sbatch", "--version").split()[1]
            user = User(cluster, Path(name) / "runs")
            sbatch, launch = one_by_one(user, rounds)
            sweep = sweeps(user)
        finally:
            cluster.stop()
    over = [ours - theirs for ours, theirs in zip(launch, sbatch)]
    figures = {"sbatch": sbatch, "launch.py --nodes 2": launch, "over sbatch": over, f"a sweep of {RUNS}": sweep}
    results = {name: spread(seconds) for name, seconds in figures.items()}
    print(f"{'median':>8}  {'10-90 %':>13}  command ({rounds} times, the sweep {SWEEPS} times)")
    for name, s in results.items():
        print(f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {name}")
    checks = [
        Check("launch.py beyond sbatch", OVER_SBATCH_S, over, "s"),
        Check(f"a sweep of {RUNS} runs", SWEEP_S, sweep, "s"),
    ]
    settings = {"slurm": slurm, "rounds": rounds, "sweeps": SWEEPS, "unit": "s"}
    return conclude("submit", {**settings, **results}, checks)


class User:
    """A user who types commands in the project folder and submits to that cluster."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster = cluster
        self.root = root

    def types(self, *words: str) -> str:
        """Run a command; returns its output. Raises RuntimeError, with the output, if it fails."""
        done = subprocess.run(words, cwd=PROJECT, env=self.cluster.env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def launches(self, *words: str) -> str:
        """Run `launch.py WORDS` with its jobs held; returns its output."""
        return self.types(sys.executable, "launch.py", *words, HELD, f"launch.root={self.root}")


def one_by_one(user: User, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of sbatch alone and of launch.py, which alternate. The first of each, which fills caches, is dropped."""
    shown = user.launches("--nodes", "2", "--name", "shown", "--dry-run")
    script = user.root.with_suffix(".sh")
    script.write_text(shown[shown.index("#!/bin/bash") :])
    sbatch, launch = [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        user.types("sbatch", "--parsable", str(script))
        submitted = time.perf_counter()
        user.launches("--nodes", "2", "--name", f"run-{number}")
        sbatch.append(submitted - began)
        launch.append(time.perf_counter() - submitted)
    return sbatch[1:], launch[1:]


def sweeps(user: User) -> list[float]:
    """Seconds of each sweep. Raises RuntimeError if a sweep is not one array of RUNS jobs."""
    taken = []
    for number in range(SWEEPS):
        name = f"sweep-{number}"
        began = time.perf_counter()
        user.launches("sweep", "--name", name, f"seed=1..{RUNS}")
        taken.append(time.perf_counter() - began)
        # Each job of the array has the name of the sweep; %F is the id of the array.
        jobs = user.types("squeue", "--noheader", "--array", f"--name={name}", "--format=%F").split()
        if len(jobs) != RUNS or len(set(jobs)) != 1:
            raise RuntimeError(f"{name}: {len(jobs)} jobs in {len(set(jobs))} arrays, not {RUNS} in one")
    return taken


if __name__ == "__main__":
    sys.exit(main())
