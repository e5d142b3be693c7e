"""A stretch of a run done once more by a job, which is submitted as those of any run are."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence

from laststep.code import code_copy
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.records.probes import ProbePlan
from laststep.replay import again
from laststep.replay.again import Stretch
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.pending import WaitReport
from laststep.runs.run_status import StatusReader
from laststep.say import command, counted, note
from laststep.submission import submission

POLL_S = 0.5


def configured(stretch: Stretch, words: Sequence[str], plan: ProbePlan | None = None) -> Config:
    """The configuration of a job with these `launch` words that does the stretch again, checked as any submission is.
    Raises ConfigError."""
    run, first = stretch.run, stretch.parts[0]
    config = Config.parse(first.config.to_yaml(), words)
    shown = " ".join(words)
    if not str(config.launch.nodes).isdecimal():
        raise ConfigError(f"launch.nodes={config.launch.nodes}: a replay needs one number of nodes, not a range")
    alike = {dataclasses.replace(part.config, launch=config.launch).to_yaml() for part in stretch.parts}
    if len(alike) > 1 or (config.train.shares is None and len({part.ranks for part in stretch.parts}) > 1):
        raise ConfigError(
            f"{shown}: steps {stretch.start + 1} to {stretch.last} of {run.name} were done with several configurations "
            "or numbers of ranks, which one job cannot do; replay them on one machine"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(f"{shown}: no Slurm on this machine (sbatch not found); leave it out to replay here")
    size = config.launch.world_size
    again.check_ranks(run, config, first.ranks, size, f"{counted(size, 'rank')} ({shown})")
    name = f"{run.name}-replay-{stretch.first}"
    own = dataclasses.replace(plan or ProbePlan(since=stretch.last + 1), steps=stretch.last)
    env = {**config.launch.env, **own.environment()}
    launch = dataclasses.replace(config.launch, name=None, root=str(run.path.parent.absolute()), env=env)
    search = code_copy.search_path(run, config, runs_copy=True)
    config = again.once(dataclasses.replace(config, launch=launch))
    return submission.ready(config, Machine(Way.SLURM, search=search, words=words), name)


def submit(stretch: Stretch, config: Config) -> RunDir:
    """Submit the job, with the code that the run's jobs have run. Raises ConfigError."""
    os.chdir(run_folders.working_folder(stretch.run))  # where its ranks are to work
    with run_folders.created(config) as run:
        again.fill(stretch, run)
        if stretch.run.code.exists():
            run.code.symlink_to(stretch.run.code.resolve())
        (job,) = submission.hand_over(run, config, [submission.ReadyRun(run, config)])
    launch = config.launch
    print(f"job    {job.job_id}: {counted(int(launch.nodes), 'node')} x {counted(launch.ranks_per_node, 'rank')}")
    print(f"folder {run_folders.short(run.path)}", flush=True)
    return run


def wait(stretch: Stretch, run: RunDir) -> None:
    """Wait until the job has ended. Raises RuntimeError where it has not come to the last step, and KeyboardInterrupt,
    which leaves the job alone."""
    reader, waiting = StatusReader(), WaitReport(lambda text: note(f"[laststep] {text}"))
    try:
        while (status := reader.read([run])[0]).alive:
            waiting.update(status)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        name, source = run_folders.typed(run), run_folders.typed(stretch.run)
        note(f"\n[laststep] the job goes on; to end it: `{command(f'cancel {name}')}`; after its end, what differs:")
        note(f"[laststep] `{command(f'diff {source} {name} --records')}`")
        raise
    again.check_done(stretch, run, stretch.last)
