"""The diagnosis: every check of doctor, and the facts that the checks have read."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from laststep.config.config import Config
from laststep.doctor.bad_nodes import check_bad_nodes
from laststep.doctor.file_system import RunRoot, check_run_root
from laststep.doctor.gpus import check_gpus
from laststep.doctor.problem import Problem
from laststep.doctor.slurm_settings import SlurmSettings, check_slurm
from laststep.ranks.slurm import SlurmError
from laststep.submission.machine_checks import count_gpus


@dataclass(frozen=True)
class Diagnosis:
    """What doctor has read, and the problems that it found in it."""

    run_root: RunRoot
    has_slurm: bool  # whether Slurm is installed here
    slurm: SlurmSettings | None  # None: not installed, or not answering
    problems: list[Problem]


def diagnose(config: Config) -> Diagnosis:
    """Run every check. Raises ConfigError for a partition that does not exist, and OSError when the folder of all runs
    cannot be read."""
    import torch

    launch = config.launch
    problems: list[Problem] = []
    has_slurm, slurm = shutil.which("scontrol") is not None, None
    if has_slurm:
        try:
            slurm = SlurmSettings.read().of_partition(launch.partition)
            problems += check_slurm(slurm, launch)
        except SlurmError as error:
            problems.append(Problem(f"Slurm does not answer: {error}", "`scontrol ping` shows whether it is up"))
    run_root = RunRoot.inspect(Path(launch.root))
    problems += check_run_root(run_root, slurm, launch, socket.gethostname().split(".")[0])
    problems += check_gpus(in_driver=count_gpus(), in_torch=torch.cuda.device_count())
    problems += check_bad_nodes(launch.root)
    return Diagnosis(run_root, has_slurm, slurm, problems)
