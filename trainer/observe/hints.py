"""Hints: what most likely lies behind an error, and the setting to try. docs/troubleshooting.md quotes them."""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.config.config import Config
from trainer.world.world import World


def likely_cause(error: str, config: Config, world: World) -> str | None:
    """A line for the log of an attempt that ended with this error; None where nothing is known but the error itself."""
    for pattern, advise in _RULES:
        if re.search(pattern, error):
            return f"hint: {advise(config, world)}"
    return None


def slow_data(share: float) -> str:
    """A line for the log of a rank that spends this share of its steps waiting for data."""
    return (
        f"hint: {share:.0%} of each step goes into waiting for data: let more processes load ahead (data.workers, with "
        "a core of launch.cpus_per_task each), or keep the data on a faster disk"
    )


def _gpu_memory(config: Config, world: World) -> str:
    return f"the GPU's memory is full: {_smaller(config)}"


def _memory(config: Config, world: World) -> str:
    return f"this node's memory is full: {_more_memory(config, world)}{_smaller(config)}"


def _killed(config: Config, world: World) -> str:
    ask = f"sacct -j {world.job_id} --format=JobID,State" if world.on_slurm else "dmesg"
    advice = f"{_more_memory(config, world)}{_smaller(config)}"
    return f"what was killed was most likely out of memory (`{ask}` tells): {advice}"


def _shared_memory(config: Config, world: World) -> str:
    return f"the memory that loader processes share is full: make /dev/shm larger, or lower {_workers(config)}"


def _absent(config: Config, world: World) -> str:
    return (
        "that rank was not started, or the network keeps it away: a firewall, or a MASTER_ADDR or an interface "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) that its node does not reach; `python -m trainer hello --env`, "
        "started the same way, is the quickest trial"
    )


def _stuck(config: Config, world: World) -> str:
    return (
        "the stacks in that rank's log say where (`launch.py logs RUN --rank R`); if a step may take so long, raise "
        f"launch.hang_timeout_s={config.launch.hang_timeout_s}"
    )


_RULES: tuple[tuple[str, Callable[[Config, World], str]], ...] = (
    (r"DataLoader worker .* Bus error", _shared_memory),
    (r"DataLoader worker .* (killed by signal|exited unexpectedly)|in rebuild_storage_fd|: gone \(killed", _killed),
    (r"OutOfMemoryError|CUDA error: out of memory", _gpu_memory),
    (r"can't allocate memory|MemoryError|Cannot allocate memory|bad_alloc", _memory),
    (r"did not join within|cannot be reached within|did not publish its address", _absent),
    (r"is stuck in|gives no sign of life|has not answered for", _stuck),
)


def _workers(config: Config) -> str:
    return f"data.workers={config.data.workers}"


def _more_memory(config: Config, world: World) -> str:
    """Settings that leave the ranks of a node more memory, each followed by a comma."""
    mem_gb = config.launch.mem_gb
    more = [f"raise launch.mem_gb={mem_gb:g}" if mem_gb else "set launch.mem_gb"] if world.on_slurm else []
    return "".join(
        f"{setting}, " for setting in [*more, *([f"lower {_workers(config)}"] if config.data.workers else [])]
    )


def _smaller(config: Config) -> str:
    """Settings, not in use yet, with which a rank needs less memory for the same model."""
    train = config.train
    settings = [f"train.accumulate={2 * train.accumulate} (the same global batch, in smaller parts)"]
    if not train.activation_checkpointing:
        settings.append("train.activation_checkpointing=true")
    if train.precision == "fp32":
        settings.append("train.precision=bf16")
    return f"start anew with {', '.join(settings)} or a smaller train.batch_size, or resume on more ranks"
