"""Real ranks under real supervisors, as srun starts them in a job, on this machine and without Slurm.

What a supervisor asks Slurm is answered as a healthy Slurm would: the job runs, and its node is up.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import torch
from submitit.core.utils import DelayedSubmission, JobPaths

from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.trainer import Trainer
from tests.gpu.devices import nccl_host
from tests.support.project import DEADLINE_S, PROJECT

JOB = "7"
SCONTROL = f"""\
#!/bin/sh
case "$1 $2" in
"show job") echo "JobId={JOB} JobState=RUNNING Restarts=0 EndTime=Unknown NodeList={{host}} Reason=None" ;;
"show node") echo "NodeName={{host}} State=IDLE" ;;
esac
"""


def train_supervised(config: Config, env: Mapping[str, str]) -> tuple[RunDir, str]:
    """Start a supervisor for each rank of a new run, which must finish in spite of any fault that `env` plans. Returns
    the run, and what the ranks have printed."""
    run = run_folders.create(config)
    DelayedSubmission(Trainer(config)).dump(JobPaths(run.logs, JOB).submitted_pickle)
    programs = run.path / "programs"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL.format(host=socket.gethostname()))
    (programs / "scontrol").chmod(0o755)
    size = config.launch.world_size
    logs = [run.logs / f"{JOB}_{rank}_log.out" for rank in range(size)]
    words = ["-u", "-m", "laststep.job.supervisor", "-u", "-m", "submitit.core._submit", str(run.logs)]
    supervisors = []
    try:
        for rank, log in enumerate(logs):
            shared = nccl_host(rank) if torch.cuda.device_count() < size else {}
            place = {**_place(rank, size), "PATH": f"{programs}:{os.environ['PATH']}", **shared, **env}
            with log.open("wb") as output:
                supervisors.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        cwd=PROJECT,
                        env={**os.environ, **place},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
        deadline = time.monotonic() + DEADLINE_S
        statuses = [supervisor.wait(max(0.0, deadline - time.monotonic())) for supervisor in supervisors]
    finally:
        for supervisor in supervisors:
            supervisor.kill()  # and with it its rank
            supervisor.wait()
        said = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs if log.exists())
    assert statuses == [0] * size, said
    return run, said


def _place(rank: int, size: int) -> dict[str, str]:
    """The variables that srun sets for a rank on the only node of its job."""
    return {
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": socket.gethostname(),
        "LASTSTEP_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }
