"""The device of a rank: choosing it, making its arithmetic reproducible, and reading from it without waiting."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from laststep.compat import compiler
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks import nccl
from laststep.ranks.host_memory import keep_freed_memory
from laststep.ranks.world import World, hostname
from laststep.say import counted, say

DRIVER = Path("/sys/module/nvidia/version")  # such as 580.65.06; absent where another driver is in use
NCCL_GRAPH = "NCCL graph"  # in what `describe_numerics` returns
FIRST_WITH_TF32 = (8, 0)  # compute capability
SLICE = "MIG-"  # begins the UUID of a slice of a GPU


def set_up_device(config: Config, world: World) -> torch.device:
    """Choose this rank's device and make its arithmetic as reproducible as the configuration asks.

    Raises ConfigError when this machine lacks what the configuration asks for.
    """
    device = _choose_device(config, world)
    _check_precision(config.train.precision, device)
    if config.train.cuda_graphs and device.type == "cpu":
        raise ConfigError("train.cuda_graphs=true: only GPUs have CUDA graphs, but this rank uses the CPU; remove it")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        compiler.draw_from_default_generators()
        _allow_tf32(config.train.precision == "tf32")
        torch.backends.cudnn.benchmark = not config.train.deterministic
    else:
        keep_freed_memory()
    if is_deterministic(config, device):
        _refuse_other_kernels()
    if "OMP_NUM_THREADS" not in os.environ:
        # A sum's last bits depend on the number of threads, so it must be the same in every attempt.
        cores = len(os.sched_getaffinity(0)) // world.local_size
        granted = int(os.environ.get("SLURM_CPUS_PER_TASK", config.launch.cpus_per_task))
        # With train.shares not even on the number of ranks on this machine.
        is_granted = world.launcher in ("submitit-slurm", "srun") or config.train.shares is not None
        torch.set_num_threads(granted if is_granted else max(1, cores))
    return device


def is_deterministic(config: Config, device: torch.device) -> bool:
    """Whether torch must refuse, on this device, an operator that may add in another order each time."""
    return config.train.deterministic and device.type == "cuda"


def _refuse_other_kernels() -> None:
    """Let torch use deterministic kernels only. An operator that has none raises RuntimeError."""
    compiler.compile_without_timing()
    # cuBLAS reads this when it starts. Without it, cuBLAS may split a product differently from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # By default this also fills each new tensor before it is computed. No result depends on that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe_numerics(
    device: torch.device,
    world: World,
    backend: str,
    at_any_size: bool = False,
    sharding: str = "none",
    nccl_graph: str | None = None,
) -> dict[str, str | int]:
    """Everything that the last bits of a step depend on: torch, the device and its libraries, threads, and whether the
    ranks shard the model. On GPUs also how the ranks are spread over nodes, and the graph of the connections between
    them, along which NCCL adds; not with `at_any_size` (train.shares), where NCCL adds nothing, and where full and
    hybrid sharding are the same."""
    if at_any_size and sharding != "none":
        sharding = "full or hybrid"
    if device.type != "cuda":
        # Torch uses different loops on a processor with wider vectors.
        processor = f"cpu with {torch.backends.cpu.get_cpu_capability()}"
        shards: dict[str, str | int] = {} if sharding == "none" else {"sharding": sharding}
        return {"torch": str(torch.__version__), "device": processor, "threads": torch.get_num_threads(), **shards}
    layout = f"{counted(world.nodes, 'node')} x {counted(world.local_size, 'GPU')}"
    found: dict[str, str | int | None] = {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device),
        "driver": DRIVER.read_text().strip() if DRIVER.exists() else None,
        "cuDNN": torch.backends.cudnn.version(),
        "TF32": "on" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "off",
        "layout": None if at_any_size else layout,
        "sharding": None if sharding == "none" else sharding,
        **(nccl.describe() if backend == "nccl" and world.size > 1 and not at_any_size else {}),
        NCCL_GRAPH: None if at_any_size else nccl_graph,
    }
    return {name: value for name, value in found.items() if value is not None}


def changed_numerics(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> str | None:
    """One line that names what has changed between two results of `describe_numerics`; None when nothing has."""
    replicated = {"sharding": "none"}  # which is not written down
    before, now = replicated | dict(before), replicated | dict(now)
    changed = {name: old for name, old in before.items() if now.get(name, old) != old}
    if not changed:
        return None
    changes = ", ".join(f"{name} {now[name]} (was {old})" for name, old in changed.items())
    fix = f"; set OMP_NUM_THREADS={before['threads']} to keep them" if list(changed) == ["threads"] else ""
    if NCCL_GRAPH in changed:
        fix = "; with train.shares they would not depend on NCCL's graph"
    return f"resuming with {changes}: the last bits may differ{fix}"


def choose_backend(config: Config, device: torch.device) -> str:
    """The backend of the ranks' collectives, nccl or gloo. Raises ConfigError when it is not available here."""
    backend = config.launch.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        why = "torch finds no GPU on this machine" if not torch.cuda.device_count() else "this rank uses the CPU"
        raise ConfigError(f"launch.backend=nccl: needs a GPU for each rank, but {why}; use gloo")
    if not dist.is_backend_available(backend):
        other = "gloo" if backend == "nccl" else "nccl"
        raise ConfigError(f"launch.backend={backend}: torch {torch.__version__} is built without it; use {other}")
    return backend


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, or of a slice of one (MIG), as `nvidia-smi -L` shows it. Empty for a CPU, or if the
    driver does not say.

    CUDA_VISIBLE_DEVICES names a slice by its UUID. The UUID that CUDA itself reports may be that of the whole GPU.
    """
    if device.type != "cuda":
        return ""
    asked_for = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device.index or 0 :][:1]
    if asked_for and asked_for[0].strip().startswith(SLICE):
        return asked_for[0].strip()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"GPU-{uuid}" if uuid.strip("0-") else ""


def _check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError for arithmetic that the device lacks: it would be emulated, or silently replaced by another."""
    if device.type == "cpu":
        if precision == "tf32":
            raise ConfigError("train.precision=tf32: only GPUs have TF32, but this rank uses the CPU; use fp32 or bf16")
        return
    lacks_bf16 = precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if lacks_bf16 or (precision == "tf32" and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"train.precision={precision}: {name} has no {precision} arithmetic; use fp16 or fp32")


def _allow_tf32(allow: bool) -> None:
    """Let fp32 products and convolutions round their inputs to TF32, or not. torch's own default is to do so in
    convolutions only."""
    with warnings.catch_warnings():
        # torch 2.9 and later announce that these attributes will be replaced. But after the new ones were set, torch
        # raises an error where anything reads the old ones, as its own compiler does. The old ones set both.
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow


def _choose_device(config: Config, world: World) -> torch.device:
    count = torch.cuda.device_count()
    wanted = config.device
    if wanted == "auto":
        # On a node that does not enforce limits, a CPU job sees the GPUs of other jobs too. CUDA_VISIBLE_DEVICES names
        # those that Slurm gave to this job.
        granted = not world.on_slurm or "CUDA_VISIBLE_DEVICES" in os.environ
        wanted = "cuda" if config.launch.gpus or (count and granted) else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not count:
        given = ", ".join(filter(None, (f"device={config.device}", config.launch.gpus_key)))
        raise ConfigError(f"{given}: torch finds no GPU on this machine; use device=cpu")
    if count == 1 and (world.local_size == 1 or world.on_slurm):  # gpus_per_task=1 hides the other ranks' GPUs
        return torch.device("cuda", 0)
    if world.local_size < count and world.local_rank == 0 and world.on_slurm:
        idle = f"{counted(count, 'GPU')}, but {counted(world.local_size, 'rank')} of this run"
        say(f"WARNING: {hostname()} has {idle}: the other GPUs stay idle; set launch.gpus_per_node={count} to use them")
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} ranks on this node, but it has {counted(count, 'GPU')}: "
            f"use --gpus-per-node {count} or device=cpu"
        )
    return torch.device("cuda", world.local_rank)


def start_copy_to_host(scalars: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Start copying scalars on one device to the CPU. Returns a function that waits for the copy and returns their
    values."""
    if not scalars or scalars[0].device.type != "cuda":  # one by one: in a tenth of the time of a stack of them
        values_now = [float(scalar) for scalar in scalars]
        return lambda: values_now
    tensor = torch.stack(list(scalars)).double()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def values() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return values
