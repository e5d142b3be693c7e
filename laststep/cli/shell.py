"""shell: nodes of one's own, on which --local starts ranks at once."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.cli.parsers import (
    JOB_OPTIONS,
    OWN_CONFIG,
    Parser,
    add_config,
    add_key_options,
    add_overrides,
    overrides_of,
)
from laststep.config.errors import ConfigError
from laststep.say import flush_output, note

if TYPE_CHECKING:
    from laststep.config.config import Config

DESCRIPTION = """\
Ask Slurm for nodes, and open a shell on them. In it, --local and --nodes N
start ranks on these nodes at once, as often as you like. `resume RUN` continues
such a run in a job of its own; leaving the shell gives the nodes back."""
EPILOG = """\
What is typed here holds in the shell. Words after -- are a command to run in
its place:
  {program} shell --nodes 2 --gpus-per-node 4 --time 2:00:00
  {program} shell --nodes 1 -- {path} --local train.py"""

# sbatch's options for which salloc has no use.
NOT_OF_SALLOC = ("output", "error", "open-mode", "array", "requeue", "no-requeue", "parsable", "wait", "export")


def add_arguments(parser: Parser) -> None:
    """Declare what shell takes."""
    parser.passes_on = True
    add_config(parser)
    add_key_options(parser, JOB_OPTIONS)
    add_overrides(parser, help="set a configuration key")


def run(args: argparse.Namespace) -> int:
    """Become salloc, which runs the shell. Raises ConfigError."""
    from laststep.config.checks import check_values
    from laststep.config.config import Config
    from laststep.ranks.slurm import SlurmError, own_nodes, scontrol
    from laststep.runs import run_folders
    from laststep.submission import machine_checks

    words = overrides_of(args)
    if (own := own_nodes()) is not None:
        raise ConfigError(f"shell: this is the shell of job {own.job_id} already; `exit` gives its nodes back")
    source = args.config or (OWN_CONFIG if os.path.isfile(OWN_CONFIG) else None)
    config = Config.read(source, words, args.site or run_folders.site())
    check_values(config)
    if config.launch.container is not None:
        raise ConfigError(
            f"launch.container={config.launch.container}: a shell is outside of it; add launch.container=null"
        )
    machine_checks.check_slurm()
    if shutil.which("salloc") is None:
        raise ConfigError("no salloc on this machine, which asks Slurm for a shell's nodes")
    try:
        scontrol("show", "config")
    except SlurmError as error:
        why = str(error).rpartition(": ")[2]
        raise ConfigError(f"no Slurm answers here ({why}): {machine_checks.without_slurm()}") from None
    machine_checks.check_partition(config.launch)
    config = run_folders.with_root_and_name(config, "shell")
    typed = args.passed_on or [os.environ.get("SHELL") or "bash"]
    launch_words = [word for word in words if word.startswith("launch.")]
    command = _salloc(config, launch_words, typed)
    if not args.passed_on:
        note("[laststep] in this shell, --local starts ranks on its nodes; `exit` gives them back")
    flush_output()
    os.execvp(command[0], command)


def _salloc(config: Config, given: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The command that asks for the nodes and runs the `typed` one once they are there. `given`: OwnNodes.words."""
    from laststep.ranks.slurm import SHELL_WORDS
    from laststep.rundir import RunDir
    from laststep.submission import sbatch

    run = RunDir(Path(config.launch.root) / "shell")
    script = sbatch.job_executor(config, run, options={}).script()
    flags = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = [flag for flag in flags if flag[2:].partition("=")[0].partition(" ")[0] not in NOT_OF_SALLOC]
    launch = config.launch
    setup = [f"export {name}={sbatch.quote(value)}" for name, value in launch.env.items()]
    setup += launch.setup
    if launch.setup:  # on each node too: this shell may be on none of them
        count = "$SLURM_JOB_NUM_NODES"
        each = f"srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --cpus-per-task=1"
        setup.append(f"{each} bash -c {shlex.quote(chr(10).join(launch.setup))}")
    lines = [f"export {SHELL_WORDS}={shlex.quote(json.dumps(list(given)))}", *setup, 'exec "$@"']
    words = [word for flag in options for word in shlex.split(flag)]
    return ["salloc", *words, "bash", "-c", "\n".join(lines), "bash", *typed]
