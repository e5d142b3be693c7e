"""The device of a rank: choosing it, making its arithmetic reproducible, and reading from it without waiting."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.say import counted
from trainer.world.world import World


def set_up_device(config: Config, world: World) -> torch.device:
    """Choose this rank's device and make its arithmetic as reproducible as the configuration asks.

    Raises ConfigError when this machine lacks what the configuration asks for.
    """
    device = _choose_device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"train.precision=bf16: {name} has no bf16 arithmetic; use fp16 or fp32")
        if config.train.deterministic:
            # cuBLAS reads this when it starts. Without it, cuBLAS may split a product differently from run to run.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = not config.train.deterministic
    if "OMP_NUM_THREADS" not in os.environ:
        # A sum's last bits depend on the number of threads, so it must be the same in every attempt.
        cores = len(os.sched_getaffinity(0)) // world.local_size
        granted = int(os.environ.get("SLURM_CPUS_PER_TASK", config.launch.cpus_per_task))
        torch.set_num_threads(granted if world.launcher in ("submitit-slurm", "srun") else max(1, cores))
    return device


def describe_numerics(device: torch.device) -> dict[str, str | int]:
    """Everything that the last bits of a step depend on, besides the number of ranks: torch, device, threads."""
    if device.type == "cuda":
        return {"torch": str(torch.__version__), "device": torch.cuda.get_device_name(device)}
    # Torch uses different loops on a processor with wider vectors.
    processor = f"cpu with {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": str(torch.__version__), "device": processor, "threads": torch.get_num_threads()}


def changed_numerics(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> str | None:
    """One line that names what has changed between two results of `describe_numerics`; None when nothing has."""
    changed = {name: old for name, old in before.items() if now.get(name, old) != old}
    if not changed:
        return None
    changes = ", ".join(f"{name} {now[name]} (was {old})" for name, old in changed.items())
    fix = f"; set OMP_NUM_THREADS={before['threads']} to keep them" if list(changed) == ["threads"] else ""
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


def _choose_device(config: Config, world: World) -> torch.device:
    count = torch.cuda.device_count()
    wanted = config.device
    if wanted == "auto":
        # On a node that does not enforce limits, a CPU job sees the GPUs of other jobs too. CUDA_VISIBLE_DEVICES names
        # those that Slurm gave to this job.
        granted = not world.on_slurm or "CUDA_VISIBLE_DEVICES" in os.environ
        wanted = "cuda" if config.launch.gpus_per_node or (count and granted) else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not count:
        raise ConfigError(
            f"device={config.device}, launch.gpus_per_node={config.launch.gpus_per_node}: "
            f"torch finds no GPU on this machine; use device=cpu"
        )
    if count == 1 and (world.local_size == 1 or world.on_slurm):  # gpus_per_task=1 hides the other ranks' GPUs
        return torch.device("cuda", 0)
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} ranks on this node, but it has {counted(count, 'GPU')}: "
            f"use --gpus-per-node {count} or device=cpu"
        )
    return torch.device("cuda", world.local_rank)


def start_copy_to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Start copying a one-dimensional tensor to the CPU. Returns a function that waits for the copy and returns the
    values."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def values() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return values
