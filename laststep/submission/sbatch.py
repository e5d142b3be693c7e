"""The batch script of a job, and handing it to sbatch.

run_executor       submitit's executor, with everything that `launch` says
after_ranks ...    the lines of its shell: what runs after the ranks, their environment, the user's setup
submit_trainers    submits it, and finds the job if sbatch has taken it without an answer
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from laststep import compat, say, script
from laststep.code import uv
from laststep.code.code_copy import origin_of, python_path, script_in
from laststep.config.checks import nodes_for
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.config.schema import Launch
from laststep.job import nodes
from laststep.ranks.launchers import BATCH_HOST, RESTARTS, UNDECIDED, WORKING_FOLDER
from laststep.ranks.process import kill_children
from laststep.ranks.slurm import CHAIN_VARIABLE, TAG_VARIABLE, UNANSWERED, UNENDED, SlurmError
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.queue import id_of_tag
from laststep.submission import container, machine_checks
from laststep.trainer import NO_LIMIT, Trainer

# Trainer.checkpoint decides how often a run is requeued. submitit's own limit would count every signal within ten
# minutes of the time limit as a timeout.


class SbatchExecutor(SlurmExecutor):
    """submitit's executor, which can also be created on a machine without Slurm, to show its script."""

    @classmethod
    def affinity(cls) -> int:
        """Claim that Slurm is available, also on a machine without it."""
        return 2

    def script(self) -> str:
        """The sbatch script that would be submitted."""
        return compat.sbatch_script(self)


NOTHING_TO_DO = 3  # exit status of laststep.submission.chain


class Link(NamedTuple):
    """A job's place in a chain, see launch.chain: the tag of the first of its jobs, and the one that it waits for."""

    chain: str
    after: str | None = None


def run_executor(config: Config, run: RunDir, tag: str = "", link: Link | None = None) -> SbatchExecutor:
    """The executor for the ranks of a run. `tag` is for the job's comment, by which the run knows its job."""
    # A rank that fails ends the others, even if they are stuck; at a stop every rank but 0 exits 0, see Stopped.
    srun_args = ["--kill-on-bad-exit=1"]
    # With no-kill, a node that dies does not end the job.
    options = {"requeue": True, **({"no-kill": True} if config.launch.chooses_nodes else {})}
    first, last = after_ranks(run, config.launch), start_again(run, config.launch)
    if link is not None:
        first = [*first, *_in_chain(run, config.launch, link.chain)]
    if link is not None and link.after is not None:  # what the user had the first job wait for is over then
        config = with_launch(config, slurm={**config.launch.slurm, "dependency": f"afterany:{link.after}"})
    executor = job_executor(config, run, first=first, last=last, srun_args=srun_args, options=options, tag=tag)
    executor.python += " -u -m laststep.job.supervisor"  # which starts the rank
    if exclude := nodes.excluded_at_submission(run, config.launch):
        executor.update_parameters(exclude=exclude)
    return executor


def job_executor(
    config: Config,
    run: RunDir,
    *,
    options: Mapping[str, Any],
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    srun_args: Sequence[str] = (),
    tag: str = "",
) -> SbatchExecutor:
    """The executor for any job that runs the code in `run.code`.

    `first` holds the first lines of its batch shell, `last` the last ones before srun, `options` further options of
    sbatch, by name.
    """
    launch = config.launch
    executor = SbatchExecutor(folder=run.logs, max_num_timeout=NO_LIMIT, python=_python_of_ranks(config, run))
    optional: dict[str, Any] = {
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclude": launch.exclude,
        "ntasks_per_node": None if launch.chooses_nodes else launch.ranks_per_node,
        # Slurm would add up what two options ask for.
        "gpus_per_node": None if launch.gpus_in_slurm else launch.gpus_per_node or None,
        "mem": None if launch.mem_gb is None else f"{max(1, round(1024 * launch.mem_gb))}MB",
    }
    executor.update_parameters(
        job_name=run.name,
        nodes=launch.node_counts[0],
        cpus_per_task=launch.cpus_per_task,
        time=launch.time_min,
        signal_delay_s=launch.signal_delay_s,
        setup=_shell_lines(config, run, first, last, tag),
        # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task (man srun). --chdir: `python -m` searches
        # the current folder first, see Trainer.
        srun_args=[
            f"--cpus-per-task={launch.cpus_per_task}",
            *srun_args,
            f"--chdir={run.code}",
            *container.srun_args(config, run),
            *launch.srun,
        ],
        stderr_to_stdout=True,
        additional_parameters=_further_options(config, run, options, tag),
        **{key: value for key, value in optional.items() if value is not None},
    )
    return executor


def _shell_lines(config: Config, run: RunDir, first: Sequence[str], last: Sequence[str], tag: str) -> list[str]:
    """The batch shell's lines before srun."""
    launch, variables = config.launch, environment(config, run)
    return [
        *first,
        *(rank_count(launch, nodes_for(config.train.shares, launch)) if launch.chooses_nodes else []),
        *([f"export {TAG_VARIABLE}={tag}"] if tag else []),
        *container.before_setup(config),
        *(f"export {name}={quote(value)}" for name, value in variables.items()),
        *user_setup(launch),
        *container.after_setup(config, variables),
        *last,
    ]


def _further_options(config: Config, run: RunDir, options: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """sbatch's options for which submitit has no word: these `options`, what Laststep needs, and the user's own."""
    launch, found = config.launch, dict(options)
    if launch.chooses_nodes:
        # With --ntasks-per-node, Slurm 22.05 would never start the job on fewer nodes again, see docs/design.md. So
        # the job asks for the CPUs of that many ranks, and its shell passes the number of ranks to srun.
        found |= {"nodes": launch.job_nodes, "mincpus": launch.ranks_per_node * launch.cpus_per_task}
    folder = run_folders.working_folder(run)
    if folder != Path.cwd():  # a run that is resumed from elsewhere
        found["chdir"] = folder
    found |= {option: value for option, value in launch.slurm.items() if value is not None}
    if launch.least_time_min is not None:
        found["time-min"] = launch.least_time_min
    if tag:
        found["comment"] = f"{found.get('comment') or ''} {tag}".strip()
    return found


# How long the ranks that survived a node may take to end once the end is recorded. Then srun is killed, and they too.
OVER_S = 3
# The shell looks every second whether it is, and every this many looks with a fresh view of the folder
# (laststep/ranks/disk.py): it does so for as long as the job lasts.
LOOKS = 5
# srun's options for a restart. Where a node has died, Slurm may still count the old step, although the node is back:
# srun would wait without end for what that step held, so the new step shares it. If it must wait for anything else, it
# gives up after a minute, and the job is requeued.
SHARE = "--overlap --mem=0 --immediate=60"


def after_ranks(run: RunDir, launch: Launch) -> list[str]:
    """Lines that run laststep.job.after_ranks once all ranks have ended: outside any container image, because
    Slurm's commands are there, and therefore with the Python that submits. `start_again` belongs to them."""
    python = _python_of_shell(run, launch)
    folder, copy = (shlex.quote(str(word)) for word in (run.path, run.code))
    return [
        *run_folders.trusted_in_shell(run),
        *_requeue_unrecorded(launch),
        "# Run a program, and kill it after $1 seconds. It ignores the signals that this shell ignores; under",
        "# `timeout` it would not.",
        "at_most() {",
        '    "${@:2}" &',
        "    program=$!",
        "    (for ((second = 0; second < $1; second++)); do sleep 1; kill -0 $program || exit; done",
        "    kill -KILL $program) >/dev/null 2>&1 &",
        "    wait $program",
        "}",
        "# This shell outlives all ranks. If they fail or are killed, it decides what follows: a restart (status 0), a",
        "# requeue, or the end.",
        "after_ranks() {",
        "    trusted || return 1",
        f"    export {UNDECIDED}=$(mktemp)  # it deletes this file once it has decided",
        "    (",
        "        trap '' TERM USR1 USR2",
        f"        cd {copy} || :  # on a bad mount; the setup may have set -e",
        f"        at_most 300 {python} -m laststep.job.after_ranks {folder} $1 ${{setup_line-}} && exit",
        f'        [ ! -e "${UNDECIDED}" ] || {{ rm -f "${UNDECIDED}"; requeue_unrecorded || :; }}',
        "        exit $1",
        "    )",
        "}",
        "at_exit() {",
        "    status=$?",
        "    trap - DEBUG",
        "    export LASTSTEP_SIGNALLED=1  # too late for a restart",
        '    [ $status = 0 ] || [ -n "${asked-}" ] || after_ranks $status',
        "    in_chain ends || :",
        "}",
        "in_chain() { :; }",
        "trap at_exit EXIT",
        "trap 'export LASTSTEP_SIGNALLED=1' TERM USR1 USR2",
        "trusted || { trap - EXIT; exit 2; }",
    ]


def _in_chain(run: RunDir, launch: Launch, chain: str) -> list[str]:
    """Lines of a job of a chain. As it begins, it submits those that are missing behind it, or finds that the run has
    ended: then it leaves at once. As it ends, it cancels them if the run has ended."""
    python = _python_of_shell(run, launch)
    folder, copy = (shlex.quote(str(word)) for word in (run.path, run.code))
    return [
        f"export {CHAIN_VARIABLE}={chain}",
        "in_chain() {",
        f"    (trap '' TERM USR1 USR2; cd {copy} || :; at_most 300 {python} -m laststep.submission.chain {folder} $1)",
        "}",
        f"in_chain begins || [ $? != {NOTHING_TO_DO} ] || {{ trap - EXIT; exit 0; }}",
    ]


def _requeue_unrecorded(launch: Launch) -> list[str]:
    """Lines for a node whose Python cannot start, or hangs: its mounts are bad, say. They do what after_ranks does
    where the disk fails, with Slurm alone, see `note_unrecorded` in laststep/ranks/slurm.py."""
    needs, leaves = launch.job_nodes.partition("-")[0], int(launch.exclude_after is not None)
    return [
        f"unended='({'|'.join(UNENDED)})' unanswered='{UNANSWERED.pattern}'",
        f"max_failures={launch.max_failures} needs={needs} leaves={leaves}",
        *_REQUEUE_UNRECORDED.splitlines(),
    ]


_REQUEUE_UNRECORDED = r"""# For a node on which not even Python starts: requeue the job, unless Slurm has ended it.
requeue_unrecorded() {
    [ -z "${LASTSTEP_CHAIN-}" ] || return 0  # the next job of the chain continues the run
    shopt -s nocasematch
    SECONDS=0 said=
    until try_to_requeue; do  # a controller that is busy, or just restarting, is asked again
        if ((SECONDS > 130)) || [[ ! $answer =~ $unanswered ]]; then
            echo "[laststep] not requeued: ${answer:-scontrol failed}"
            return 0
        fi
        sleep 2
    done
}
try_to_requeue() {  # fails with Slurm's $answer. It may have carried out the order, so it shows the job first
    answer=$(scontrol show job $SLURM_JOB_ID --all 2>&1) && shown=$answer || return 1
    [[ $shown =~ JobState=$unended[[:space:]] ]] || return 0
    [[ $shown != *laststep:* || $shown == *"${LASTSTEP_JOB_TAG-}"* ]] || return 0  # another job has the id now
    restart=${SLURM_RESTART_COUNT:-0} again=1  # the job's comment says for how many starts in a row this was so
    if [[ $shown =~ laststep-unrecorded:([0-9]+)@([0-9]+) ]] && ((restart - BASH_REMATCH[2] < 2)); then
        again=$((BASH_REMATCH[1] + (BASH_REMATCH[2] < restart)))  # of this start it may be noted already
    fi
    comment=$(echo "$shown" | sed -n 's/ *laststep-unrecorded:[0-9@]*//; s/ *$//; s/^ *Comment=//p')
    comment+="${comment:+ }laststep-unrecorded:$again@$restart"
    if ((again <= max_failures)) && ! answer=$(scontrol update JobId=$SLURM_JOB_ID Comment="$comment" 2>&1); then
        [[ ! $answer =~ $unanswered ]] || return 1
        again=$((restart + 1))  # this site forbids to change comments
    fi
    if ((again > max_failures)); then
        echo "[laststep] not requeued: Python did not start in the last $again starts of this job" \
            "(launch.max_failures=$max_failures)"
        return 0
    fi
    [ $said ] || echo "[laststep] requeueing job $SLURM_JOB_ID: Python does not start on $SLURMD_NODENAME, or hangs"
    said=1
    answer=$(scontrol requeue $SLURM_JOB_ID 2>&1) || return 1
    ((leaves)) || return 0
    [[ $shown =~ ExcNodeList=([^[:space:]]+) ]] && bad=${BASH_REMATCH[1]} && [ $bad != '(null)' ] || bad=
    [[ $(scontrol show partition $SLURM_JOB_PARTITION --all) =~ TotalNodes=([0-9]+) ]] || return 0
    left=$((BASH_REMATCH[1] - $(scontrol show hostnames "$bad" | wc -l)))
    ((left <= needs)) || scontrol update JobId=$SLURM_JOB_ID ExcNodeList=${bad:+$bad,}$SLURMD_NODENAME || :
}
""".replace("LASTSTEP_JOB_TAG", TAG_VARIABLE).replace("LASTSTEP_CHAIN", CHAIN_VARIABLE)


def start_again(run: RunDir, launch: Launch) -> list[str]:
    """Lines behind the user's setup: from here on `srun` starts the ranks, and starts them again after a fault.

    srun runs in the background: that of a dead node may never end, so it is killed once the attempt is over."""
    logs = shlex.quote(str(run.logs))
    inside = "" if launch.container is None or not launch.container.endswith(container.SQUASH) else "$inside "
    return [
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}",
        f"step_over={logs}/{run.step_over('$job').name} size= share=",
        *(_choice(run, logs) if launch.chooses_nodes else []),
        "start_ranks() {",
        *(['    [ ! -e "$next_nodes" ] || size=$(<"$next_nodes")'] if launch.chooses_nodes else []),
        '    rm -f "$step_over"',
        f'    (exec srun $size $share {inside}"$@") &',
        "    srun=$!",
        "    # A change of the folder shows this host what another one has created there.",
        '    (until [ -e "$step_over" ]; do',
        "        sleep 1; kill -0 $$ || exit; looks=$((${looks-0} + 1))  # the shell may have been killed",
        f'        ((looks % {LOOKS})) || {{ mkdir "$step_over.look"; rmdir "$step_over.look"; }} || :',
        f"    done; sleep {OVER_S}; kill -KILL $srun) 2>/dev/null &",
        "    watcher=$!",
        "    # A signal ends only the wait.",
        "    while wait $srun 2>/dev/null; status=$?; kill -0 $srun 2>/dev/null; do :; done",
        "    # Not TERM: a shell that has just been forked may still have the trap for it, and would live on.",
        "    { kill -KILL $watcher; wait $watcher; } 2>/dev/null || :",
        "    return $status",
        "}",
        "srun() {",
        '    [ -z "${LASTSTEP_SIGNALLED-}" ] || exit 143  # the job ended during its setup; at_exit says what follows',
        f"    export {RESTARTS}=0",
        '    until start_ranks "$@"; do',
        "        after_ranks $status || { asked=1; exit $status; }",
        '        [ -z "${LASTSTEP_SIGNALLED-}" ] || exit $status  # a signal came meanwhile: a requeue instead',
        f"        {RESTARTS}=$(({RESTARTS} + 1)) share='{SHARE}'",
        "    done",
        "}",
    ]


def _choice(run: RunDir, logs: str) -> list[str]:
    """Lines of a job that chooses on which of its nodes the ranks start."""
    return [
        f"next_nodes={logs}/{run.next_nodes('$job').name}",
        'rm -f "$next_nodes"  # of the allocation before',
        'size="--nodes=$trained"',
    ]


def rank_count(launch: Launch, counts: Sequence[int]) -> list[str]:
    """Lines that pass the number of ranks to srun, in a job that need not train on all of its nodes. `counts`: the
    numbers of nodes that can train, ascending; any more stay idle."""
    each, most_first = launch.ranks_per_node, " ".join(map(str, reversed(counts)))
    return [
        f"granted=$((SLURM_JOB_NUM_NODES - {launch.spare_nodes}))",
        f"for trained in {most_first}; do ((trained > granted)) || break; done",
        '((trained >= granted)) || echo "train.shares: training on $trained of $granted nodes"',
        f"export SLURM_NTASKS_PER_NODE={each} SLURM_NTASKS=$(({each} * trained)) {BATCH_HOST}=$SLURMD_NODENAME",
    ]


def environment(config: Config, run: RunDir) -> dict[str, str]:
    """The variables of the ranks, in which the shell expands others."""
    origin = origin_of(run, config)
    file, path = script_in(origin, run, config), python_path(origin, run.code)
    return {
        "OMP_NUM_THREADS": str(config.launch.cpus_per_task),
        "PYTHONPATH": path if config.launch.uv_options is None else f"{path}{os.pathsep}{run.code / uv.KEPT}",
        say.COMMAND: say.command(),
        WORKING_FOLDER: str(run_folders.working_folder(run)),
        **({} if file is None else {script.FILE: str(file)}),
        **config.launch.env,
    }


def _python_of_ranks(config: Config, run: RunDir) -> str | None:
    """Shell words that start Python in each rank; None: the Python that submits."""
    if config.launch.container is not None:
        return container.python(config, run)
    if config.launch.uv_options is not None:
        return shlex.quote(str(uv.python_of(run) or uv.planned(config)))
    return config.launch.python


def _python_of_shell(run: RunDir, launch: Launch) -> str:
    """The Python of the batch shell, which must see Slurm's commands: no image has them. That of launch.uv does not
    change while the job waits, as an environment of the user's may."""
    own = uv.python_of(run) if launch.uv_options is not None else None
    return shlex.quote(str(own or sys.executable))


def user_setup(launch: Launch) -> list[str]:
    """The lines of `launch.setup`, for this node and for all others.

    The environment that they set here reaches all ranks anyway. While one of them runs, $setup_line is its number.
    """
    if not launch.setup:
        return []
    here = [
        "setup_begins=$LINENO; trap '((LINENO > setup_begins)) && setup_line=$((LINENO - setup_begins))' DEBUG",
        *launch.setup,
        "trap - DEBUG; unset setup_line",
    ]
    if launch.job_nodes == "1":
        return here
    lines = shlex.quote("\n".join(launch.setup))
    return [
        *here,
        "others=$((SLURM_JOB_NUM_NODES - 1))",
        "[ $others = 0 ] || srun --relative=1 --nodes=$others --ntasks=$others --ntasks-per-node=1 --cpus-per-task=1"
        f" bash -c {lines}",
    ]


def quote(value: str) -> str:
    """Quote for the shell, but let it expand variables such as $HOME."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", value) + '"'


# Prefixes of the variables that Slurm, submitit, torchrun, mpirun, --spawn and Ray's workers set for their ranks.
LAUNCHER_VARIABLES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_"),
    *("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE", "LASTSTEP_JOB", "LASTSTEP_WORKING_FOLDER", "LASTSTEP_EXPORTED"),
    *(script.FILE, script.FOLDER, "LASTSTEP_ATTEMPT", "LASTSTEP_RESUMES"),
    *("LASTSTEP_RESTARTS", "LASTSTEP_STEP_RESTARTS", "LASTSTEP_SIGNALLED", "LASTSTEP_RAY_", "LASTSTEP_BATCH_HOST"),
    *(CHAIN_VARIABLE, "LASTSTEP_SHELL", "LASTSTEP_ON_NODES"),
)
# Prefixes of the variables that any launcher may set for torch.
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")
# sbatch waits at most for MessageTimeout (100 s) for one answer. One that runs longer hangs.
SBATCH_S = 120.0
# How long a job is looked for that Slurm may have taken; then the next command does that.
LOOK_S, POLL_S = 20.0, 1.0
# The limits on jobs in the queue (MaxSubmitJobs and the like), as sbatch names them.
SUBMIT_LIMIT = re.compile(r"\b\w*Submit\w*(Limit|PerUser|PerAccount)\b")
PICKLES = "[0-9a-f]" * 32 + ".pkl"  # submitit's, until it knows the job's id
T = TypeVar("T")


def submit_trainers(executor: SlurmExecutor, trainers: Sequence[Trainer], tag: str) -> Sequence[Job[dict[str, float]]]:
    """Submit one job per Trainer, several as one array, with this tag in their comment. If sbatch fails although Slurm
    has taken them, they are found by their tag. Raises ConfigError when Slurm refuses them, NoAnswer when it is not
    known whether it has them."""
    logs = Path(executor.folder)
    before = set(logs.glob(PICKLES))
    try:
        return submit_jobs(executor, trainers)
    except (ConfigError, OSError) as error:  # submitit may have failed to write a file after sbatch's answer
        job_id = _look_for(tag, LOOK_S if isinstance(error, NoAnswer) else 0.0)
        if job_id is None:
            if not isinstance(error, NoAnswer):
                for pickle in set(logs.glob(PICKLES)) - before:
                    pickle.unlink(missing_ok=True)
            raise
    return _taken(logs, job_id, trainers, tag, set(logs.glob(PICKLES)) - before)


def _look_for(tag: str, patience_s: float) -> str | None:
    """The id of the job with this tag. A controller that was too busy to answer sbatch may show it only later."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(SlurmError):
            if job_id := id_of_tag(tag):
                return job_id
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)


def _taken(
    logs: Path, job_id: str, trainers: Sequence[Trainer], tag: str, pickles: Iterable[Path]
) -> list[Job[dict[str, float]]]:
    """The jobs that Slurm has taken without saying so. submitit names their files once it knows their ids. A file that
    cannot be named now is written by the job itself."""
    ids = [job_id] if len(trainers) == 1 else [f"{job_id}_{index}" for index in range(len(trainers))]
    jobs: list[Job[dict[str, float]]] = [SlurmJob(folder=logs, job_id=one, tasks=(0,)) for one in ids]
    job_of = {trainer.config.launch.name: job for trainer, job in zip(trainers, jobs)}
    with contextlib.suppress(OSError):
        for pickle in pickles:
            trainer = cast(Trainer, DelayedSubmission.load(pickle).function)
            if job := job_of.get(trainer.config.launch.name):
                job.paths.move_temporary_file(pickle, "submitted_pickle")
        for script in logs.glob(".submission_file_*.sh"):
            if not script.is_symlink() and tag in script.read_text():
                jobs[0].paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
    return jobs


def submit_jobs(executor: SlurmExecutor, functions: Sequence[Callable[[], T]]) -> Sequence[Job[T]]:
    """Submit one job per function, several as one array. Raises ConfigError when Slurm refuses them, or does not say
    whether it has taken them."""
    try:
        # submitit repeats sbatch's message on stderr; the ConfigError has it already.
        with _without_launcher_variables(), contextlib.redirect_stderr(io.StringIO()), _within(SBATCH_S):
            return executor.submit_array(functions)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        reason = _sbatch_message(error)
        if any(text in reason for text in ("connect failure", "configuration source")):
            last = reason.rpartition("; ")[2].removeprefix("sbatch: fatal: ")
            raise ConfigError(f"no Slurm answers here ({last}): {machine_checks.without_slurm()}") from None
        said = str(error).strip()
        if isinstance(error, FailedSubmissionError) or not said or UNANSWERED.search(said):
            raise NoAnswer(f"sbatch has not answered ({reason})") from None
        if limit := SUBMIT_LIMIT.search(reason):
            raise TooManyJobs(limit[0]) from None
        raise ConfigError(f"Slurm refused the job: {reason}") from None


class TooManyJobs(ConfigError):
    """Slurm takes no more jobs until others of the user, or of the account, have ended. The message is Slurm's word for
    the limit."""


class NoAnswer(ConfigError):
    """sbatch has failed without saying that Slurm has refused the job."""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Kill sbatch if it runs longer: then it fails. Also if this is interrupted: nobody waits for it any more."""
    timer = threading.Timer(seconds, kill_children, ["sbatch"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        kill_children("sbatch")
        raise
    finally:
        timer.cancel()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and a closed terminal raise SystemExit instead of ending the process, so that a submission during
    which Slurm is silent leaves nothing behind. Only in the main thread."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt  # for any other exception, subprocess would wait for sbatch to end

    main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def throwaway_folder(verb: str) -> Iterator[Path]:
    """A folder that is removed however the command ends."""
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix=f"laststep-{verb}-", ignore_cleanup_errors=True) as folder,
    ):
        yield Path(folder)


@contextlib.contextmanager
def _without_launcher_variables() -> Iterator[None]:
    """Hide the variables of a surrounding launcher: sbatch would read them as options and pass them on to the job,
    whose ranks would mistake themselves for that launcher's ranks. SLURM_CONF, which names the Slurm to talk to, and
    the user's SBATCH_* stay; so do MASTER_ADDR and MASTER_PORT, unless a RANK is set too."""
    prefixes = (*LAUNCHER_VARIABLES, *(TORCH_VARIABLES if "RANK" in os.environ else ()))
    hidden = {k: v for k, v in os.environ.items() if k.startswith(prefixes) and k != "SLURM_CONF"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _sbatch_message(error: Exception) -> str:
    """sbatch's error messages, on one line."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__
