"""`python -m laststep`: one rank of a run, under any launcher."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from laststep import script
from laststep.attempt import user_error
from laststep.attempt.predecessor import finish_of
from laststep.checkpoint.files import Patience
from laststep.checkpoint.store import START_S
from laststep.cli.parsers import Parser, add_config, config_of, split, stem_of
from laststep.cli.verbs import VERBS
from laststep.config import secret
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError, nearest
from laststep.config.machine import Machine, Way
from laststep.config.reads import given_by
from laststep.doctor.greeting import gather_greetings, greet, wrong_sums
from laststep.ranks.fault import MeetingError
from laststep.ranks.launchers import detect_world
from laststep.ranks.process import Signals, die_with_parent
from laststep.ranks.world import World
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.runs.run_folders import only_owner_writes
from laststep.say import command, note, say
from laststep.submission import submission
from laststep.submission.local import spawn
from laststep.trainer import Trainer

EPILOG = """\
Start it under any launcher; each process finds out which rank it is:
  python -m laststep --name first                one process
  python -m laststep --spawn 4 --name first      four processes on this machine
  torchrun --nproc-per-node 4 -m laststep --name first
  srun python -m laststep --name first           in an sbatch script or salloc
  mpirun python -m laststep --name first         Open MPI
The same command with the same name continues the run. The launcher, not
launch.nodes and its like, decides how many ranks there are.
`python -m laststep hello` tests in seconds whether the ranks find each other.
To list all keys with their values: `{command} --config mnist --dry-run`.
"""


def main(words: Sequence[str]) -> int:
    """Train in this process; returns the exit status, unless a stop's SystemExit carries it. Raises ConfigError."""
    if words[:1] == ["hello"]:
        return hello(words[1:])
    if words and words[0] in (*VERBS, "--local", "--nodes") and not Path(words[0]).is_dir():
        raise ConfigError(f"{words[0]}: `python -m laststep` is one rank of a run; type `{command(shlex.join(words))}`")
    parser = Parser(
        "python -m laststep", "One rank of a run, under any launcher.", EPILOG.replace("{command}", command())
    )
    add_config(parser)
    parser.add_argument("--name", metavar="RUN", help="name of the run; an existing one is continued (launch.name)")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "words", nargs="*", metavar="key=value|FOLDER", help="set a configuration key, or continue a run"
    )
    words, args_script = script.split(words)
    args = parser.parse_intermixed_args(words)
    args.passed_on = args_script
    folders, overrides = split(args.words)
    if args_script:
        overrides.append(script.as_override(args_script))
    with only_owner_writes():
        return _main(args, folders, overrides)


def _main(args: argparse.Namespace, folders: Sequence[str], overrides: list[str]) -> int:
    """What the options ask for: continue a run, start one rank, or several."""
    if folders:
        return _continue(Path(folders[0]), overrides)
    if args.name is not None:
        overrides.append(f"launch.name={args.name}")
    source = config_of(args, overrides)
    if args.spawn is None:
        return _train(source, overrides, args.site)
    config = _load(source, overrides, args.site)
    config = run_folders.with_root_and_name(config, stem_of(source, config))
    overrides.append(f"launch.name={config.launch.name}")
    return spawn(args.spawn, functools.partial(_train, source, overrides, args.site))


def _train(source: str | None, overrides: Sequence[str], site: str | None) -> int:
    """Start the run, or continue it, in this rank."""
    world = detect_world()
    config = _load(source, overrides, site)
    stem = stem_of(source, config)
    if config.launch.name is None and world.launcher != "python":
        # All ranks, and the same job after a requeue, arrive at this name.
        config = with_launch(config, name=f"{stem}-{world.job_id}")
    machine = Machine(Way.RANK, new=False, words=overrides, source=source)
    config = submission.ready(config, machine, stem)
    if world.rank == 0:
        say(submission.what_trains(config, source))
    run = run_folders.folder_of(config)
    new = not Patience(START_S, say).insist(run.config.exists)
    if new and world.rank == 0:
        run_folders.create(config, given_by(machine))
    elif not new:
        started = _load_started(run, world)
        config = run_config.with_former_defaults(config, started, overrides)
        _check_same(config, started)
        if world.rank == 0:
            secret.write(run.secrets)
    try:
        return _rank(config, run, world)
    except ConfigError:
        if new and world.rank == 0 and not run.checkpoints.exists():
            run_folders.remove(run)
        raise


def _continue(folder: Path, overrides: Sequence[str]) -> int:
    """Continue the run in that folder, in this rank."""
    patience = Patience(START_S, say)
    if not patience.insist(lambda: _exists(folder)):
        runs = [str(path.parent) for path in folder.parent.glob("*/config.yaml")]
        raise ConfigError(f"{folder}: no such folder of a run; {nearest(str(folder), ['hello', *sorted(runs)])}")
    if overrides:
        raise ConfigError(f"{overrides[0]}: a continued run keeps its configuration")
    world, run = detect_world(), RunDir(folder)
    if not patience.insist(lambda: _exists(run.config)):
        run = run_folders.find_run(str(folder), str(folder.parent))
    return _rank(_load_started(run, world), run, world)


def _exists(path: Path) -> bool:
    """Whether there is something at a path. Raises OSError where that cannot be seen right now."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _rank(config: Config, run: RunDir, world: World) -> int:
    if world.launcher in ("submitit-local", "ray"):
        die_with_parent(signal.SIGTERM)  # a killed launcher must not leave its ranks training unseen
    if world.launcher != "submitit-local" and world.rank == 0:
        patience = Patience(START_S, say)
        if patience.insist(lambda: finish_of(run, config)) is None:
            name = {"job_name": os.environ["SLURM_JOB_NAME"]} if "SLURM_JOB_NAME" in os.environ else {}
            patience.insist(lambda: run_folders.record_submission(run, world.job_id, **name))
    user_error.main_is_ours = True
    Trainer(config)()
    return 0


def _load_started(run: RunDir, world: World) -> Config:
    """The configuration of a run that exists. All ranks read it; rank 0 reports what is unusual, and restores it."""
    patience = Patience(START_S, say)
    if world.rank:
        return patience.insist(lambda: run_config.load(run, warn=lambda _: None))
    return patience.insist(lambda: run_config.load(run, warn=lambda text: say(f"WARNING: {text}"), restore=True))


def _load(source: str | None, overrides: Sequence[str], site: str | None) -> Config:
    return Config.load(source, overrides, site or run_folders.site())


def _check_same(config: Config, started: Config) -> None:
    """Raise ConfigError when the run was started with other values: it would be neither that run nor this one."""
    # The folder of the data may be recorded as an absolute path, see `run_folders.with_absolute_data`.
    before, given = run_folders.with_absolute_data(started), run_folders.with_absolute_data(config)
    for key, (then, now) in run_config.changes(before, given).items():
        if key == "script":
            what = f"`{script.shown(then)}`" if then else f"task={started.task}"
            raise ConfigError(
                f"{script.shown(now)}: {config.launch.name} was started as {what}, and a run keeps its words; choose "
                "another --name, or begin another run with LASTSTEP_NEW=1"
            )
        if not run_config.may_change(key):
            raise ConfigError(
                f"{key}={now}: {config.launch.name} was started with {then}, and a run keeps its values; leave this "
                "one out, or choose another --name"
            )


HELLO_DESCRIPTION = """\
Every rank meets the others as in a run, says who it is, and adds a one to a sum
over all ranks."""
HELLO_EPILOG = """\
Start it the way you start a run:
  python -m laststep hello --spawn 4
  torchrun --nproc-per-node 4 -m laststep hello
  srun python -m laststep hello
  mpirun python -m laststep hello
Exit status: 0 every rank arrived and has the right sum; 1 one has not; 2 wrong
input.
"""
SHOWN = ("NCCL_", "GLOO_", "TORCH_", "MASTER_", "CUDA_VISIBLE_DEVICES")


def hello(words: Sequence[str]) -> int:
    """Say hello from this rank; returns the exit status. Raises ConfigError."""
    parser = Parser("python -m laststep hello", HELLO_DESCRIPTION, HELLO_EPILOG)
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--backend", metavar="B", help="auto, nccl or gloo (launch.backend)")
    parser.add_argument("--env", action="store_true", help="print the variables of NCCL, gloo and torch on each rank")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a configuration key")
    args = parser.parse_intermixed_args(words)
    overrides = [*args.overrides, *([f"launch.backend={args.backend}"] if args.backend else [])]
    config = Config.load(None, overrides, run_folders.site())
    run_folders.check_writable(Path(os.path.expanduser(config.launch.root)).absolute())
    one_rank = functools.partial(_hello, config, args.env)
    return one_rank() if args.spawn is None else spawn(args.spawn, one_rank)


def _hello(config: Config, show_variables: bool) -> int:
    """One rank. Leaves nothing behind."""
    signals = Signals.catch()
    world = detect_world()
    root = Path(os.path.expanduser(config.launch.root)).absolute()
    meeting, made_root = root / f".hello-{world.attempt}.json", not root.exists()

    def clean_up() -> None:
        if world.rank == 0:
            for file in (meeting, meeting.with_suffix(".key")):
                file.unlink(missing_ok=True)
            if made_root:
                with contextlib.suppress(OSError):  # another command uses it now
                    root.rmdir()

    def stop(number: signal.Signals) -> None:
        clean_up()
        os._exit(128 + number)  # not sys.exit: the main thread may be waiting in a collective

    signals.on_first(stop)
    from laststep.ranks.group import is_peer_loss

    try:
        return _meet_and_greet(config, world, meeting, show_variables)
    except RuntimeError as error:
        if not (isinstance(error, MeetingError) or is_peer_loss(error)):
            raise
        note(f"error: {error}")
        return 1
    finally:
        clean_up()


def _meet_and_greet(config: Config, world: World, meeting: Path, show_variables: bool) -> int:
    """Meet the other ranks. Rank 0 prints all greetings. Returns the exit status, 1 for a wrong sum."""
    from laststep.ranks.group import join

    group = join(config, world, meeting, timeout_s=0)
    group.connect(timeout_s=0)
    greeting = greet(group)
    gathered = gather_greetings(group, greeting, _variables())
    group.close()
    wrong = wrong_sums([greeting for greeting, _ in gathered] or [greeting])
    if world.rank == 0:
        print(*(greeting for greeting, _ in gathered), sep="\n")
        if show_variables:
            lines = _variable_lines([variables for _, variables in gathered])
            print(*lines or ["none of these variables is set"], sep="\n")
        if not wrong:
            print(f"sum of ones: {world.size} on every rank")
        for line in wrong:
            note(f"error: {line}")
    return int(bool(wrong))


def _variables() -> dict[str, str]:
    """The environment variables of this rank that affect collectives, as they are after the meeting."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}


def _variable_lines(variables: Sequence[Mapping[str, str]]) -> list[str]:
    """A line per variable and rank; only one line for a variable that is the same on all ranks."""
    lines = []
    for name in sorted(set().union(*variables)):
        values = [of_one_rank.get(name) for of_one_rank in variables]
        if len(set(values)) == 1:
            lines.append(f"every rank: {name}={values[0]}")
        else:
            lines += [f"rank {rank}: {name}={value}" for rank, value in enumerate(values) if value is not None]
    return lines
