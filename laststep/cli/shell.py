"""shell: nodes of one's own, on which --local starts ranks at once."""

from __future__ import annotations

import argparse
import os
import shutil

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

DESCRIPTION = """\
Ask Slurm for nodes, and open a shell on them. In it, --local and --nodes N
start ranks on these nodes at once, as often as you like. `resume RUN` continues
such a run in a job of its own; leaving the shell gives the nodes back."""
EPILOG = """\
What is typed here holds in the shell. Words after -- are a command to run in
its place:
  {program} shell --nodes 2 --gpus-per-node 4 --time 2:00:00
  {program} shell --nodes 1 -- {path} --local train.py"""


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
    from laststep.submission import allocation, machine_checks

    words = overrides_of(args, JOB_OPTIONS)
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
    command = allocation.salloc(config, launch_words, typed)
    if not args.passed_on:
        note("[laststep] in this shell, --local starts ranks on its nodes; `exit` gives them back")
    flush_output()
    os.execvp(command[0], command)
