"""The process group as a user's script finds it: initialised already, and not the script's to destroy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from laststep.compat import replace_default_timeouts, replace_group_functions
from laststep.config.errors import ConfigError
from laststep.ranks.group import COLLECTIVE, Group
from laststep.say import say


def lend_group(group: Group) -> Callable[[], None]:
    """From now on `init_process_group` joins the process group that exists, and `destroy_process_group` leaves the
    default one alone: Laststep still needs it when the script is done. What other groups do may take as long as what
    this one does. Call what this returns to undo that.

    A module that has imported the two functions before by their names keeps torch's own.
    """
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def join(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            _check(group, inspect.signature(init).bind(*args, **kwargs).arguments)
        else:
            init(*args, **kwargs)

    def leave(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    undo, undo_timeouts = replace_group_functions(join, leave), replace_default_timeouts(COLLECTIVE)

    def undo_all() -> None:
        undo()
        undo_timeouts()

    return undo_all


def _check(group: Group, given: dict[str, Any]) -> None:
    """Raise ConfigError if the script asks for other ranks, and warn if it asks for another backend."""
    world = group.world
    for name, ours in (("rank", world.rank), ("world_size", world.size)):
        if given.get(name, -1) not in (-1, ours):
            raise ConfigError(
                f"init_process_group({name}={given[name]}): this is rank {world.rank} of {world.size}; leave {name} out"
            )
    wanted = str(given.get("backend") or group.backend).lower()
    by_device = dict(part.split(":", 1) for part in wanted.split(",") if ":" in part)
    needed = {by_device.get(device, group.backend) for device in ("cpu", group.device.type)} if by_device else {wanted}
    if needed != {group.backend} and world.rank == 0:
        say(
            f"WARNING: init_process_group(backend={wanted}): the ranks are connected by {group.backend} already; "
            "launch.backend chooses the backend"
        )
