"""The ranks of --local in `laststep shell`, on nodes of its own: one srun starts all supervisors, scancel signals them.

All else is as on one machine, see laststep/submission/local.py.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from laststep.config.schema import Launch
from laststep.ranks.slurm import ON_NODES, SHELL_WORDS, command
from laststep.rundir import RunDir

# What an srun gives up after, once the first of its tasks has ended, see GRACE_S in laststep.submission.local.
WAIT_S = 60
# In each task: it is a rank of --local, on one of these nodes. Slurm's other variables would contradict that.
AS_LOCAL = (
    f"export {ON_NODES}=1 SUBMITIT_LOCAL_GLOBALID=$SLURM_PROCID SUBMITIT_LOCAL_LOCALID=$SLURM_LOCALID "
    "SUBMITIT_LOCAL_NODEID=$SLURM_NODEID; for name in ${!SLURM_*} ${!SRUN_*} " + SHELL_WORDS + "; do "
    "case $name in SLURM_STEP_NODELIST|SLURM_LAUNCH_NODE_IPADDR) ;; *) unset $name;; esac; done; "
    'unset name; exec "$@"'
)


def srun(launch: Launch, run: RunDir, job_id: str, folder: Path, supervisor: Sequence[str]) -> list[str]:
    """The command that starts the supervisors of all ranks. It ends with the largest of their exit statuses."""
    nodes, each = launch.node_counts[0], launch.ranks_per_node
    ends_with_us = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    return [
        *ends_with_us,
        *("srun", "--unbuffered", f"--job-name={job_id}", f"--nodes={nodes}", f"--ntasks={nodes * each}"),
        *(f"--ntasks-per-node={each}", f"--cpus-per-task={launch.cpus_per_task}", "--distribution=block"),
        # They know when to leave.
        *("--kill-on-bad-exit=0", f"--wait={WAIT_S}", "--overlap", "--mem=0", f"--chdir={folder}"),
        *(f"--output={run.logs}/{job_id}_%t_log.out", "--open-mode=append", *launch.srun),
        *("bash", "-c", AS_LOCAL, "bash", *supervisor),
    ]


def signal_steps(name: str, number: signal.Signals) -> list[str]:
    """Stop all ranks of the steps with this name, or kill them; returns these steps. Raises SlurmError."""
    job = os.environ["SLURM_JOB_ID"]
    shown = command("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i %j").splitlines()
    steps = [step.split()[0] for step in shown if step.split()[1:] == [name]]
    for step in steps:
        command("scancel", f"--signal={'KILL' if number == signal.SIGKILL else 'INT'}", step)
    return steps
