"""join: set up this rank's device and register it with the other ranks, as the configuration says."""

from __future__ import annotations

from pathlib import Path

from trainer.config.config import Config
from trainer.world.device import choose_backend, set_up_device
from trainer.world.group import Group, register_rank
from trainer.world.world import World


def join(config: Config, world: World, address_file: Path, timeout_s: float) -> Group:
    """The group that this rank now belongs to; call `Group.connect` next. Raises as `register_rank` does."""
    device = set_up_device(config, world)
    return register_rank(
        world, device, choose_backend(config, device), address_file, timeout_s, config.launch.init_method
    )
