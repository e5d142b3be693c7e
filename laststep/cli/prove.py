"""prove: train a script undisturbed and disturbed on this machine, and compare every step."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from laststep import script
from laststep.cli.parsers import (
    NEW_RUN_OPTIONS,
    Parser,
    add_config,
    add_key_options,
    add_overrides,
    add_script,
    config_of,
    overrides_of,
)
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine
from laststep.say import counted

if TYPE_CHECKING:
    from laststep.proof.project_copy import ProjectCopy

DESCRIPTION = """\
Prove on this machine that a script resumes exactly: train it twice undisturbed,
then stop it, kill one of its ranks and resume it, and compare every step."""
EPILOG = """\
Trains on the ranks of the configuration, or on two, in a copy of the project
(in TMPDIR); what is too large to copy (10,000 entries, 1 GB) is linked. Files
that change in the project, or under an absolute path that the script is given,
are named; other places are not looked at. Trackers are off.
Compares after each step, on each rank: registered state, batch, inputs of the
model, metrics.jsonl. Shows the first difference, and the rule it points to.
Exit status: 0 exact; 1 not exact, or the script fails; 2 wrong input.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what prove takes."""
    add_config(parser)
    add_key_options(parser, NEW_RUN_OPTIONS)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="train N steps (default: 20 to 100, into the second epoch)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="about M minutes, with fewer steps and stops",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric or registered value that may differ; again for more",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_overrides(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Make the runs and print what they show; returns 0 when the script is exact, else 1. Raises ConfigError."""
    from laststep.proof import verdict
    from laststep.proof.runs import LEAST_STEPS, Prover
    from laststep.runs import run_folders
    from laststep.submission.local import train_here

    if args.steps is not None and args.steps < LEAST_STEPS:
        raise ConfigError(f"--steps {args.steps}: must be at least {LEAST_STEPS}")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes {args.minutes:g}: must be positive, e.g. --minutes 5")
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    words = overrides_of(args, NEW_RUN_OPTIONS)
    config = Config.load(config_of(args, words), words, args.site or run_folders.site())
    with _removed_at_the_end() as folder, _in_a_copy(config, folder) as (config, copy):
        config = _prepare(config, folder)
        script.check_knows_us(config, "prove")
        ranks = config.launch.world_size
        say(f"script {script.shown(config.script)}" if config.script else f"task   {config.task}")
        say(f"ranks  {ranks} on this machine; seed={config.seed} chooses where they are disturbed")
        say(f"cost   3 times {_length(args.steps)}, and up to 8 starts of the ranks")
        if args.minutes is not None:
            say(f"time   about {args.minutes:g} min, if four starts of the ranks fit")
        say(f"folder {folder}, removed at the end; the script works in a copy of yours")
        if copy.linked:
            say(textwrap.fill(f"links  {verdict.listed(copy.linked)}: too large to copy, the script sees yours", 80))
        report = lambda attempt: say(verdict.line_of(attempt))  # noqa: E731
        prover = Prover(config, args.steps, train_here, report, args.ignore, args.minutes)
        proof = prover.prove()
        written = copy.written()
        say("\n".join([*verdict.summary(proof), *verdict.outside(written)]))
        if args.json:
            print(json.dumps({**verdict.as_json(proof, ranks, config.seed), "written_outside": written}, indent=1))
    return int(proof.verdict != "exact")


def smoke(config: Config, machine: Machine) -> int:
    """--smoke: a few steps, a save, a resume and a validation on this machine, in a throwaway folder; returns 0, or 1
    when the script fails. Raises ConfigError."""
    from laststep.proof import verdict
    from laststep.proof.runs import SMOKE_STEPS, Prover
    from laststep.records.attempt_record import reason_in, users_line_in
    from laststep.submission import submission
    from laststep.submission.local import train_here

    began = time.monotonic()
    with _removed_at_the_end() as folder, _in_a_copy(config, folder) as (config, copy):
        launch = dataclasses.replace(config.launch, root=folder, name="smoke", max_restarts=0, max_failures=0)
        train = dataclasses.replace(config.train, max_steps=min(config.train.max_steps or SMOKE_STEPS, SMOKE_STEPS))
        config = submission.ready(dataclasses.replace(config, launch=launch, train=train), machine)
        script.check_knows_us(config, "--smoke")
        prover = Prover(config, None, train_here, lambda _: None)
        prover.smoke()
        for line in verdict.outside(copy.written()):
            print(line)
    proof, ranks = prover.proof, counted(config.launch.world_size, "rank")
    if proof.verdict == "failed":
        print((proof.error or "").rstrip(), file=sys.stderr)
        when = "when it is resumed" if proof.attempts else "at its start"
        print(f"smoke  fails {when}: {reason_in(proof.error)}", file=sys.stderr)
        if line := users_line_in(proof.error):
            print(f"at     {line}", file=sys.stderr)
        return 1
    (probed,) = proof.runs.values()
    first, *resumed = [attempt.last_step or 0 for attempt in proof.attempts]
    later = f"resumed, trained to step {resumed[0]}" if resumed else "which is its last: nothing to resume"
    validated = f"validation batches: {len(probed.batches)}" if probed.batches else "no validation"
    print(f"smoke  trained to step {first} and saved, {later}")
    print(f"       {validated}; {ranks}, {time.monotonic() - began:.0f} s, no error; nothing is left of it")
    return 0


def _length(steps: int | None) -> str:
    return "20 to 100 steps (--steps N)" if steps is None else counted(steps, "step")


def _prepare(config: Config, folder: str) -> Config:
    """The configuration as the runs use it: in `folder`, with two ranks where it names no number."""
    from laststep.config.machine import Machine, Way
    from laststep.submission import submission
    from laststep.submission.machine_checks import count_gpus

    launch = dataclasses.replace(config.launch, root=folder, name="prove", max_restarts=0)
    one_gpu = config.device != "cpu" and count_gpus() == 1
    if launch.world_size == 1 and launch.tasks_per_node is None and not launch.gpus and not one_gpu:
        launch = dataclasses.replace(launch, tasks_per_node=2)
    return submission.ready(dataclasses.replace(config, launch=launch), Machine(Way.LOCAL))


@contextlib.contextmanager
def _in_a_copy(config: Config, folder: str) -> Iterator[tuple[Config, ProjectCopy]]:
    """Work in a copy of the project in this folder; with the configuration for that."""
    from laststep.proof.project_copy import ProjectCopy

    (place := Path(folder, "project")).mkdir()
    copy = ProjectCopy(config, place)
    with copy.entered(config) as config:
        yield config, copy


@contextlib.contextmanager
def _removed_at_the_end() -> Iterator[str]:
    """A folder that is removed however the command ends."""
    from laststep.submission.sbatch import ended_by_signals

    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="laststep-prove-", ignore_cleanup_errors=True) as folder,
    ):
        yield folder
