"""Nodes of one's own: `laststep shell` asks Slurm for them (salloc), and in its shell --local starts ranks on them.

Such a start waits in no queue, and is one by --local in all that follows: the command outlives the ranks, forwards
Ctrl-C, and starts them again after a fault (laststep/submission/local.py). Only what starts and signals them differs:
one srun for all supervisors, and scancel.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.ranks.slurm import ON_NODES, SHELL_WORDS, command
from laststep.rundir import RunDir
from laststep.submission import sbatch

# sbatch's options for which salloc has no use.
NOT_OF_SALLOC = ("output", "error", "open-mode", "array", "requeue", "no-requeue", "parsable", "wait", "export")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What an srun gives up after, once the first of its tasks has ended, see GRACE_S in laststep.submission.local.
WAIT_S = 60
# In each task: it is a rank of --local, on one of these nodes. Slurm's other variables would contradict that.
AS_LOCAL = (
    f"export {ON_NODES}=1 SUBMITIT_LOCAL_GLOBALID=$SLURM_PROCID SUBMITIT_LOCAL_LOCALID=$SLURM_LOCALID "
    "SUBMITIT_LOCAL_NODEID=$SLURM_NODEID; for name in ${!SLURM_*} ${!SRUN_*} " + SHELL_WORDS + "; do "
    "case $name in SLURM_STEP_NODELIST|SLURM_LAUNCH_NODE_IPADDR) ;; *) unset $name;; esac; done; "
    'unset name; exec "$@"'
)


def salloc(config: Config, given: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The command that asks for the nodes and runs the `typed` one once they are there. `given`: OwnNodes.words."""
    run = RunDir(Path(config.launch.root) / "shell")
    script = sbatch.job_executor(config, run, options={}).script()
    flags = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = [flag for flag in flags if flag[2:].partition("=")[0].partition(" ")[0] not in NOT_OF_SALLOC]
    launch = config.launch
    setup = [f"export {name}={sbatch.quote(value)}" for name, value in launch.env.items()]
    setup += launch.setup
    if launch.setup:  # on each node too: this shell may be on none of them
        count = "$SLURM_JOB_NUM_NODES"
        each = f"srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --cpus-per-task=1"
        setup.append(f"{each} bash -c {shlex.quote(chr(10).join(launch.setup))}")
    lines = [f"export {SHELL_WORDS}={shlex.quote(json.dumps(list(given)))}", *setup, 'exec "$@"']
    return [
        "salloc",
        *(word for flag in options for word in shlex.split(flag)),
        "bash",
        "-c",
        "\n".join(lines),
        "bash",
        *typed,
    ]


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


def send(job_id: str, number: signal.Signals) -> bool:
    """Stop all ranks that `srun` of this name has started, or kill them; returns whether it has started any. Raises
    SlurmError."""
    job = os.environ["SLURM_JOB_ID"]
    steps = command("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i %j").splitlines()
    found = [step.split()[0] for step in steps if step.split()[1:] == [job_id]]
    # For the ranks SIGTERM is Slurm's: it ends the allocation.
    name = "KILL" if number == signal.SIGKILL else "INT"
    for step in found:
        command("scancel", f"--signal={name}", step)
    return bool(found)


def exit_status(code: int) -> int:
    """The exit status of srun as that of the rank: negative for one that a signal killed. Those of a stop stay."""
    return 128 - code if code > 128 and code - 128 not in STOPS else code
