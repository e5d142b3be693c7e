"""Lightning Fabric on the ranks of a run: `from laststep.frameworks.fabric import Fabric`, and `Fabric(run, ...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laststep.frameworks import lightning_part, unusable
from laststep.loops.run import Run, loop_of

if TYPE_CHECKING:
    from lightning import fabric
else:
    try:
        fabric = lightning_part("fabric")
    except ImportError as error:
        raise unusable(__name__, error) from error


class Fabric(fabric.Fabric):
    """Fabric for a run, with DDP. The arguments are Fabric's, without those that say where ranks run."""

    def __init__(self, run: Run, **arguments: Any) -> None:
        super().__init__(
            strategy=fabric.strategies.DDPStrategy(**ddp_options(run)),
            num_nodes=loop_of(run).group.world.nodes,
            **arguments,
        )


def ddp_options(run: Run) -> dict[str, Any]:
    """The arguments of a DDPStrategy of Fabric or Lightning for the ranks of a run."""
    local_size = loop_of(run).group.world.local_size
    return {"parallel_devices": [run.device] * local_size, "cluster_environment": _Ranks(run)}


class _Ranks(fabric.plugins.environments.ClusterEnvironment):
    """The ranks as Laststep started them. Because it is not Lightning's environment for Slurm, Lightning requeues
    nothing."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._world = loop_of(run).group.world

    creates_processes_externally = True
    main_address, main_port = "", 0  # the process group is initialised already

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node
