"""How many GPUs the sbatch options in launch.slurm ask for, typed (gpu:a100:4) or not: each of them gets a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from laststep.config.errors import ConfigError

# Options of which one GPU in a list is `gpu:TYPE:COUNT`, and options of which it is `TYPE:COUNT`.
GRES_OPTIONS = ("gres", "tres-per-node", "tres-per-task")
GPU_OPTIONS = ("gpus-per-node", "gpus", "gpus-per-task", "gpus-per-socket")


def gpus_in(slurm: Mapping[str, Any], nodes: int | str, tasks_per_node: int) -> dict[str, int]:
    """The GPUs per node that each option asks for, by the option as it is written in a configuration; options without
    a word about GPUs are left out. Raises ConfigError where the number of GPUs per node is not certain."""
    options = {str(key).replace("_", "-"): value for key, value in slurm.items() if value is not None}
    asked = {}
    for key, value in slurm.items():
        option, given = str(key).replace("_", "-"), f"launch.slurm.{key}={value}"
        count = None if value is None else _count(option, given, str(value))
        if count is None:
            continue
        if option.endswith("-per-task"):
            if count > 1:
                raise ConfigError(f"{given}: each rank uses one GPU; ask for 1 per task")
            count *= tasks_per_node
        elif option == "gpus" and str(nodes) != "1":
            raise ConfigError(f"{given}: Slurm may spread them unevenly over the nodes; use launch.slurm.gpus-per-node")
        elif option == "gpus-per-socket":
            sockets = str(options.get("sockets-per-node", ""))
            if not sockets.isdecimal():
                raise ConfigError(f"{given}: how many a node gives is not certain; use launch.slurm.gpus-per-node")
            count *= int(sockets)
        asked[given] = count
    return asked


def without_gpus(slurm: Mapping[str, Any]) -> dict[str, Any]:
    """The options that do not ask for GPUs."""
    return {key: value for key, value in slurm.items() if not gpus_in({key: value, "sockets-per-node": 1}, 1, 1)}


def _count(option: str, given: str, text: str) -> int | None:
    """The GPUs that an option asks for; None if it is not about GPUs. Raises ConfigError if it cannot be read."""
    if option in GRES_OPTIONS:
        items = [re.sub("^gres[/:]", "", item.strip()) for item in text.split(",")]
        items = [item for item in items if re.match(r"gpu\b", item)]
    elif option in GPU_OPTIONS:
        items = [f"gpu:{item.strip()}" for item in text.split(",")]
    else:
        return None
    total = 0
    for item in items:
        parts = re.split("[:=]", item.partition("(")[0])[1:]
        total += int(parts.pop()) if parts and parts[-1].isdecimal() else 1
        if len(parts) > 1 or "" in parts:
            raise ConfigError(f"{given}: cannot be read; write gpu:TYPE:COUNT in gres, TYPE:COUNT in other options")
    return total if items else None
