"""doctor: check this machine, this cluster and its nodes for anything that could break a run."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.cli.parsers import JOB_OPTIONS, KeyOptions, Parser, add_key_options, add_overrides, overrides_of
from laststep.config.checks import check_values
from laststep.config.config import Config
from laststep.ranks.slurm import SlurmError
from laststep.runs import run_folders
from laststep.say import counted, note
from laststep.submission import machine_checks

if TYPE_CHECKING:
    from laststep.doctor.diagnosis import RunRoot
    from laststep.doctor.slurm_settings import SlurmSettings

Facts = Sequence[tuple[str, object]]
OPTIONS: KeyOptions = {
    "--nodes": ("launch.nodes", "N", "number of nodes to test; of a range, the maximum"),
    **{option: JOB_OPTIONS[option] for option in ("--gpus-per-node", "--tasks-per-node", "--partition")},
}
DESCRIPTION = """Check this machine, this cluster and the folder of all runs for anything that
could break a run. With --nodes: submit a short job whose ranks meet, say hello
and measure all-reduces."""
EPILOG = """Exit status: 0 no problem; 1 a problem, or a rank that did not say hello;
2 wrong input.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what doctor takes."""
    add_key_options(parser, OPTIONS)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Check this machine and cluster, or with --nodes the nodes; returns the exit status."""
    # Any number of ranks will do: nothing is trained, so no batch must be divisible by it.
    config = Config.read(None, overrides_of(args), run_folders.site())
    check_values(config)
    return _check_here(config) if args.nodes is None else _check_nodes(config)


def _check_here(config: Config) -> int:
    """Print what is here and what could break a run; returns 1 if anything could."""
    from laststep.doctor.diagnosis import diagnose

    run_folders.check_writable(Path(os.path.expanduser(config.launch.root)).absolute())
    found = diagnose(config)
    _show("this machine", _machine())
    _show("launch.root", _folder(found.run_root))
    _show("environments", _environments())
    if found.slurm:
        _show("Slurm", _cluster(found.slurm))
        _show_partitions(found.slurm)
    elif not found.has_slurm:
        note(f"no Slurm on this machine: {machine_checks.without_slurm()}\n", sys.stdout)
    print("problems" if found.problems else "nothing found that could break a run")
    for problem in found.problems:
        note(f"  {problem}", sys.stdout, indent=4)
    return int(bool(found.problems))


def _check_nodes(config: Config) -> int:
    """Let every rank of a short job say hello, and print what they measured; returns the exit status."""
    from laststep.doctor.greeting import LIMIT_MIN, RollCall, bad_nodes, report, wrong_sums
    from laststep.doctor.slurm_settings import SlurmSettings, check_gpu_binding

    launch = config.launch
    launch.nodes, launch.spare_nodes = launch.node_counts[-1], 0  # of a range, as many as a run may get
    machine_checks.check_submission(config)
    run_folders.check_writable(Path(os.path.expanduser(launch.root)).absolute())
    machine_checks.check_slurm()
    with suppress(SlurmError):  # it is asked again
        for problem in check_gpu_binding(SlurmSettings.read(), launch):
            note(f"WARNING: {problem}", sys.stdout)
    call = RollCall(config)
    job = f"job {call.job_id}"
    size = f"{counted(launch.nodes, 'node')} x {counted(launch.ranks_per_node, 'rank')}"
    print(f"{job}: {size}, at most {LIMIT_MIN} min; Ctrl-C cancels it")
    try:
        call.wait(lambda state: print(f"{job}: {state}", flush=True))
    except KeyboardInterrupt:
        call.cancel()
        call.remove()
        note(f"\n{job}: cancelled")
        return 130
    greetings = [call.greetings[rank] for rank in sorted(call.greetings)]
    for greeting in greetings:
        print(greeting)
    failures = call.failures()
    if failures:
        call.cancel()
        for failure in failures:
            note(f"error: {failure}")
        silent = f"{len(failures)} of {counted(call.size, 'rank')} did not say hello"
        note(f"error: {silent}; their logs are in {call.folder}")
        return 1
    print(*["", *report(greetings)], sep="\n")
    call.remove()
    return int(bool(wrong_sums(greetings) or bad_nodes(greetings)))


def _show(title: str, facts: Facts) -> None:
    print(title)
    for name, value in facts:
        note(f"  {name:<18}{value}", sys.stdout, indent=20)
    print()


def _machine() -> Facts:
    import torch

    from laststep.doctor import diagnosis

    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torchvision", "submitit", "omegaconf")]
    facts: list[tuple[str, object]] = [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", ", ".join([torch.__version__, *packages])),
    ]
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        facts.append(("built for", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"))
    facts.append(("driver", _driver() or "none"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        facts.append((f"GPU {index}", f"{gpu.name}, {memory}, capability {gpu.major}.{gpu.minor}"))
    if torch.cuda.device_count():
        facts.append(("deterministic", diagnosis.describe_cost(torch.device("cuda", 0))))
    else:
        facts.append(("GPUs", "none that torch can use; --local and --debug train on the CPU"))
    facts.append(("CPUs", len(os.sched_getaffinity(0))))
    return facts


def _environments() -> Facts:
    """What could hold the packages of a run, see launch.uv, launch.container and launch.setup."""
    from laststep.code import uv
    from laststep.submission import container

    image = next((version for name in ("apptainer", "singularity") if (version := _version(name))), None)
    program, project = uv.find_uv(), uv.project_of(Path.cwd())
    lock = f", {project / uv.LOCK}" if project else f", no {uv.LOCK} in this folder"
    active = os.environ.get("CONDA_PREFIX") or (sys.prefix if sys.prefix != sys.base_prefix else None)
    return [
        ("active", f"{active or 'none'}: the job runs {sys.executable}"),
        ("uv", f"{_version(program)}{lock}" if program else "no uv here"),
        (
            "launch.container",
            f"{image or 'no Apptainer, no Singularity'}; {'' if container.has_pyxis() else 'no '}Pyxis",
        ),
        ("modules", "for launch.setup" if os.environ.get("MODULESHOME") else "no `module` command in this shell"),
    ]


def _version(program: str | None) -> str | None:
    """What a program says of its version; None without one."""
    with suppress(OSError, subprocess.SubprocessError):
        words = [str(program), "--version"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or program
    return None


def _driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
    return found[0] if found else None


def _folder(root: RunRoot) -> Facts:
    return [
        ("folder", root.path),
        ("file system", f"{root.kind}, {root.free_bytes / 1e9:.0f} GB free"),
        ("locks", "work" if root.lock_error is None else root.lock_error),
    ]


def _cluster(slurm: SlurmSettings) -> Facts:
    config = slurm.config
    signal = "sent" if slurm.sends_user_signal else "not sent"
    return [
        ("version", f"{config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}"),
        ("KillWait", f"{slurm.kill_wait_s} s"),
        ("preemption", f"{config.get('PreemptType', 'none')}, {config.get('PreemptMode')}; user signal {signal}"),
        ("JobRequeue", f"{config.get('JobRequeue')} (has no effect: Laststep submits with --requeue)"),
        ("requeued", slurm.requeue_delay),
        ("RequeueExit", config.get("RequeueExit", "none")),
        ("accounting", f"{config.get('AccountingStorageType', 'none')}; sacct: {slurm.sacct_error or 'answers'}"),
        ("plugins", f"{config.get('TaskPlugin')}, {config.get('ProctrackType')}"),
        ("MessageTimeout", config.get("MessageTimeout")),
    ]


def _show_partitions(slurm: SlurmSettings) -> None:
    titles = ("partition", "nodes", "time limit", "tier", "PreemptMode", "GraceTime", "")
    keys = ("PartitionName", "TotalNodes", "MaxTime", "PriorityTier", "PreemptMode", "GraceTime")
    rows = [
        [*(partition.get(key, "") for key in keys), "default" if partition.get("Default") == "YES" else ""]
        for partition in slurm.partitions
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    for line in [list(titles), *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print()
