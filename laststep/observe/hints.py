"""Hints: the most likely cause of an error, and the settings to try. docs/troubleshooting.md quotes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from laststep.config.config import Config
from laststep.ranks.world import World
from laststep.say import command

SHOWN_BYTES = 100e6  # of a node's memory; less is not worth a word


class _Case(NamedTuple):
    """The attempt that has ended."""

    config: Config
    world: World
    buffer_bytes: int


def likely_cause(error: str, config: Config, world: World, buffer_bytes: int = 0) -> str | None:
    """A line for the log of an attempt that ended with this error; None for an error that no rule matches.

    `buffer_bytes`: how much host memory each rank keeps for its saves.
    """
    for pattern, advise in _RULES:
        if re.search(pattern, error):
            return f"hint: {advise(_Case(config, world, buffer_bytes))}"
    return None


def slow_data(share: float) -> str:
    """A line for the log of a rank that spends this share of its steps waiting for data."""
    return (
        f"hint: {share:.0%} of each step is spent waiting for data: load it in more processes (data.workers, with one "
        "core of launch.cpus_per_task for each), or keep it on a faster disk"
    )


def _gpu_memory(case: _Case) -> str:
    return f"the GPU is out of memory: {_use_less_memory(case.config)}"


def _node_memory(case: _Case) -> str:
    return f"this node is out of memory: {_ask_for_memory(case)}{_use_less_memory(case.config)}"


def _killed(case: _Case) -> str:
    check = f"sacct -j {case.world.job_id} --format=JobID,State" if case.world.on_slurm else "dmesg"
    advice = f"{_ask_for_memory(case)}{_use_less_memory(case.config)}"
    return f"a process was killed, most likely because the node ran out of memory (`{check}` shows it): {advice}"


def _shared_memory(case: _Case) -> str:
    return f"the shared memory of the loader processes is full: make /dev/shm larger, or lower {_workers(case.config)}"


def _missing_rank(case: _Case) -> str:
    return (
        "that rank did not start, or the network blocks it: a firewall, or a MASTER_ADDR or an interface "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) that its node cannot reach; the quickest test is "
        "`python -m laststep hello --env`, started the same way"
    )


def _stuck_rank(case: _Case) -> str:
    return (
        f"the stacks in that rank's log show where (`{command('logs RUN --rank R')}`); if a step may take that long, "
        f"raise launch.hang_timeout_s={case.config.launch.hang_timeout_s}"
    )


# Tried in this order: the first pattern found in the error decides.
_RULES: tuple[tuple[str, Callable[[_Case], str]], ...] = (
    (r"DataLoader worker .* Bus error", _shared_memory),
    (r"DataLoader worker .* (killed by signal|exited unexpectedly)|in rebuild_storage_fd|: gone \(killed", _killed),
    (r"OutOfMemoryError|CUDA error: out of memory", _gpu_memory),
    (r"can't allocate memory|MemoryError|Cannot allocate memory|bad_alloc", _node_memory),
    (r"did not join within|cannot be reached within|did not publish its address", _missing_rank),
    (r"is stuck in|gives no sign of life|has not answered for", _stuck_rank),
)


def _workers(config: Config) -> str:
    return f"data.workers={config.data.workers}"


def _ask_for_memory(case: _Case) -> str:
    """Settings that give the ranks of a node more memory, each followed by a comma."""
    config, settings = case.config, []
    if case.world.on_slurm:
        mem_gb, of_node = config.launch.mem_gb, case.world.local_size * case.buffer_bytes
        ask = f"raise launch.mem_gb={mem_gb:g}" if mem_gb else "set launch.mem_gb"
        kept = f"the ranks of a node keep {of_node / 1e9:.1f} GB in buffers for their saves"
        settings.append(f"{ask} ({kept})" if of_node >= SHOWN_BYTES else ask)
    if config.data.workers:
        settings.append(f"lower {_workers(config)}")
    return "".join(f"{setting}, " for setting in settings)


def _use_less_memory(config: Config) -> str:
    """Settings with which a rank needs less memory for the same model; those already in use are left out."""
    train = config.train
    settings = [f"train.accumulate={2 * train.accumulate} (the same global batch in smaller parts)"]
    if not train.activation_checkpointing:
        settings.append("train.activation_checkpointing=true")
    if train.cuda_graphs:  # which go with neither of these, and whose memory nothing else can use
        settings = ["train.cuda_graphs=false"]
    if train.precision in ("fp32", "tf32"):
        settings.append("train.precision=bf16")
    return f"start a new run with {', '.join(settings)} or a smaller train.batch_size, or resume on more ranks"
