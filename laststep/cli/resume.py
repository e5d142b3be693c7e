"""resume: continue a run in a new job, perhaps on another number of ranks, perhaps to a later end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from laststep import rooms, script
from laststep.cli.parsers import (
    JOB_OPTIONS,
    LAUNCH_KEY,
    NO_RUN,
    Parser,
    add_key_options,
    add_sweep,
    add_ways,
    overrides_of,
    split,
)
from laststep.code import code_copy, uv
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.config.schema import COMMAND
from laststep.ranks.slurm import is_job_id, show_job
from laststep.records.attempt_record import AttemptRecord, users_line_in
from laststep.records.plan import read_plan
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.runs.run_folders import typed
from laststep.runs.run_status import RunStatus, StatusReader, is_finished, records_of
from laststep.say import command, listed, note

POLL_S = 10.0  # of --watch
DESCRIPTION = """\
Continue a run in a new job, from its newest intact checkpoint; a finished run
only to a later end. Words after -- are added to those of the run's script."""


def add_arguments(parser: Parser) -> None:
    """Declare what resume takes."""
    parser.passes_on = True
    add_sweep(parser, "each run of this sweep that has not finished and has no job")
    parser.add_argument("run", metavar="RUN", nargs="?", help="name or folder of the run")
    add_key_options(parser, JOB_OPTIONS)
    add_ways(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="stay, and resume the run each time its job ends before it: on a login node, where compute nodes cannot "
        "requeue a job",
    )
    parser.add_argument(
        "--code",
        choices=("same", "new"),
        help="the code of the job. same (the default): the copy of the run; new: the repository as it is now. Needed "
        "if a run has failed in a file that has changed since",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="with --local: even if Slurm does not answer. Only if the cluster is gone: a waiting job of the run "
        "would continue it as well",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar=LAUNCH_KEY,
        help="a launch.* or track.* key, or a later end: train.epochs=N, train.max_steps=N",
    )


def run(args: argparse.Namespace) -> int:
    """Continue a run, or those of a sweep; returns the exit status."""
    if args.sweep is not None:
        return _resume_sweep(args)
    if args.run is None:
        raise ConfigError(NO_RUN)
    if args.watch:
        return _watch(args)
    from laststep.runs import unanswered
    from laststep.submission import submission

    way, overrides = Way.of(args), overrides_of(args)
    if args.force and way is not Way.LOCAL:
        raise ConfigError("--force: needs --local; with Slurm, cancel the run's job before you resume it")
    root = run_folders.root_among(overrides)
    folder = run_folders.find_run_to_continue(args.run, root)
    for word in overrides:
        key = word.partition("=")[0]
        if key == "launch.name" or not run_config.may_change(key):
            raise ConfigError(
                f"{word}: a resumed run keeps its configuration, but for launch.* keys and a later end; start another "
                f"run from this one: `{command(f'submit --from {typed(folder)} {word}')}`"
            )
    before = run_config.as_submitted(folder)
    words = [*overrides, *_more_words(before, args.passed_on)]
    config = run_config.load(folder, words, restore=not args.dry_run)
    changed = run_config.changes(before, config)
    extended = {key: pair for key, pair in changed.items() if key in run_config.ENDS}
    if not extended and not args.passed_on and _says_finished(folder, config):
        return 0
    known = 0 if args.dry_run else unanswered.check_has_no_job(folder, args.force)
    search = code_copy.search_path(folder, config, runs_copy=way not in (Way.LOCAL, Way.DEBUG))
    config = submission.ready(config, Machine(way, new=False, search=search, words=overrides))
    if extended:
        schedule = "" if config.optim.schedule == "constant" else f" (optim.schedule={config.optim.schedule})"
        longer = f"longer {run_config.shown(extended)}; the learning rate follows the new length{schedule}"
        note(longer, sys.stdout, indent=7)
    if args.passed_on:
        print(f"script {script.shown(config.script)}")
        print(f"  was  {script.shown(before.script)}")
    _choose_code(folder, config, args.code, live=way in (Way.LOCAL, Way.DEBUG), dry_run=args.dry_run)
    if args.dry_run:
        return submission.show(config, here=way in (Way.LOCAL, Way.DEBUG))
    with run_folders.reconfigured(folder, config):
        return submission.start(config, folder, way, known=known)


def _more_words(config: Config, words: Sequence[str]) -> list[str]:
    """The `key=value` word that adds these words to those of the run's script. Raises ConfigError without a script."""
    if words and not config.script:
        raise ConfigError(f"-- {script.shown(words)}: words for a script, and this run is of task={config.task}")
    return [script.as_override([*config.script, *words])] if words else []


def _choose_code(run: RunDir, config: Config, choice: str | None, live: bool, dry_run: bool) -> None:
    """Say which code the next attempt runs, where the copy and the repository differ, and act on the `choice`.

    Raises ConfigError where the run has failed in a file that has changed since: it would fail there again, or nobody
    would know with which code it has trained.
    """
    if live and choice == "same":
        raise ConfigError("--code same: --local and --debug run the code as it is now; submit it to run its copy")
    changed, since = code_copy.changed_files(run, config), "the run was submitted"
    if live and not run.code.exists() and (started := read_submissions(run.submissions)):
        changed, since = code_copy.edited_files(run, config, started[-1]["time"]), "the run was last started"
    if choice == "new" and not live and not dry_run:
        code_copy.replace_copy(run)
        uv.forget(run)
    if not changed:
        return
    if live or choice == "new":
        return note(f"code   as it is now; changed since {since}: {listed(changed)}", sys.stdout, indent=7)
    failed = [record for record in records_of(run)[-1:] if record["reason"] == "failed"]
    line = users_line_in(failed[0]["error"]) if failed else ""
    if choice is None and line and line.partition(", ")[0] in {path.rpartition("/")[2] for path in changed}:
        raise ConfigError(
            f"{run.name}: failed in {line}, and that file has changed since: --code new takes the repository as it is "
            "now, --code same what the run has trained with"
        )
    note(f"code   as submitted; changed since: {listed(changed)} (--code new takes that)", sys.stdout, indent=7)


def _watch(args: argparse.Namespace) -> int:
    """Resume the run each time that its job has ended; returns the exit status."""
    words = overrides_of(args)
    if Way.of(args) is not Way.SLURM:
        raise ConfigError(
            f"--watch: submits jobs and prints no log; leave out --{Way.of(args).value.replace('_', '-')}"
        )
    if wrong := [word for word in words if not word.startswith("launch.")]:
        raise ConfigError(f"{wrong[0]}: --watch continues a run as it is; resume it once with this, then watch it")
    folder = run_folders.find_run(args.run, run_folders.root_among(words))
    once = argparse.Namespace(**{**vars(args), "watch": False})

    def say(text: str) -> None:
        note(f"[laststep] {text}")

    try:
        return watch(folder, run_config.load(folder, words).launch.max_failures, lambda: run(once), say)
    except KeyboardInterrupt:
        say(f"{folder.name} is no longer watched; a job that it has in the queue stays there")
        return 130


def watch(run: RunDir, max_failures: int, resume: Callable[[], object], say: Callable[[str], None]) -> int:
    """Resume a run each time that its job has ended before it, until it has ended for good; returns 0 if it has
    finished, else 1. For clusters whose compute nodes cannot call scontrol, and so cannot requeue a job. All that a
    watcher forgets when it is started again is how many jobs in a row have failed.

    `resume` submits a job that continues the run. If it raises ConfigError, for example because Slurm refuses the job,
    it is called again later. After more than `max_failures` jobs in a row that kept no step, the run is left alone.
    """
    reader, idle, ended, refusal = StatusReader(), 0, None, ""
    while True:
        (status,) = reader.read([run])
        if status.state == "finished":
            rooms.look_on(run)
            return 0
        if not status.alive:
            records = records_of(run)
            rooms.look_on(run)
            if ended != status.job_id:
                ended = status.job_id
                idle = 0 if kept_step(records) > kept_step(r for r in records if r["job_id"] != ended) else idle + 1
            why_not = why_ended(status, records)
            if not why_not and idle > max_failures:
                why_not = f"retry budget used up (launch.max_failures={max_failures})"
            if why_not:
                say(f"{run.name}: not resumed: {why_not}")
                return 1
            try:
                resume()
            except ConfigError as error:
                if refusal != str(error):
                    refusal = str(error)
                    say(f"{refusal}; trying again every {POLL_S:.0f} s")
        time.sleep(POLL_S)


def why_ended(status: RunStatus, records: Sequence[AttemptRecord]) -> str:
    """Why the run is not to be continued, now that its job has left the queue; empty if it is."""
    if status.job_id is None or not is_job_id(status.job_id):
        return "it was not submitted to Slurm"
    # Slurm knows for some minutes how a job ended. The ranks on such a cluster cannot ask why they were signalled.
    state = (show_job(status.job_id) or {}).get("JobState", "")
    last = next((record for record in reversed(records) if record["job_id"] == status.job_id), None)
    if state == "CANCELLED" or (last is not None and last["reason"] == "cancelled"):
        return f"job {status.job_id} was cancelled"
    if last is not None and last["reason"] in ("failed", "hung", "timeout") and not last["requeue"]:
        return status.why or last["reason"]
    return ""


def kept_step(records: Iterable[AttemptRecord]) -> int:
    """The last step that any attempt has kept."""
    return max((record["end_step"] - record["lost_steps"] for record in records), default=0)


def _says_finished(run: RunDir, config: Config) -> bool:
    """Whether the run has finished. If so, say that, and name the two ways to train on."""
    records, plan = records_of(run), read_plan(run.plan)
    if not is_finished(read_submissions(run.submissions), records):
        return False
    if config.task == COMMAND:
        print(f"{run.name}: finished")
        print(f"extend {command(f'resume {typed(run)} -- WORDS')}: words to add to those of its command")
        return True
    step = records[-1]["end_step"]
    total = plan["total_steps"] if plan else None
    where = " --local" if records[-1]["job_id"].startswith("local-") else ""
    more, name = run_config.longer(config.train, total), typed(run)
    print(f"{run.name}: finished at {step} of {total or step}")
    print(f"extend {command(f'resume {name} {more}{where}')}")
    print(f"branch {command(f'submit --from {name} {more} optim.lr={config.optim.lr / 10:g}{where}')}")
    return True


def _resume_sweep(args: argparse.Namespace) -> int:
    """Continue the runs of a sweep one after the other; returns the largest exit status."""
    if args.follow or args.debug or args.watch:
        raise ConfigError(f"--sweep {args.sweep}: has several runs; --follow, --debug and --watch are for one")
    names, overrides = split([*([] if args.run is None else [args.run]), *args.overrides])
    root = run_folders.root_among(overrides)
    runs = run_folders.find_runs(names, root, args.sweep)
    worst = 0
    for folder, status in zip(runs, StatusReader().read(runs)):
        if status.alive or status.state == "finished":
            print(f"{folder.name}: {status.state}, so there is nothing to resume")
            continue
        one = {**vars(args), "sweep": None, "run": str(folder.path), "overrides": overrides}
        worst = max(worst, run(argparse.Namespace(**one)))
    return worst
