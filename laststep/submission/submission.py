"""A submission is a list: how a configuration becomes ranks that train. No step goes back.

    1 name       an absolute root for all runs, and a name in it         ready
    2 check      each room refuses what cannot work: `CHECKS`            ready
    3 fit        absolute paths, and what this cluster has               ready
    4 folder     runs/NAME with config.yaml                              run_folders.created, or reconfigured
    5 copy       the code as it is now, for all attempts                 hand_over
    6 script     what sbatch is given: laststep/submission/sbatch.py     hand_over
    7 hand over  announced in submissions.jsonl, submitted, recorded     hand_over

Who takes which steps:

    submit, submit --from, resume     all of them: a verb reads the words, and calls `ready` and `start`
    laststep.submit in Python         all of them: `submit`
    sweep                             1 to 3 once, 2 and 4 for each run, 5 to 7 once, for one array
    --dry-run                         1 to 3; 6 is printed
    --local, --debug                  1 to 4; then the ranks start here, see laststep/submission/local.py
    python -m laststep                1 to 3 in each rank; rank 0 creates the folder
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from submitit import SlurmJob

from laststep import rooms, script
from laststep.checkpoint.store import CheckpointStore
from laststep.code import code_copy, task_check, uv
from laststep.config import checks, secret
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError, Unanswered
from laststep.config.machine import Machine, Way
from laststep.config.schema import COMMAND, READY_MADE, without_gpus
from laststep.ranks.slurm import EXPEDITE, cluster_settings, is_silent, most_in_array, new_tag, own_nodes
from laststep.records.submissions import Submission, read_submissions
from laststep.rundir import RunDir
from laststep.runs import pending, run_folders, unanswered, weights_source
from laststep.runs.run_folders import folder_of, short, typed
from laststep.say import command, counted, note
from laststep.submission import container, machine_checks, sbatch
from laststep.tasks import ready_made
from laststep.trainer import Trainer

if TYPE_CHECKING:
    from laststep.submission.local import LocalJob

# Between two tries where Slurm takes no more jobs: first, and at the most.
SUBMIT_AGAIN_S, SUBMIT_AGAIN_MOST_S = 3.0, 60.0
# Each room's checks. The first that fails is what the user reads, so the cheap ones come first, and Slurm last.
NAME_CHECKS = (
    ready_made.check,  # does a ready-made task have such a model, such data?
    task_check.check,  # is there such a task of the user's, and does it read the keys that were set?
)
CHECKS = (
    run_folders.check,  # may the run have this name, and a folder?
    *NAME_CHECKS,
    checks.check,  # can these ranks hold the state between them?
    weights_source.check,  # are there such weights?
    container.check,  # can this image be started?
    uv.check,  # is there such a lock file?
    rooms.check,  # does what the upper rooms were given make sense?
    machine_checks.check,  # does this machine, or its Slurm, have such nodes?
)


def ready(config: Config, machine: Machine, stem: str = "run") -> Config:
    """Steps 1 to 3: the configuration with which a run can start, named after `stem` if it has no name. Creates
    nothing. Raises ConfigError."""
    if machine.way is Way.DEBUG:
        config = _one_process(config)
    config = run_folders.with_root_and_name(config, stem)
    config = task_check.with_kind_of_script(config, machine)
    if machine.way is Way.DEBUG:
        script.check_knows_us(config, "--debug")
    for check in CHECKS:
        check(config, machine)
    config = secret.set_apart(config)
    # Absolute paths only now: the messages show them as they were typed.
    config = container.with_absolute_image(weights_source.with_absolute_weights(config))
    if machine.new:
        config = run_folders.with_absolute_data(config)
    if machine.submits or (machine.way is Way.DRY_RUN and not is_silent()):
        config = _for_cluster(config)
    return config


def _one_process(config: Config) -> Config:
    """--debug overrides the configuration with one process."""
    launch = config.launch
    gpus, slurm = min(1, launch.gpus), without_gpus(launch.slurm)
    launch = dataclasses.replace(launch, nodes=1, spare_nodes=0, tasks_per_node=None, gpus_per_node=gpus, slurm=slurm)
    train = dataclasses.replace(config.train, sharding="none")
    checkpoint = dataclasses.replace(config.checkpoint, replicas=0)
    return dataclasses.replace(config, launch=launch, train=train, checkpoint=checkpoint)


def _for_cluster(config: Config) -> Config:
    """A job without a grace time gets that of its cluster, and an expedited requeue where the cluster allows it."""
    launch, cluster = config.launch, cluster_settings()
    slurm = dict(launch.slurm)
    if slurm.get("requeue") == EXPEDITE:  # set here, perhaps on a cluster that allowed it
        del slurm["requeue"]
    if cluster.expedites and not {"requeue", "no-requeue", "no_requeue"} & slurm.keys():
        slurm["requeue"] = EXPEDITE
    grace_s = cluster.kill_wait_s if launch.grace_s is None else launch.grace_s
    return with_launch(config, grace_s=grace_s, slurm=slurm)


class ReadyRun(NamedTuple):
    """A run that is to get a job: steps 1 to 4 are done."""

    run: RunDir
    config: Config
    known: int = 0  # the number of its submissions when it was seen that none of them is in the queue


def hand_over(
    folder: RunDir, config: Config, runs: Sequence[ReadyRun], parallel: int | None = None
) -> list[SlurmJob[dict[str, float]]]:
    """Steps 5 to 7: submit one job per run; several as one array, or as many arrays as Slurm's limits take, at most
    `parallel` at a time. With launch.chain each run gets that many jobs, which follow each other; returns the first of
    each. Where Slurm takes no more jobs until others have ended (MaxSubmitJobs), this waits, and says so.

    `folder` holds their code and their logs: the run's own, or the sweep's. The first submission copies the code; later
    ones use the same copy. `config` says what resources each job asks for. Raises ConfigError when Slurm refuses the
    jobs, or another command is first; Unanswered when nobody knows whether Slurm has them. What it has taken before
    that stays in the queue.
    """
    if config.launch.chain > 1:
        if parallel is not None:
            raise ConfigError(f"--parallel {parallel}: limits the jobs of one array, and launch.chain makes several")
        return _hand_over_chains(folder, config, runs)
    jobs, left, most = list[SlurmJob[dict[str, float]]](), list(runs), most_in_array() if len(runs) > 1 else 1
    size, wait = most, _Wait(folder, config, len(runs))
    while left:
        part = left[:size]
        try:
            jobs += _submit(folder, _behind(config, jobs) if parallel else config, part, parallel)
        except sbatch.TooManyJobs as limit:
            if len(part) == 1:
                wait.once(limit, len(left))
            size = max(1, len(part) // 2)
        else:
            del left[: len(part)]
            size = min(most, 2 * len(part))
    return jobs


def _behind(config: Config, jobs: Sequence[SlurmJob[dict[str, float]]]) -> Config:
    """The configuration of an array that begins once the last of these jobs' array has ended, so that no more jobs run
    at a time than each may."""
    if not jobs:
        return config
    last, slurm = jobs[-1].job_id.partition("_")[0], config.launch.slurm
    after = ",".join(filter(None, [slurm.get("dependency"), f"afterany:{last}"]))
    return with_launch(config, slurm={**slurm, "dependency": after})


class _Wait:
    """A wait until Slurm takes more jobs, for all `runs` that are to be submitted."""

    def __init__(self, folder: RunDir, config: Config, runs: int) -> None:
        self._folder, self._config, self._runs, self._said = folder, config, runs, ""

    def once(self, limit: sbatch.TooManyJobs, left: int) -> None:
        """Wait until it seems to take one, `left` of the runs being without. Says once which limit it is."""
        if self._said != str(limit):
            self._said = str(limit)
            so_far = f" ({self._runs - left} of {self._runs} runs submitted)" if self._runs > 1 else ""
            note(f"[laststep] Slurm takes no more jobs now ({limit}): waiting until one ends{so_far}; Ctrl-C gives up")
        script, delay_s = sbatch.run_executor(self._config, self._folder).script(), SUBMIT_AGAIN_S
        with sbatch.ended_by_signals():
            while True:
                time.sleep(delay_s)
                if not sbatch.SUBMIT_LIMIT.search(pending.try_it(script).refused):
                    return
                delay_s = min(SUBMIT_AGAIN_MOST_S, 1.5 * delay_s)


def _hand_over_chains(folder: RunDir, config: Config, runs: Sequence[ReadyRun]) -> list[SlurmJob[dict[str, float]]]:
    """`hand_over` for launch.chain. Each run gets two jobs, whatever the wait: the first, as it begins, may find no
    room for another. What is missing then, the jobs themselves submit as they begin."""
    jobs, chains, wait = (
        list[SlurmJob[dict[str, float]]](),
        list[tuple[ReadyRun, sbatch.Link]](),
        _Wait(folder, config, len(runs)),
    )
    for number, one in enumerate(runs):
        link = sbatch.Link(new_tag())
        for _ in range(2):
            while True:
                try:
                    (job,) = _submit(folder, config, [one], link=link)
                except sbatch.TooManyJobs as limit:
                    wait.once(limit, len(runs) - number)
                    if link.after is None or len(read_submissions(one.run.submissions)) == one.known:
                        continue
                    job = None  # its first job has begun, and has submitted the next one
                except (ConfigError, OSError) as error:
                    if link.after is None:
                        raise
                    if len(read_submissions(one.run.submissions)) == one.known:
                        note(f"[laststep] WARNING: the chain of {one.run.name} has one job: {error}")
                    job = None
                break
            if job is None:
                break
            if link.after is None:
                jobs.append(job)
            link = link._replace(after=job.job_id)
            one = one._replace(known=len(read_submissions(one.run.submissions)))
        else:
            chains.append((one, link))
    for _ in range(config.launch.chain - 2):
        for number, (one, link) in enumerate(chains):
            if not lengthen(folder, config, one, link, 1):
                return jobs
            known = read_submissions(one.run.submissions)
            chains[number] = one._replace(known=len(known)), link._replace(after=known[-1]["job_id"])
    return jobs


def lengthen(folder: RunDir, config: Config, one: ReadyRun, link: sbatch.Link, more: int) -> int:
    """Submit this many more jobs of a run's chain, the first of them after `link.after`; returns how many Slurm has
    taken. That it refuses one is said: the run has the jobs before it, which try again as they begin. It submits none
    if the run has more submissions than `one.known`: another process is at it, and two jobs would follow one."""
    for number in range(more):
        try:
            (job,) = _submit(folder, config, [one], link=link)
        except (ConfigError, OSError) as error:
            if len(read_submissions(one.run.submissions)) == one.known:
                what = f"{counted(more - number, 'job')} of the chain not submitted now"
                limited = isinstance(error, sbatch.TooManyJobs)
                note(f"[laststep] {what}: {f'Slurm takes no more ({error})' if limited else error}")
            return number
        link = link._replace(after=job.job_id)
        one = one._replace(known=len(read_submissions(one.run.submissions)))
    return more


def _submit(
    folder: RunDir,
    config: Config,
    runs: Sequence[ReadyRun],
    parallel: int | None = None,
    link: sbatch.Link | None = None,
) -> list[SlurmJob[dict[str, float]]]:
    """One call of sbatch, see `hand_over`."""
    with sbatch.ended_by_signals():
        is_new = not folder.code.exists()
        if is_new:
            code_copy.copy_code(folder, config)
        uv.provide(folder, config)
        tag = new_tag()
        executor = sbatch.run_executor(config, folder, tag, link)
        executor.update_parameters(array_parallelism=parallel or len(runs))
        shared: dict[str, Any] = {"commit": code_copy.origin_of(folder, config).commit, "job_name": folder.name}
        shared["code"] = "new" if is_new else "same"
        intents: list[Submission] = []
        try:
            for index, one in enumerate(runs):
                more: dict[str, Any] = {"array_index": index} if len(runs) > 1 else {}
                more |= {"chain": link.chain} if link else {}
                intents.append(unanswered.announce(one.run, tag, one.known, **shared, **more))
            jobs = sbatch.submit_trainers(executor, [Trainer(one.config) for one in runs], tag)
        except sbatch.NoAnswer as error:
            run = runs[0].run
            job_id = unanswered.found_by_itself(run, tag) if len(runs) == 1 else None  # it may have ended since
            if job_id is None:
                raise Unanswered(unanswered.not_known(run, intents[0], error)) from None
            return [SlurmJob(folder=folder.logs, job_id=job_id, tasks=(0,))]
        except (ConfigError, OSError):
            for one, _ in zip(runs, intents):
                unanswered.close(one.run, tag, "refused")
            raise
        for one, intent, job in zip(runs, intents, jobs):
            try:
                unanswered.found(one.run, intent, job.job_id)
            except OSError as error:  # the job finds itself by its tag
                raise Unanswered(f"{one.run.name}: submitted as job {job.job_id}, but {error}") from None
    return list(jobs)  # type: ignore[arg-type]


@overload
def submit(config: Config, local: Literal[False] = False) -> SlurmJob[dict[str, float]]: ...
@overload
def submit(config: Config, local: Literal[True]) -> LocalJob: ...
@overload
def submit(config: Config, local: bool) -> SlurmJob[dict[str, float]] | LocalJob: ...
def submit(config: Config, local: bool = False) -> SlurmJob[dict[str, float]] | LocalJob:
    """Start a new run from Python: submit it to Slurm or, with `local`, train it on this machine in the background.

    Returns a job whose `result()` waits for the final metrics: on Slurm, submitit's Job of rank 0. Raises ConfigError
    when the configuration cannot work here, or Slurm refuses it; then nothing is left behind.
    """
    config = ready(config, Machine(Way.LOCAL if local else Way.SLURM))
    note(f"[laststep] {what_trains(config, 'from Python')}")
    with run_folders.created(config) as run:
        if not local:
            (job,) = hand_over(run, config, [ReadyRun(run, config)])
            return job.task(0)  # type: ignore[return-value]
        from laststep.submission.local import LocalJob  # here, because it would slow down every submission

        return LocalJob(config, run)


def what_trains(config: Config, source: str | None) -> str:
    """The first line of every start: the configuration, the task and the folder of all runs. `source` is the YAML file
    as it was typed."""
    data = f" ({config.model.name} on {config.data.name})" if config.task in READY_MADE else ""
    what = f"script {script.shown(config.script)}" if config.script else f"task {config.task}{data}"
    if config.task == COMMAND:
        fix = f"add {script.TO_RESUME_EXACTLY} for exact resume" if script.is_python(config.script) else ""
        what = f"command {script.shown(config.script)} ({'; '.join(filter(None, ['resumes by itself', fix]))})"
    return f"config {source or 'none'}, {what}, runs in {short(Path(config.launch.root))}"


def show(config: Config, source: str | None = None, here: bool = False) -> int:
    """--dry-run: print the configuration and the sbatch script, which `here`, with --local, does not exist; returns the
    exit status. `source`: see `start`."""
    if source is not None:
        print(f"# {what_trains(config, source)}")
    print(f"# {short(folder_of(config).config)}\n{config.to_yaml()}")
    if here:
        print(f"# {counted(config.launch.world_size, 'rank')} on this machine")
        return 0
    return show_script(config)


def show_script(config: Config) -> int:
    """Print the sbatch script; returns the exit status."""
    link = sbatch.Link(new_tag()) if config.launch.chain > 1 else None
    script = sbatch.run_executor(config, folder_of(config), link=link).script()
    print(f"# sbatch script\n{script}")
    if shutil.which("sbatch") and not is_silent():
        for line in pending.forecast(script, config):
            print(f"# {line}")
    return 0


def start(config: Config, run: RunDir, way: Way, source: str | None = None, known: int = 0) -> int:
    """Start the ranks of a run whose folder exists, and print what becomes of it; returns the exit status.

    `source`: see `what_trains`; None for the run's own. `known`: see ReadyRun. Raises ConfigError when Slurm refuses.
    """
    what = what_trains(config, source or short(run.config))
    if way in (Way.DEBUG, Way.LOCAL):
        note(what, sys.stdout, indent=7)
        return _start_here(config, run, way)
    before = len(read_submissions(run.submissions))
    (job,) = hand_over(run, config, [ReadyRun(run, config, known)])
    note(what, sys.stdout, indent=7)
    _print_job(config, run, job, behind=len(read_submissions(run.submissions)) - before - 1)
    if way is not Way.FOLLOW:
        return 0
    from laststep.runs.run_logs import follow  # which takes a while to import, as `local` does

    status = follow(run, job.task(0))  # type: ignore[arg-type]
    if status == 0:
        _print_result(run)
    return status


def _start_here(config: Config, run: RunDir, way: Way) -> int:
    """`start` for --local and --debug."""
    from laststep.runs.run_logs import print_cause
    from laststep.submission import local

    if way is Way.DEBUG:
        status = local.run_debug(config)
    else:
        nodes = own_nodes()
        where = f"{counted(config.launch.node_counts[0], 'node')} of job {nodes.job_id}" if nodes else "this machine"
        ranks = f"ranks  {config.launch.world_size} on {where}"
        print(f"run    {run.name}\n{ranks}\nfolder {short(run.path)}", flush=True)
        status = local.run_local(config, run)
    if status == 0:
        _print_result(run)
    elif status == 1 and way is Way.DEBUG:
        print_cause(run)
    elif status > 128:
        note(f"[laststep] {_how_far(run)}", sys.stdout)
        print(f"next   {command(f'resume {typed(run)} --{way.value}')}")
    return status


def _print_job(config: Config, run: RunDir, job: SlurmJob[dict[str, float]], behind: int) -> None:
    """What was submitted, with this many jobs of its chain behind it, what to type next, and why it may wait long."""
    from laststep.runs.run_status import StatusReader

    launch = config.launch
    spare = f" + {launch.spare_nodes} spare" if launch.spare_nodes else ""
    where = "" if launch.gpus else " on CPUs"  # which a user who forgot --gpus-per-node would learn hours later
    size = f"{counted(launch.nodes, 'node')}{spare} x {counted(launch.ranks_per_node, 'rank')}{where}"
    print(f"run    {run.name}")
    print(f"job    {job.job_id}: {size}{f', and {behind} behind it' if behind else ''}")
    print(f"folder {short(run.path)}")
    print(f"log    {short(job.task(0).paths.stdout)} (rank 0)")
    for verb in ("logs -f", "status", "cancel"):
        print(f"next   {command(f'{verb} {typed(run)}')}", flush=True)
    if warning := pending.may_never_start(*StatusReader().read([run])):
        note(f"[laststep] WARNING: {warning}")
    elif ahead := pending.reserved_ahead(config):
        note(f"[laststep] {ahead}")


def _print_result(run: RunDir) -> None:
    """Where the weights of a finished run are, and what to do with them."""
    if run.progress.exists():
        return print(f"kept   {short(run.files)}", flush=True)
    if steps := CheckpointStore(run.checkpoints).steps():
        print(f"saved  {short(CheckpointStore(run.checkpoints).path(steps[-1]))}")
        print(f"next   {command(f'export {typed(run)} {run.name}.safetensors')}")
    print(f"next   {command(f'report {typed(run)}')}", flush=True)


def _how_far(run: RunDir) -> str:
    """What is saved of a run that a signal has ended on this machine."""
    from laststep.runs.run_status import records_of

    (start,) = read_submissions(run.submissions)[-1:]
    for end in records_of(run)[-1:]:
        done, lost = end["end_step"], end["lost_steps"]
        if run.progress.exists():
            return "stopped; it resumes by itself"
        if end["job_id"] != start["job_id"] or not end["reason"]:
            continue
        if end["reason"] != "lost":
            saved = f"{counted(lost, 'step')} lost" if lost else "every step is saved"
            return f"stopped after step {done}, {saved}"
        if done == lost:
            return f"killed after step {done}, before the first checkpoint: nothing is saved"
        # It may have done steps that no file and no line of the log has.
        saved = f"the newest checkpoint is of step {done - lost}, {counted(lost, 'step')} lost"
        return f"killed after step {done}: {saved if lost else 'that one is saved'}"
    return "ended before its first step"
