"""The private names behind torch's compiler, of what it makes for GPUs."""

from __future__ import annotations

import torch


def draw_from_default_generators() -> None:
    """Where a compiled model recomputes activations on a GPU, let it draw its random numbers, as for dropout, from
    torch's default generators.

    By default it draws them from generators of its own, which are seeded once per process: seeding the default ones
    before a step does not reach them, so a resumed run would draw other numbers.
    """
    import torch._functorch.config as config

    config.graphsafe_rng_functionalization = False


def compile_whole_under_ddp() -> None:
    """Within DistributedDataParallel, compile a model as one graph instead of one for each bucket of gradients."""
    import torch._dynamo.config as config

    config.optimize_ddp = False


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether the compiler has recorded a CUDA graph on this device."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    return manager is not None and any(manager.roots.values())
