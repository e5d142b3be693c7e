"""join: a rank takes its device and goes where the ranks meet, as the configuration says."""

from __future__ import annotations

from pathlib import Path

from trainer.config.config import Config
from trainer.world.device import choose_backend, set_up_device
from trainer.world.group import Group, sign_in
from trainer.world.world import World


def join(config: Config, world: World, meeting: Path, timeout_s: float) -> Group:
    """This rank among the others, to `Group.connect` next; the rest is as in `trainer.world.group.sign_in`."""
    device = set_up_device(config, world)
    return sign_in(world, device, choose_backend(config, device), meeting, timeout_s, config.launch.init_method)
