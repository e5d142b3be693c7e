"""What deterministic kernels cost on a GPU, for the three layers that they slow down most."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from laststep.config.errors import first_line

if TYPE_CHECKING:
    import torch

TURNS, STEPS = 5, 10  # of each layer, with either kind of kernels in turn
WHOLE_TRAINING = "`python -m benchmarks.gpu resnet50 vit_b_16`, in a clone, measures whole trainings"


def describe_cost(device: torch.device) -> str:
    """One line: how much longer a layer's forward and backward pass takes with train.deterministic."""
    try:
        ratios = costs(device, 1)
    except RuntimeError as error:  # the GPU may be full, or too old for one of these layers
        return f"what it costs could not be measured ({first_line(error)}); {WHOLE_TRAINING}"
    return f"costs {', '.join(f'{ratio - 1:+.0%} ({layer})' for layer, ratio in ratios.items())}; {WHOLE_TRAINING}"


def costs(device: torch.device, scale: float) -> dict[str, float]:
    """Layer -> the ratio of its time with deterministic kernels to that with any. `scale` is that of the batches."""
    ratios = {}
    for layer, step in _layers(device, scale).items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(1 + TURNS):
            for deterministic in seconds:
                with _kernels(deterministic):
                    took_s = _time(step, device)
                if turn:  # in the first one cuDNN tries its kernels
                    seconds[deterministic].append(took_s)
        ratios[layer] = statistics.median(seconds[True]) / statistics.median(seconds[False])
    return ratios


def _layers(device: torch.device, scale: float) -> dict[str, Callable[[], object]]:
    """A forward and a backward pass of each layer: channels of a ResNet, heads of a transformer, a vocabulary."""
    import torch
    from torch import nn

    half = torch.float16 if device.type == "cuda" else torch.float32
    batch = max(1, round(32 * scale))
    convolution = nn.Conv2d(64, 64, 3, padding=1, device=device, dtype=half)
    embedding = nn.Embedding(32_000, 256, device=device, dtype=half)
    images = torch.randn(batch, 64, 56, 56, device=device, dtype=half, requires_grad=True)
    heads = torch.randn(3, batch, 12, 512, 64, device=device, dtype=half, requires_grad=True)
    tokens = torch.randint(32_000, (batch, 512), device=device)
    attention = nn.functional.scaled_dot_product_attention
    return {
        "convolution": lambda: convolution(images).sum().backward(),
        "attention": lambda: attention(heads[0], heads[1], heads[2], is_causal=True).sum().backward(),
        "embedding": lambda: embedding(tokens).sum().backward(),
    }


@contextlib.contextmanager
def _kernels(deterministic: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only, or any, as `laststep.ranks.device.set_up_device` does."""
    import torch

    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


def _time(step: Callable[[], object], device: torch.device) -> float:
    """Seconds for some steps."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finish()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    finish()
    return time.perf_counter() - began
