"""The sbatch script of a job: submitit's executor, with everything that `launch` says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from laststep import compat, say
from laststep.code.code_copy import origin_of, python_path
from laststep.config.checks import nodes_for
from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.job import nodes
from laststep.ranks.launchers import BATCH_HOST, RESTARTS, UNDECIDED, WORKING_FOLDER
from laststep.ranks.slurm import TAG_VARIABLE, UNENDED
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.trainer import NO_LIMIT

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


def run_executor(config: Config, run: RunDir, tag: str = "") -> SbatchExecutor:
    """The executor for the ranks of a run. `tag` is for the job's comment, by which the run knows its job."""
    # A rank that fails ends the others, even if they are stuck; at a stop every rank but 0 exits 0, see Stopped.
    srun_args, options = ["--kill-on-bad-exit=1"], {"requeue": True}
    if config.launch.chooses_nodes:
        options["no-kill"] = True  # a node that dies does not end the job
    first, last = after_ranks(run, config.launch), start_again(run, config.launch)
    executor = job_executor(config, run, first, srun_args, options, tag, last)
    executor.python += " -u -m laststep.job.supervisor"  # which starts the rank
    if exclude := nodes.excluded_at_submission(run, config.launch):
        executor.update_parameters(exclude=exclude)
    return executor


def job_executor(
    config: Config,
    run: RunDir,
    setup: Sequence[str],
    srun_args: Sequence[str],
    options: Mapping[str, Any],
    tag: str = "",
    last: Sequence[str] = (),
) -> SbatchExecutor:
    """The executor for any job that runs the code in `run.code`.

    `setup` holds the first lines of its batch shell, `last` the last ones before srun, `options` further options of
    sbatch.
    """
    launch = config.launch
    executor = SbatchExecutor(folder=run.logs, max_num_timeout=NO_LIMIT, python=launch.python)
    if launch.chooses_nodes:
        # With --ntasks-per-node, Slurm 22.05 would never start the job on fewer nodes again, see docs/design.md. So
        # the job asks for the CPUs of that many ranks, and its shell passes the number of ranks to srun.
        options = {**options, "nodes": launch.job_nodes, "mincpus": launch.ranks_per_node * launch.cpus_per_task}
        setup = [*setup, *rank_count(launch, nodes_for(config.train.shares, launch))]
    folder = run_folders.working_folder(run)
    if folder != Path.cwd():  # a run that is resumed from elsewhere
        options = {**options, "chdir": folder}
    slurm = {option: value for option, value in launch.slurm.items() if value is not None}
    if tag:
        slurm["comment"] = f"{slurm.get('comment') or ''} {tag}".strip()
        setup = [*setup, f"export {TAG_VARIABLE}={tag}"]
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
        setup=[*setup, *environment(config, run), *user_setup(launch), *last],
        # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task (man srun). --chdir: `python -m` searches
        # the current folder first, see Trainer.
        srun_args=[f"--cpus-per-task={launch.cpus_per_task}", *srun_args, f"--chdir={run.code}", *launch.srun],
        stderr_to_stdout=True,
        additional_parameters={**options, **slurm},
        **{key: value for key, value in optional.items() if value is not None},
    )
    return executor


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
    python, folder, copy = (shlex.quote(str(word)) for word in (sys.executable, run.path, run.code))
    return [
        *run_folders.trusted_in_shell(run),
        *_requeue_unrecorded(launch),
        "# This shell outlives all ranks. If they fail or are killed, it decides what follows: a restart (status 0), a",
        "# requeue, or the end.",
        "after_ranks() {",
        "    trusted || return 1",
        f"    export {UNDECIDED}=$(mktemp)  # it deletes this file once it has decided",
        "    (",
        "        trap '' TERM USR1 USR2",
        f"        cd {copy} || :  # on a bad mount; the setup may have set -e",
        f"        timeout -s KILL 300 {python} -m laststep.job.after_ranks {folder} $1 ${{setup_line-}} && exit",
        f'        [ ! -e "${UNDECIDED}" ] || {{ rm -f "${UNDECIDED}"; requeue_unrecorded || :; }}',
        "        exit $1",
        "    )",
        "}",
        "at_exit() {",
        "    status=$?",
        "    trap - DEBUG",
        "    export LASTSTEP_SIGNALLED=1  # too late for a restart",
        "    [ $status = 0 ] || after_ranks $status",
        "}",
        "trap at_exit EXIT",
        "trap 'export LASTSTEP_SIGNALLED=1' TERM USR1 USR2",
        "trusted || { trap - EXIT; exit 2; }",
    ]


def _requeue_unrecorded(launch: Launch) -> list[str]:
    """Lines for a node whose Python cannot start, or hangs: its mounts are bad, say. They do what after_ranks does
    where the disk fails, with Slurm alone, see `note_unrecorded` in laststep/ranks/slurm.py."""
    needs, leaves = launch.job_nodes.partition("-")[0], int(launch.exclude_after is not None)
    return [
        f"unended='({'|'.join(UNENDED)})' max_failures={launch.max_failures} needs={needs} leaves={leaves}",
        *_REQUEUE_UNRECORDED.splitlines(),
    ]


_REQUEUE_UNRECORDED = r"""# For a node on which not even Python starts: requeue the job, unless Slurm has ended it.
requeue_unrecorded() {
    shown=$(scontrol show job $SLURM_JOB_ID --all) || return 0
    [[ $shown =~ JobState=$unended[[:space:]] ]] || return 0
    [[ $shown != *laststep:* || $shown == *"${LASTSTEP_JOB_TAG-}"* ]] || return 0  # another job has the id now
    restart=${SLURM_RESTART_COUNT:-0} again=1  # the job's comment says for how many starts in a row this was so
    if [[ $shown =~ laststep-unrecorded:([0-9]+)@([0-9]+) ]] && ((restart - BASH_REMATCH[2] < 2)); then
        again=$((BASH_REMATCH[1] + (BASH_REMATCH[2] < restart)))  # of this start it may be noted already
    fi
    comment=$(echo "$shown" | sed -n 's/ *laststep-unrecorded:[0-9@]*//; s/ *$//; s/^ *Comment=//p')
    comment+="${comment:+ }laststep-unrecorded:$again@$restart"
    ((again > max_failures)) || scontrol update JobId=$SLURM_JOB_ID Comment="$comment" || again=$((restart + 1))
    if ((again > max_failures)); then
        echo "[laststep] not requeued: Python did not start in the last $again starts of this job" \
            "(launch.max_failures=$max_failures)"
        return 0
    fi
    echo "[laststep] requeueing job $SLURM_JOB_ID: Python does not start on $SLURMD_NODENAME, or hangs"
    scontrol requeue $SLURM_JOB_ID && ((leaves)) || return 0
    [[ $shown =~ ExcNodeList=([^[:space:]]+) ]] && bad=${BASH_REMATCH[1]} && [ $bad != '(null)' ] || bad=
    [[ $(scontrol show partition $SLURM_JOB_PARTITION --all) =~ TotalNodes=([0-9]+) ]] || return 0
    left=$((BASH_REMATCH[1] - $(scontrol show hostnames "$bad" | wc -l)))
    ((left <= needs)) || scontrol update JobId=$SLURM_JOB_ID ExcNodeList=${bad:+$bad,}$SLURMD_NODENAME
}
""".replace("LASTSTEP_JOB_TAG", TAG_VARIABLE)


def start_again(run: RunDir, launch: Launch) -> list[str]:
    """Lines behind the user's setup: from here on `srun` starts the ranks, and starts them again after a fault.

    srun runs in the background: that of a dead node may never end, so it is killed once the attempt is over."""
    logs = shlex.quote(str(run.logs))
    return [
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}",
        f"step_over={logs}/{run.step_over('$job').name} size= share=",
        *(_choice(run, logs) if launch.chooses_nodes else []),
        "start_ranks() {",
        *(['    [ ! -e "$next_nodes" ] || size=$(<"$next_nodes")'] if launch.chooses_nodes else []),
        '    rm -f "$step_over"',
        '    (exec srun $size $share "$@") &',
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
        "        after_ranks $status || { trap - EXIT; exit $status; }",
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


def environment(config: Config, run: RunDir) -> list[str]:
    """Lines that set the ranks' environment."""
    variables = {
        "OMP_NUM_THREADS": str(config.launch.cpus_per_task),
        "PYTHONPATH": python_path(origin_of(run, config), run.code),
        say.COMMAND: say.command(),
        WORKING_FOLDER: str(run_folders.working_folder(run)),
        **config.launch.env,
    }
    return [f"export {name}={_quote(value)}" for name, value in variables.items()]


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


def _quote(value: str) -> str:
    """Quote for the shell, but let it expand variables such as $HOME."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", value) + '"'
