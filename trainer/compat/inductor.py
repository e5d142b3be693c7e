"""The private names behind torch's compiler, of what it makes for GPUs."""

from __future__ import annotations

import torch


def draw_from_default_generators() -> None:
    """Where a compiled model recomputes activations on a GPU, let it draw its random numbers, as for dropout, from
    torch's default generators.

    By default it draws them from generators of its own, which are seeded once per process: seeding the default ones
    before a step does not reach them, so a resumed run would draw other numbers. Holds in this thread.
    """
    import torch._functorch.config as config

    config.graphsafe_rng_functionalization = False


def compile_whole_under_ddp() -> None:
    """Within DistributedDataParallel, compile a model as one graph instead of one for each bucket of gradients."""
    import torch._dynamo.config as config

    config.optimize_ddp = False


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether the compiler has recorded CUDA graphs on this device for a forward and a backward pass, and left out no
    part of a model so far. Call it in the thread that trains."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    if manager is None or counters["inductor"]["cudagraph_skips"]:
        return False
    return any(any(forward.children.values()) for forwards in manager.roots.values() for forward in forwards)
