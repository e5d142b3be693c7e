"""The environment variables by which code written for torchrun learns its rank: here every launcher's ranks have them.

A process that a rank starts inherits them. It is not that rank, so `detect_world` forgets them first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from laststep.ranks.world import World

# The id of the process that has set all of VARIABLES, and the MASTER_ADDR:MASTER_PORT that it has set.
EXPORTED = "LASTSTEP_EXPORTED"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def export_world(world: World, host: str, port: int) -> Callable[[], None]:
    """Set VARIABLES, after the ranks have met, as MASTER_ADDR says where they meet. Call what this returns to put back
    what was there before.

    `host` is rank 0's, `port` one that is free there: torch's own code connects to the process group that exists, but
    a script may serve a store of its own. torchrun has set all of them itself, and serves a store there.
    """
    if world.launcher == "torchrun":
        return lambda: None
    values = (world.rank, world.size, world.local_rank, world.local_size, host, port)
    before = {name: os.environ.get(name) for name in (*VARIABLES, EXPORTED)}
    if world.launcher == "env":  # a user has set most of them
        for name, value in zip(VARIABLES, values):
            os.environ.setdefault(name, str(value))
    else:
        os.environ.update(zip(VARIABLES, map(str, values)), LASTSTEP_EXPORTED=f"{os.getpid()}:{host}:{port}")

    def undo() -> None:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return undo


def forget_exported() -> None:
    """Remove the variables that a rank which started this process has set, unless a launcher has set them anew."""
    exported = os.environ.get(EXPORTED, "")
    if not exported or exported.startswith(f"{os.getpid()}:"):  # this process is that rank
        return
    del os.environ[EXPORTED]
    if exported.partition(":")[2] == f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}":
        for name in VARIABLES:
            os.environ.pop(name, None)


def free_port() -> int:
    """A port of this host at which nothing listens."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
