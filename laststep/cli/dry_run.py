"""What --dry-run prints. In a module of its own, as it needs few of the imports of a real start."""

from __future__ import annotations

from pathlib import Path

from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.runs.run_folders import short
from laststep.submission import sbatch


def dry_run(config: Config) -> int:
    """Print the configuration and the sbatch script; returns the exit status."""
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    print(f"# {short(run.config)}\n{config.to_yaml()}")
    print(f"# sbatch script\n{sbatch.run_executor(config, run).script()}")
    return 0
