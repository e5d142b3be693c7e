"""Starting a prepared run in one of five ways: what submit and resume share."""

from __future__ import annotations

import os
import sys

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.records.metrics import newest_step
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs.run_folders import short, typed
from laststep.runs.run_status import StatusReader, may_never_start, records_of
from laststep.say import command, counted
from laststep.submission import submission
from laststep.submission.prepare import Way


def start(config: Config, run: RunDir, way: Way, known: int = 0) -> int:
    """Start the ranks of a run whose folder exists; returns the exit status. Raises ConfigError when Slurm refuses.

    `known`: see submit_run.
    """
    launch = config.launch
    if way in (Way.DEBUG, Way.LOCAL):
        from laststep.submission import local  # which takes a while to import, as `follow` does

        if way is Way.DEBUG:
            return local.run_debug(config)
        print(f"run    {run.name}\nranks  {launch.world_size} on this machine\nfolder {short(run.path)}", flush=True)
        status = local.run_local(config, run)
        if status == 0:
            _print_result(run)
        elif status > 128:
            print(f"[laststep] {_how_far(run)}: {command(f'resume {typed(run)} --local')}")
        return status
    job = submission.submit_run(config, run, known)
    print(f"run    {run.name}")
    spare = f" + {launch.spare_nodes} spare" if launch.spare_nodes else ""
    print(f"job    {job.job_id}: {counted(launch.nodes, 'node')}{spare} x {counted(launch.ranks_per_node, 'rank')}")
    print(f"folder {short(run.path)}")
    print(f"log    {short(job.paths.stdout)} (rank 0)")
    name = typed(run)
    for verb in ("logs -f", "status", "cancel"):
        print(f"next   {command(f'{verb} {name}')}", flush=True)
    if warning := may_never_start(*StatusReader().read([run])):
        print(f"[laststep] WARNING: {warning}", file=sys.stderr, flush=True)
    if way is not Way.FOLLOW:
        return 0
    from laststep.runs.run_logs import follow

    status = follow(run, job)
    if status == 0:
        _print_result(run)
    return status


def root_hint(launch: Launch) -> str:
    """What a command about a sweep must add to find it: nothing, or ` launch.root=...`."""
    default = os.path.abspath(Launch().root)
    return "" if launch.root == default else f" launch.root={launch.root}"


def _print_result(run: RunDir) -> None:
    """Where the weights of a finished run are, and what to do with them."""
    if steps := CheckpointStore(run.checkpoints).steps():
        print(f"saved  {short(CheckpointStore(run.checkpoints).path(steps[-1]))}")
        print(f"next   {command(f'export {typed(run)} {run.name}.safetensors')}")
    print(f"next   {command(f'report {typed(run)}')}", flush=True)


def _how_far(run: RunDir) -> str:
    """What is saved of a run that a signal has ended on this machine; ends with "to continue"."""
    (start,) = read_submissions(run.submissions)[-1:]
    for end in records_of(run)[-1:]:
        if end["job_id"] == start["job_id"] and end["reason"]:
            saved = f"{counted(end['lost_steps'], 'step')} lost" if end["lost_steps"] else "every step is saved"
            return f"stopped after step {end['end_step']}, {saved}; to continue"
    # The ranks were killed, and recorded nothing.
    done = (newest_step(run.metrics) or {"step": 0})["step"]
    saved_step = max(CheckpointStore(run.checkpoints).steps(), default=0)
    if done <= saved_step:
        return f"killed after step {saved_step}, every step is saved; to continue"
    if not saved_step:
        return f"killed after step {done}, before the first checkpoint: nothing is saved; to start again"
    return f"killed after step {done}: the newest checkpoint is of step {saved_step}, later steps are lost; to continue"
