"""Shared by the verbs' parsers: the parser class, options that set a configuration key, the RUN argument."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from laststep import compat, script
from laststep.config.errors import ConfigError, nearest
from laststep.say import command

if TYPE_CHECKING:
    from laststep.config.config import Config
    from laststep.rundir import RunDir

# Options that set a configuration key: option -> (key, placeholder in --help, help).
KeyOptions = Mapping[str, tuple[str, str, str]]
JOB_OPTIONS: KeyOptions = {
    "--nodes": (
        "launch.nodes",
        "N|MIN-MAX",
        "number of nodes, or a range such as 1-4: each start takes as many as are free",
    ),
    "--gpus-per-node": ("launch.gpus_per_node", "G", "GPUs per node, one rank each"),
    "--tasks-per-node": ("launch.tasks_per_node", "T", "ranks per node, on CPU nodes"),
    "--partition": ("launch.partition", "P", "Slurm partition"),
    "--time": ("launch.time_min", "TIME", "time limit of one attempt: minutes, H:M:S, D-H or D-H:M:S"),
}
NEW_RUN_OPTIONS: KeyOptions = {**JOB_OPTIONS, "--name": ("launch.name", "RUN", "name of the run and of its folder")}

# key=value words, as --help shows them and as the completion recognizes them.
ANY_KEY, LAUNCH_KEY, ROOT_KEY = "key=value", "launch.KEY=value", "launch.root=FOLDER"
PATH_KEYS = ("data.root", "launch.root", "model.weights", "checkpoint.start_from")
OWN_CONFIG = "configs/default.yaml"  # of the project; `laststep init` writes one
DEMO = "mnist"  # ships with Laststep
NO_RUN = "name the run, or its folder"


class Parser(argparse.ArgumentParser):
    """argparse, with one line for what is wrong."""

    passes_on = False  # whether the words after `--` are options of another program
    takes_script = False  # whether a script may take the place of a task: `verbs.Verb.run` splits it off

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) < len(message.split()) and not unknown[0].startswith("-"):
            message = f"{unknown[0]}: one word too many; see --help"
        elif len(unknown) < len(message.split()):
            message = (
                f"{unknown[0]}: no such option; {nearest(unknown[0].split('=')[0], list(compat.options_of(self)))}"
            )
        if message.startswith("the following arguments are required: RUN"):
            message = NO_RUN  # argparse would ask for the optional key=value words too
        raise ConfigError(message)


def add_config(parser: Parser) -> None:
    """The options that name the YAML files of a configuration."""
    parser.add_argument(
        "--config",
        metavar="NAME|PATH",
        help=f"a name in configs/, or a YAML file (default: {OWN_CONFIG} of the project); {DEMO} is a demo",
    )
    parser.add_argument(
        "--site",
        metavar="NAME|PATH",
        help="settings of this cluster: a name in configs/site/, or a YAML file (default: $LASTSTEP_SITE)",
    )


def config_of(args: argparse.Namespace, words: Sequence[str]) -> str | None:
    """The YAML file that a new run begins with: the one that was named, else the project's own. None: the key=value
    `words` name a task or a script, which need none.

    Raises ConfigError where nothing says what to train: what trains by itself is a project, not Laststep's demo.
    """
    if args.config is not None:
        return str(args.config)
    if any(word.startswith("script=") for word in words):
        return None
    if os.path.isfile(OWN_CONFIG):
        return OWN_CONFIG
    from laststep.config.config import PACKAGED

    own = Path("configs")
    if own.resolve() == PACKAGED.resolve():
        return DEMO  # a clone of Laststep is the demo's project
    if any(word.startswith("task=") for word in words):
        return None
    if names := sorted(path.stem for path in own.glob("*.yaml")):
        raise ConfigError(f"there is no {OWN_CONFIG}; name a configuration: --config {' or '.join(names[:5])}")
    raise ConfigError(
        f"no project here (no configs/ in {Path.cwd()}, nor above it): `{command('init')}` writes one; "
        f"`{command(f'--config {DEMO} --local')}` trains the demo, handwritten digits"
    )


def stem_of(source: str | None, config: Config) -> str:
    """What a new run is named after: its script, its configuration, or its task."""
    from laststep.config.config import find_config

    if config.script:
        return script.stem_of(config.script)
    return ".".join(config.task.split(".")[-2:]) if source is None else find_config(source).stem


def add_key_options(parser: Parser, options: KeyOptions) -> None:
    """Options that set a configuration key; `overrides_of` reads them."""
    for option, (key, metavar, help) in options.items():
        parser.add_argument(option, metavar=metavar, help=f"{help} ({key})")


def add_ways(parser: Parser) -> None:
    """The options that say where the ranks run; `Way.of` reads them."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--follow", action="store_true", help="stay, and print rank 0's log until the run ends")
    ways.add_argument(
        "--local", action="store_true", help="run all ranks on this machine; Ctrl-C stops them and keeps every step"
    )
    ways.add_argument(
        "--debug",
        action="store_true",
        help="run one rank, with the samples of all, in this process; an error opens the debugger",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the configuration and the sbatch script; submit nothing"
    )


def add_overrides(parser: Parser, help: str = "set a configuration key") -> None:
    """Any number of key=value words."""
    parser.add_argument("overrides", nargs="*", metavar=ANY_KEY, help=help)


def add_new_run(parser: Parser, help: str = "set a configuration key") -> None:
    """The configuration of a new run, by files, options and words, and a script in place of a task."""
    add_config(parser)
    add_key_options(parser, NEW_RUN_OPTIONS)
    add_overrides(parser, help)
    parser.takes_script = True


def add_run(parser: Parser) -> None:
    """The run that a verb is about, and where to find it."""
    parser.add_argument("run", metavar="RUN", help="name or folder of the run")
    parser.add_argument("overrides", nargs="*", metavar=ROOT_KEY, help="the folder that holds all runs")


def add_checkpoint(parser: Parser) -> None:
    """Which of a run's checkpoints a verb is about, and which of its weights."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    which.add_argument("--best", action="store_true", help="the best checkpoint, see checkpoint.best_by")
    parser.add_argument("--raw", action="store_true", help="the weights as trained, not averaged")


def add_runs(parser: Parser) -> None:
    """Several runs, and where to find them; `split` separates the two."""
    parser.add_argument("words", nargs="*", metavar="RUN", help="name or folder of the run")


def add_sweep(parser: Parser, help: str) -> None:
    """The runs of a sweep, instead of naming each."""
    parser.add_argument("--sweep", metavar="NAME", help=help)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """All key=value words; those of the options come last, so an option wins over a word."""
    given = {key: getattr(args, option[2:].replace("-", "_"), None) for option, (key, _, _) in NEW_RUN_OPTIONS.items()}
    return [*args.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def named_run(args: argparse.Namespace) -> RunDir:
    """The run that a verb is about, see `add_run`. Raises ConfigError."""
    from laststep.runs import run_folders

    return run_folders.find_run(args.run, run_folders.runs_root(args.overrides))


def named_runs(args: argparse.Namespace) -> list[RunDir]:
    """The runs that a verb is about, see `add_runs` and `add_sweep`. Raises ConfigError, also where none is named."""
    from laststep.runs import run_folders

    names, overrides = split(args.words)
    if not names and args.sweep is None:
        raise ConfigError(NO_RUN)
    return run_folders.find_runs(names, run_folders.runs_root(overrides), args.sweep)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of runs, and key=value words."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]
