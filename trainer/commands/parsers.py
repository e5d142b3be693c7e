"""The words that each verb takes: parsed by `main`, completed by `completion`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer import compat
from trainer.config.errors import ConfigError, nearest

# Options that are shorthands of a configuration key: option -> (key, what to write for it, what it does).
SHORTHANDS = {
    "--nodes": ("launch.nodes", "N|MIN-MAX", "nodes of the job; of a range, what is free at each start"),
    "--gpus-per-node": ("launch.gpus_per_node", "G", "GPUs per node, one rank each"),
    "--tasks-per-node": ("launch.tasks_per_node", "T", "ranks per node, on CPU nodes"),
    "--partition": ("launch.partition", "P", "Slurm partition"),
    "--time": ("launch.time_min", "MIN", "time limit of one attempt, in minutes"),
}
SIZE = {
    "--nodes": ("launch.nodes", "N", "nodes of the job; of a range, all"),
    **{option: SHORTHANDS[option] for option in ("--gpus-per-node", "--tasks-per-node", "--partition")},
}
NAMED = SHORTHANDS | {"--name": ("launch.name", "RUN", "name of the run and of its folder")}

# key=value words, as --help shows them.
ANY_KEY, LAUNCH_KEY, ROOT_KEY = "key=value", "launch.KEY=value", "launch.root=FOLDER"
NO_RUN = "name the run, or its folder"

SUBMIT_EPILOG = """\
verbs (submit when none is given; `launch.py VERB --help` tells more):
  submit              start a new run
  sweep key=v1,v2     a run per combination of values, as one Slurm array
  resume RUN          continue a run in a new job, at any size
  status [RUN ...]    how all runs stand, or these
  logs RUN            what its ranks print, merged in time order
  cancel RUN          a stop: keep every step, then end
  drill RUN           preempt it on purpose, and see it come back
  verify RUN          is each checkpoint whole, and what is in it
  report RUN [...]    curves and attempts of one run or several, as one HTML page
  doctor              what here endangers a run; --nodes N: do the nodes work together
  completion SHELL    what makes the Tab key of bash or zsh complete all of this

Any key=value sets a key of the configuration, e.g. optim.lr=0.05 model.name=resnet18; docs/configuration.md lists all.
Exit status: 0 done, 1 the run failed, 2 the command or configuration is wrong, 130 stopped by Ctrl-C.
"""

DOCTOR = """\
This machine, this cluster and the folder of all runs: what is there, and what of it endangers a run.
With --nodes: a short job in which every rank meets the others, says hello and measures all-reduces."""
DOCTOR_EPILOG = """\
Exit status: 0 nothing endangers a run, and every rank said hello; 1 something does, or one did not; 2 wrong input.
"""


class Parser(argparse.ArgumentParser):
    """argparse, with one line for what is wrong."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def options(self) -> dict[str, argparse.Action]:
        """Each option as it is typed."""
        return compat.options_of(self)

    def positionals(self) -> list[argparse.Action]:
        """What is no option, in order."""
        return compat.positionals_of(self)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) < len(message.split()):
            message = f"{unknown[0]}: no such option; {nearest(unknown[0].split('=')[0], list(self.options()))}"
        if message.startswith("the following arguments are required: RUN"):
            message = NO_RUN  # argparse would ask for key=value words too, which are optional
        raise ConfigError(message)


def _submit() -> Parser:
    parser = Parser("launch.py [submit]", "Start a new run: submit it to Slurm, or run it here.", SUBMIT_EPILOG)
    add_config(parser)
    _add_shorthands(parser, NAMED)
    _add_ways(parser)
    parser.add_argument("overrides", nargs="*", metavar=ANY_KEY, help="set a key of the configuration")
    return parser


def _sweep() -> Parser:
    parser = Parser(
        "launch.py sweep",
        "Submit a run per combination of values, as one Slurm array. The same sweep again submits what is missing.",
        "Several values: key=v1,v2 or key=0..4. Shared by all: key=value, and the options.\n"
        "e.g. python launch.py sweep --name scan --parallel 4 optim.lr=0.1,0.03 seed=0..4 train.epochs=20",
    )
    add_config(parser)
    _add_shorthands(parser, NAMED)
    parser.add_argument("--parallel", type=int, metavar="K", help="run so many at a time (default: all)")
    parser.add_argument("overrides", nargs="*", metavar=ANY_KEY, help="set a key of the configuration, or vary it")
    return parser


def _resume() -> Parser:
    parser = Parser("launch.py resume", "Continue a run in a new job, from its newest whole checkpoint.")
    parser.add_argument("run", metavar="RUN", help="the run's name, or its folder")
    _add_shorthands(parser, SHORTHANDS)
    _add_ways(parser)
    parser.add_argument("overrides", nargs="*", metavar=LAUNCH_KEY, help="what may differ from the run's configuration")
    return parser


def _status() -> Parser:
    parser = Parser("launch.py status", "How all runs stand, or those that are named; one alone with its attempts.")
    parser.add_argument("--sweep", metavar="NAME", help="the runs of this sweep, the best first")
    parser.add_argument(
        "--by", metavar="METRIC", help="what the best has: a key of an epoch's line (default: val_loss)"
    )
    parser.add_argument("--watch", action="store_true", help="stay and keep it up to date; Ctrl-C ends it")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("words", nargs="*", metavar="RUN", help="names of runs, or their folders")
    return parser


def _logs() -> Parser:
    parser = Parser("launch.py logs", "What the ranks of a run print, merged in time order, through all attempts.")
    parser.add_argument("--rank", type=int, metavar="R", help="this rank alone")
    parser.add_argument("--attempt", type=int, metavar="A", help="this attempt alone, by its number in `status RUN`")
    parser.add_argument("-f", "--follow", action="store_true", help="stay, through every requeue, until the run ends")
    _add_run(parser)
    return parser


def _cancel() -> Parser:
    parser = Parser("launch.py cancel", "Stop a run after the step it is in, save it, and end its job.")
    _add_run(parser)
    return parser


def _drill() -> Parser:
    parser = Parser("launch.py drill", "Preempt a run as the scheduler would, and print what it cost.")
    _add_run(parser)
    return parser


def _verify() -> Parser:
    parser = Parser("launch.py verify", "Read each checkpoint of a run whole and compare it with its manifest.")
    parser.add_argument("--json", action="store_true", help="print a JSON list, oldest checkpoint first")
    _add_run(parser)
    return parser


def _report() -> Parser:
    parser = Parser("launch.py report", "Curves and attempts of one run, or of several side by side, as one HTML page.")
    parser.add_argument("words", nargs="+", metavar="RUN", help="names of runs, or their folders")
    return parser


def _doctor() -> Parser:
    parser = Parser("launch.py doctor", DOCTOR, DOCTOR_EPILOG)
    _add_shorthands(parser, SIZE)
    parser.add_argument("overrides", nargs="*", metavar=ANY_KEY, help="set a key of the configuration")
    return parser


def _completion() -> Parser:
    parser = Parser(
        "launch.py completion",
        "Print what makes a shell complete verbs, options, runs, configurations, keys and their values.",
        "e.g. in ~/.bashrc: source <(python /path/to/launch.py completion bash)",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh, which is to source it")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "submit": _submit,
    "sweep": _sweep,
    "resume": _resume,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "drill": _drill,
    "verify": _verify,
    "report": _report,
    "doctor": _doctor,
    "completion": _completion,
}


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of runs, and key=value words."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def _add_run(parser: Parser) -> None:
    """The run that a verb is about."""
    parser.add_argument("run", metavar="RUN", help="the run's name, or its folder")
    parser.add_argument("overrides", nargs="*", metavar=ROOT_KEY, help="the folder of all runs")


def add_config(parser: Parser) -> None:
    """What the configuration begins with."""
    parser.add_argument(
        "--config", default="mnist", metavar="NAME|PATH", help="a name in configs/, or a YAML file (default: mnist)"
    )
    parser.add_argument(
        "--site", metavar="NAME|PATH", help="what this cluster needs: a name in configs/site/ (default: $LASTSTEP_SITE)"
    )


def _add_shorthands(parser: Parser, shorthands: dict[str, tuple[str, str, str]]) -> None:
    for option, (key, metavar, help) in shorthands.items():
        parser.add_argument(option, metavar=metavar, help=f"{help} ({key})")


def _add_ways(parser: Parser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="stay and stream rank 0's log until the run ends")
    how.add_argument("--local", action="store_true", help="run all ranks on this machine; Ctrl-C is a stop")
    how.add_argument("--debug", action="store_true", help="run one rank in this process, with the debugger on an error")
    how.add_argument(
        "--dry-run", action="store_true", help="print the configuration and the sbatch script, submit nothing"
    )
