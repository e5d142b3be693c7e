"""sweep: a run per combination of values, as one Slurm array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import machine_checks, run_folders, submission
from trainer.cluster import sweep as sweeps
from trainer.commands.submit import root_hint
from trainer.config.config import Config, find_config
from trainer.config.errors import ConfigError


def sweep(source: str, overrides: Sequence[str], site: str | None, parallel: int | None) -> int:
    """Submit what is missing of a sweep; returns the exit status."""
    several = [word for word in overrides if sweeps.varies(word)]
    if not several:
        raise ConfigError("nothing varies: give a key several values, e.g. optim.lr=0.1,0.03 seed=0..4")
    for word in several:
        if word.startswith("launch."):
            raise ConfigError(f"{word}: all jobs of an array ask for the same; launch.* cannot vary")
    if parallel is not None and parallel < 1:
        raise ConfigError(f"--parallel {parallel}: must be at least 1")
    shared = [word for word in overrides if word not in several]
    config = submission.with_grace(Config.load(source, shared, site or run_folders.site()))
    config = run_folders.with_root(config, stem=find_config(source).stem)
    changes = sweeps.combinations(several)
    machine_checks.check_names(config)
    machine_checks.check_submission(config)
    machine_checks.check_writable(Path(config.launch.root))
    machine_checks.check_slurm()
    job_id, submitted, total = sweeps.submit(config, changes, parallel)
    print(f"sweep  {config.launch.name}: {total} runs")
    if job_id is None:
        print("       all of them have finished, or are in the queue")
        return 0
    limit = f", {parallel} at a time" if parallel else ""
    print(f"job    {job_id}: {len(submitted)} runs{limit}, {submitted[0]} to {submitted[-1]}")
    print(f"next   python launch.py status --sweep {config.launch.name}{root_hint(config.launch)}", flush=True)
    return 0
