"""doctor: what is here, what of it endangers a run, and how well the nodes get on with each other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import machine_checks, run_folders
from trainer.config.checks import check_values
from trainer.config.config import Config
from trainer.doctor.file_system import Place
from trainer.doctor.hello import report, wrong_sums
from trainer.doctor.roll_call import LIMIT_MIN, RollCall
from trainer.doctor.slurm_settings import Danger, Slurm, of_gpus, of_place, of_slurm
from trainer.world.slurm import SlurmError

Facts = Sequence[tuple[str, object]]


def doctor(overrides: Sequence[str]) -> int:
    """Print what is here and what endangers a run; returns the exit status, 1 when something does."""
    config = _config(overrides)
    launch = config.launch
    machine_checks.check_writable(Path(launch.root).expanduser().absolute())
    dangers: list[Danger] = []
    slurm = None
    if shutil.which("scontrol"):
        try:
            slurm = Slurm.ask().chosen(launch.partition)
            dangers += of_slurm(slurm, launch)
        except SlurmError as error:
            dangers.append(Danger(f"Slurm does not answer: {error}", "`scontrol ping` tells whether it is up"))
    place = Place.look(Path(launch.root))
    dangers += of_place(place, slurm, launch, socket.gethostname().split(".")[0])
    _show("this machine", _machine())
    _show("launch.root", _of(place))
    if slurm:
        _show("Slurm", _cluster(slurm))
        _show_partitions(slurm)
    elif not dangers:
        print(f"no Slurm on this machine: {machine_checks.WITHOUT_SLURM}\n")
    import torch

    dangers += of_gpus(machine_checks.count_gpus(), torch.cuda.device_count())
    print("dangers" if dangers else "nothing found that endangers a run")
    for danger in dangers:
        print(f"  {danger}")
    return int(bool(dangers))


def hello(overrides: Sequence[str]) -> int:
    """Have every rank of a short job say hello, and print what they measured; returns the exit status."""
    config = _config(overrides)
    launch = config.launch
    launch.nodes = launch.node_counts[-1]  # of a range, all that a run may get
    machine_checks.check_submission(config)
    machine_checks.check_writable(Path(launch.root).expanduser().absolute())
    machine_checks.check_slurm()
    call = RollCall(config)
    job = f"job {call.job.job_id}"
    print(f"{job}: {launch.nodes} nodes x {launch.ranks_per_node} ranks, at most {LIMIT_MIN} min; Ctrl-C cancels it")
    try:
        call.wait(lambda stands: print(f"{job}: {stands}", flush=True))
    except KeyboardInterrupt:
        call.cancel()
        call.remove()
        print(f"\n{job}: cancelled", file=sys.stderr)
        return 130
    greetings = [call.greetings[rank] for rank in sorted(call.greetings)]
    for greeting in greetings:
        print(greeting)
    absences = call.absences()
    if absences:
        call.cancel()
        for absence in absences:
            print(f"error: {absence}", file=sys.stderr)
        print(
            f"error: {len(absences)} of {call.size} ranks did not say hello; their logs are in {call.folder}",
            file=sys.stderr,
        )
        return 1
    print(*["", *report(greetings)], sep="\n")
    call.remove()
    return int(bool(wrong_sums(greetings)))


def _config(overrides: Sequence[str]) -> Config:
    """The configuration, for any number of ranks: nothing is trained, so no batch must divide by it."""
    config = Config.read(None, overrides, run_folders.site())
    check_values(config)
    return config


def _show(title: str, facts: Facts) -> None:
    print(title)
    for name, value in facts:
        print(f"  {name:<16}{value}")
    print()


def _machine() -> Facts:
    import torch

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
    if not torch.cuda.device_count():
        facts.append(("GPUs", "none that torch can use: --local and --debug train on the CPU"))
    facts.append(("CPUs", len(os.sched_getaffinity(0))))
    return facts


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
    return found[0] if found else None


def _of(place: Place) -> Facts:
    return [
        ("folder", place.path),
        ("file system", f"{place.kind}, {place.free_bytes / 1e9:.0f} GB free"),
        ("locks", "work" if place.no_locks is None else place.no_locks),
    ]


def _cluster(slurm: Slurm) -> Facts:
    config = slurm.config
    signal = "sent" if slurm.sends_user_signal else "not sent"
    return [
        ("version", f"{config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}"),
        ("KillWait", f"{slurm.kill_wait_s} s"),
        ("preemption", f"{config.get('PreemptType', 'none')}, {config.get('PreemptMode')}; user signal {signal}"),
        ("JobRequeue", f"{config.get('JobRequeue')} (Laststep asks for --requeue, whatever this is)"),
        ("requeued", f"waits {slurm.cred_expire_s} s before it starts again (AuthInfo's cred_expire)"),
        ("RequeueExit", config.get("RequeueExit", "none")),
        ("accounting", f"{config.get('AccountingStorageType', 'none')}; sacct: {slurm.no_sacct or 'answers'}"),
        ("plugins", f"{config.get('TaskPlugin')}, {config.get('ProctrackType')}"),
        ("MessageTimeout", config.get("MessageTimeout")),
    ]


def _show_partitions(slurm: Slurm) -> None:
    titles = ("partition", "nodes", "time limit", "tier", "PreemptMode", "GraceTime", "")
    keys = ("PartitionName", "TotalNodes", "MaxTime", "PriorityTier", "PreemptMode", "GraceTime")
    rows = [[one.get(key, "") for key in keys] for one in slurm.partitions]
    rows = [[*row, "default" if one.get("Default") == "YES" else ""] for row, one in zip(rows, slurm.partitions)]
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    for row in [titles, *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()
