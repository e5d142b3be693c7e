"""evaluate: the validation metrics of a checkpoint, on the run's data or on others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from laststep import script
from laststep.attempt import user_error
from laststep.cli.parsers import ANY_KEY, Parser, add_checkpoint
from laststep.code import code_copy, task_check
from laststep.config.checks import sizes_for, validate
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.ranks.fault import ONE_LINE
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.tasks import ready_made

DESCRIPTION = """\
Validate the weights of a run's newest checkpoint in this process: the averaged
weights, if train.ema_decay is set. After training on one rank the metrics are
those of the run; after several, sums are added in another order."""
EPILOG = """\
For example, on other images: evaluate RUN --best data.root=/data/newer
train.batch_size is by default what each rank had."""
CHANGEABLE = ("data.", "train.batch_size=", "device=", "launch.root=")
# The run's ranks were perhaps many, on other machines; here is one.
ONE_RANK = (
    *("launch.nodes=1", "launch.tasks_per_node=null", "launch.gpus_per_node=0"),
    *("launch.backend=auto", "launch.init_method=null", "train.accumulate=1", "train.sharding=none"),
    *("checkpoint.replicas=0", "train.cuda_graphs=false"),
)


def add_arguments(parser: Parser) -> None:
    """Declare what evaluate takes."""
    parser.add_argument("run", metavar="RUN", help="name or folder of the run")
    parser.add_argument("overrides", nargs="*", metavar=ANY_KEY, help="change data.*, train.batch_size or device")
    add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the metrics; returns the exit status."""
    for word in args.overrides:
        if not word.startswith(CHANGEABLE):
            raise ConfigError(
                f"{word}: evaluate changes only data.*, train.batch_size and device; a run keeps the rest"
            )
    root = run_folders.root_among(args.overrides)
    folder = RunDir(run_folders.find_run(args.run, root).path.absolute())
    checked = _checked(folder, [*args.overrides, *ONE_RANK])
    script.check_knows_us(checked, f"evaluate {folder.name}")
    search = code_copy.search_path(folder, checked, runs_copy=True)
    machine = Machine(Way.LOCAL, search=search)
    ready_made.check(checked, machine)
    task_check.check(checked, machine)
    from laststep.checkpoint.export import read_run
    from laststep.loops.task_loop import evaluate

    weights = read_run(folder, args.step, args.best, args.raw)
    config = _config(folder, args.overrides, weights.manifest.world_size, weights.averaged)
    # As in the run's ranks: its own code, and its own folder for relative paths.
    sys.path[:0] = map(str, search)
    os.chdir(run_folders.working_folder(folder))
    try:
        metrics = evaluate(config, folder, weights, [word.partition("=")[0] for word in args.overrides])
    except ONE_LINE:
        raise
    except Exception as error:  # of the task: begin the traceback there, as in a rank's log
        print(user_error.describe(error), end="", file=sys.stderr)
        return 1
    found = {
        "run": folder.name,
        "step": weights.manifest.step,
        "epoch": weights.manifest.epoch,
        "averaged": weights.averaged,
        "metrics": metrics,
        "recorded": weights.metrics or None,
    }
    print(json.dumps(found) if args.json else _lines(found))
    return 0


def _config(run: RunDir, overrides: Sequence[str], ranks: int, averaged: bool) -> Config:
    """The run's configuration for one rank that has only these weights."""
    before = run_config.as_submitted(run).train
    parts = 1 if before.shares else ranks  # one rank computes all shares as the run's ranks did
    words = [f"train.batch_size={max(1, before.batch_size // parts)}", *overrides, *ONE_RANK, "train.ema_decay=0"]
    if averaged:
        words.append("train.compile=false")  # training does not compile the average either
    return run_folders.with_absolute_data(_checked(run, words))


def _checked(run: RunDir, words: Sequence[str]) -> Config:
    """The run's configuration with these words, without the options of its jobs. Raises ConfigError."""
    config = run_config.as_submitted(run, words)
    fewest = sizes_for(config.train.shares)[0] if config.train.shares else None  # here one rank can compute any number
    config = with_launch(config, slurm={}, tasks_per_node=fewest)
    validate(config)
    return config


def _lines(found: Mapping[str, Any]) -> str:
    """The checkpoint, what it measures now, and what the run has measured where that reads differently."""
    weights = ", averaged weights" if found["averaged"] else ""
    lines = [f"{found['run']}: step {found['step']}, epoch {found['epoch']}{weights}", _text(found["metrics"])]
    if found["recorded"] == found["metrics"]:
        lines[1] += " (as the run itself has measured)"
    elif found["recorded"] and _text(found["recorded"]) == lines[1]:
        lines.append("(as the run itself has measured, but for the last bits)")
    elif found["recorded"]:
        lines.append(f"{_text(found['recorded'])} (as the run itself has measured)")
    return "\n  ".join(lines)


def _text(metrics: Mapping[str, float | None]) -> str:
    return "  ".join(
        f"{name} {'not finite' if value is None else format(value, '.6g')}" for name, value in metrics.items()
    )
