"""sweep: a run per combination of values, as one Slurm array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import checks, runs, slurm
from trainer.cluster import sweep as sweeps
from trainer.commands.submit import root_hint
from trainer.config import Config, ConfigError, find_config


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
    config = slurm.with_grace(Config.load(source, shared, site or runs.site()))
    config = runs.with_root(config, stem=find_config(source).stem)
    changes = sweeps.combinations(several)
    checks.check_names(config)
    checks.check_submission(config)
    checks.check_writable(Path(config.launch.root))
    checks.check_slurm()
    job_id, submitted, total = sweeps.submit(config, changes, parallel)
    print(f"sweep  {config.launch.name}: {total} runs")
    if job_id is None:
        print("       all of them have finished, or are in the queue")
        return 0
    limit = f", {parallel} at a time" if parallel else ""
    print(f"job    {job_id}: {len(submitted)} runs{limit}, {submitted[0]} to {submitted[-1]}")
    print(f"next   python launch.py status --sweep {config.launch.name}{root_hint(config.launch)}", flush=True)
    return 0
