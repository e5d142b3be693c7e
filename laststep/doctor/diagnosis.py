"""The diagnosis: every check of doctor, and the facts that the checks have read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.config.config import Config
from laststep.config.errors import first_line
from laststep.config.schema import Launch
from laststep.doctor.slurm_settings import Problem, SlurmSettings, check_slurm
from laststep.ranks.slurm import SlurmError
from laststep.records.attempt_record import read_attempts
from laststep.records.retry import times_blamed
from laststep.runs import run_folders
from laststep.say import command, counted
from laststep.submission.machine_checks import count_gpus

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Diagnosis:
    """What doctor has read, and the problems that it found in it."""

    run_root: RunRoot
    has_slurm: bool  # whether Slurm is installed here
    slurm: SlurmSettings | None  # None: not installed, or not answering
    problems: list[Problem]


def diagnose(config: Config) -> Diagnosis:
    """Run every check. Raises ConfigError for a partition that does not exist, and OSError when the folder of all runs
    cannot be read."""
    import torch

    launch = config.launch
    problems: list[Problem] = []
    has_slurm, slurm = shutil.which("scontrol") is not None, None
    if has_slurm:
        try:
            slurm = SlurmSettings.read().of_partition(launch.partition)
            problems += check_slurm(slurm, launch)
        except SlurmError as error:
            problems.append(Problem(f"Slurm does not answer: {error}", "`scontrol ping` shows whether it is up"))
    run_root = RunRoot.inspect(Path(launch.root))
    problems += check_run_root(run_root, slurm, launch, socket.gethostname().split(".")[0])
    problems += check_gpus(in_driver=count_gpus(), in_torch=torch.cuda.device_count())
    problems += check_bad_nodes(launch.root)
    return Diagnosis(run_root, has_slurm, slurm, problems)


LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs")
# Mount options of NFS and Lustre with which other machines do not see a lock.
LOCAL_LOCK_OPTIONS = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock")
MIN_FREE_GB = 10


@dataclass(frozen=True)
class RunRoot:
    """The folder of all runs, and the properties of its file system."""

    path: Path
    kind: str  # as /proc/mounts names it, e.g. nfs4
    lock_error: str | None  # why flock does not protect a run there; None when it does
    free_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether it is probably a disk of this machine, going by the kind of the file system."""
        return self.kind in LOCAL_KINDS

    @classmethod
    def inspect(cls, root: Path) -> RunRoot:
        """Inspect the folder, or its nearest existing parent. Raises OSError."""
        path = Path(os.path.expanduser(root)).absolute()
        existing = path
        while not existing.exists():
            existing = existing.parent
        kind, options = mount_of(existing.resolve(), Path("/proc/self/mounts").read_text())
        local_lock = next((option for option in options.split(",") if option in LOCAL_LOCK_OPTIONS), None)
        lock_error = f"mounted with {local_lock}" if local_lock else _try_lock(existing)
        return cls(path, kind, lock_error, shutil.disk_usage(existing).free)


def check_run_root(root: RunRoot, slurm: SlurmSettings | None, launch: Launch, host: str) -> Iterator[Problem]:
    """Anything about the folder of all runs that could break a run; `host` is this machine's name."""
    others = sorted({node.get("NodeHostName", host) for node in slurm.nodes} - {host}) if slurm else []
    if root.is_local and others:
        yield Problem(
            f"launch.root={root.path} is on {root.kind}, usually a disk that only {host} can see, but jobs run on "
            f"other machines, e.g. {others[0]}",
            "choose a folder that all nodes share; "
            f"`{command(f'doctor --nodes {max(2, launch.node_counts[-1])}')}` tests it",
        )
    if root.lock_error is not None:
        yield Problem(
            f"launch.root={root.path}: locks do not work ({root.lock_error}), so two attempts of a run may be active "
            "at once",
            "choose a folder where flock works between nodes (Lustre: mounted with flock), or never start a run twice",
        )
    if root.free_bytes < MIN_FREE_GB * 1e9:
        yield Problem(
            f"launch.root={root.path}: only {root.free_bytes / 1e9:.1f} GB free",
            "make room, lower checkpoint.keep_last and keep_best, or choose another folder",
        )


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Kind and mount options of the file system that holds `path`; `mounts` is the text of /proc/mounts."""
    found, depth = ("unknown", ""), -1
    for line in mounts.splitlines():
        _, mount_point, kind, options = line.split()[:4]
        folder = Path(mount_point.encode().decode("unicode_escape"))  # a blank is written as \040
        # Of several mounts on one folder, the last is on top.
        if path.is_relative_to(folder) and len(folder.parts) >= depth:
            found, depth = (kind, options), len(folder.parts)
    return found


def _try_lock(folder: Path) -> str | None:
    """Why a file that is locked in this folder can be locked again; None when it cannot, as it should be."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as held, open(held.name, "rb") as second:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            return "the same lock was granted twice"
    except OSError as error:
        return str(error.strerror)


OFTEN = 2  # one fault may be chance
MOST_RUNS = 3  # that a problem names


def check_bad_nodes(root: str) -> Iterator[Problem]:
    """Nodes that the runs in this folder have blamed for several faults of the last day together."""
    now, total = time.time(), Counter[str]()
    runs: dict[str, list[str]] = {}
    for run in run_folders.all_runs(root):
        blamed = times_blamed(read_attempts(run.attempts), now)
        total += blamed
        for node, times in blamed.items():
            runs.setdefault(node, []).append(f"{run.name} {times}")
    for node, times in total.most_common():
        if times >= OFTEN:
            more = len(runs[node]) - MOST_RUNS
            by = ", ".join([*runs[node][:MOST_RUNS], *([f"{counted(more, 'more run')}"] if more > 0 else [])])
            yield Problem(
                f"node {node} was blamed for {counted(times, 'fault')} within a day, by run: {by}",
                f"have it checked; launch.exclude={node} keeps new runs from it",
            )


def check_gpus(in_driver: int, in_torch: int) -> Iterator[Problem]:
    """Compare the number of GPUs that the driver has with the number that torch can use."""
    if in_torch < in_driver:
        yield Problem(
            f"the driver has {counted(in_driver, 'GPU')}, but torch can use {in_torch}",
            "install a torch whose CUDA version is not newer than the one nvidia-smi shows",
        )


TURNS, STEPS = 5, 10  # of each layer, with either kind of kernels in turn
WHOLE_TRAINING = "`python -m benchmarks.gpu resnet50 vit_b_16`, in a clone, measures whole trainings"


def describe_cost(device: torch.device) -> str:
    """One line: how much longer the forward and backward pass of the three layers that they slow down most takes with
    deterministic kernels (train.deterministic)."""
    try:
        ratios = costs(device, 1)
    except RuntimeError as error:  # the GPU may be full, or too old for one of these layers
        return f"what it costs could not be measured ({first_line(error)}); {WHOLE_TRAINING}"
    return f"costs {', '.join(f'{ratio - 1:+.0%} ({layer})' for layer, ratio in ratios.items())}; {WHOLE_TRAINING}"


def costs(device: torch.device, scale: float) -> dict[str, float]:
    """Layer -> the ratio of its time with deterministic kernels to that with any. `scale` is that of the batches."""
    ratios = {}
    for layer, step in _layers(device, scale).items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(1 + TURNS):
            for deterministic in seconds:
                with _kernels(deterministic):
                    took_s = _time(step)
                if turn:  # in the first one cuDNN tries its kernels
                    seconds[deterministic].append(took_s)
        ratios[layer] = statistics.median(seconds[True]) / statistics.median(seconds[False])
    return ratios


def _layers(device: torch.device, scale: float) -> dict[str, Callable[[], object]]:
    """A forward and a backward pass of each layer: channels of a ResNet, heads of a transformer, a vocabulary."""
    import torch
    from torch import nn

    half = torch.float16 if device.type == "cuda" else torch.float32
    batch = max(1, round(32 * scale))
    convolution = nn.Conv2d(64, 64, 3, padding=1, device=device, dtype=half)
    embedding = nn.Embedding(32_000, 256, device=device, dtype=half)
    images = torch.randn(batch, 64, 56, 56, device=device, dtype=half, requires_grad=True)
    heads = torch.randn(3, batch, 12, 512, 64, device=device, dtype=half, requires_grad=True)
    tokens = torch.randint(32_000, (batch, 512), device=device)
    attention = nn.functional.scaled_dot_product_attention
    return {
        "convolution": lambda: convolution(images).sum().backward(),
        "attention": lambda: attention(heads[0], heads[1], heads[2], is_causal=True).sum().backward(),
        "embedding": lambda: embedding(tokens).sum().backward(),
    }


@contextlib.contextmanager
def _kernels(deterministic: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only, or any, as `laststep.ranks.device.set_up_device` does."""
    import torch

    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


def _time(step: Callable[[], object]) -> float:
    """Mean seconds of a step."""
    from torch.utils.benchmark import Timer

    return Timer("step()", globals={"step": step}).timeit(STEPS).mean
