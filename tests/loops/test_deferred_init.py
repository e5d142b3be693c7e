"""A model that is built without memory gets, tensor by tensor, the initial weights that it would have had.

If a draw were left out or made twice, a sharded run would start from other weights than one that is not sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from laststep.loops.initial_weights import CannotDefer, Ref, Tape
from laststep.tasks.decoder import Decoder
from laststep.tasks.sizes import size_of
from tests.loops.test_blocks import encoder
from tests.loops.test_learner import blocks, convnet


def decoder(tied: bool) -> nn.Module:
    arguments = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "tied": tied}
    return Decoder(size_of("tiny-1m", arguments, 64))


def torchvisions(name: str) -> nn.Module:
    model: nn.Module = models.get_model(name, weights=None)
    return model


def odd() -> nn.Module:
    """Buffers that are computed, given numbers, layers whose initialisation is computed, frozen and shared parts."""
    first, second = nn.Linear(6, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second, nn.Embedding(5, 4, padding_idx=1), nn.LSTM(4, 4), first)
    places, angles = torch.arange(10)[:, None], torch.exp(torch.arange(0, 8, 2) * -0.3)
    table = torch.zeros(10, 8)
    table[:, 0::2], table[:, 1::2] = torch.sin(places * angles), torch.cos(places * angles)
    model.register_buffer("table", table, persistent=False)
    model.register_buffer("mean", torch.tensor([1.0, 2.0]))
    nn.init.orthogonal_(first.weight)
    nn.init.trunc_normal_(second.weight, std=[each.item() for each in torch.linspace(0.1, 1, 3)][-1])
    second.requires_grad_(False).bias.data.mul_(2)
    with torch.device("meta"):
        nn.Linear(100, 100)  # draws nothing
    return model


def replayed(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], int]:
    """The tensors of the model, built without memory, and the most bytes that this took at any moment."""
    torch.manual_seed(3)
    tape = Tape()
    model, found, most = tape.record(build), dict[str, Tensor](), 0
    sinks = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            sinks[Ref.of(tensor)] = [lambda value, name=name: found.__setitem__(name, value.clone())]
        else:
            found[name] = tensor
    reserve = tape._tensor

    def noted(memory: dict[int, Tensor], ref: Ref) -> Tensor:
        nonlocal most
        tensor = reserve(memory, ref)
        most = max(most, sum(each.nbytes for each in memory.values()))
        return tensor

    tape._tensor = noted  # type: ignore[method-assign]
    tape.replay(sinks)
    return found, most


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: decoder(True), id="tied-decoder"),
        pytest.param(lambda: decoder(False), id="decoder"),
        pytest.param(odd, id="odd"),
        pytest.param(blocks, id="blocks"),
        pytest.param(convnet, id="convnet"),
        pytest.param(lambda: torchvisions("convnext_tiny"), id="convnext"),
    ],
)
def test_the_same_bits(build: Callable[[], nn.Module]) -> None:
    """Of every parameter and every buffer, whatever initialises them; never with memory for more than two tensors."""
    most, expected = check_bits(build)
    assert most <= 2 * max(tensor.nbytes for tensor in expected.values()) + 1000


def test_copies_of_a_layer() -> None:
    """torch's encoder copies the layer that it is given: that one is needed until the last copy, and nothing else."""
    most, expected = check_bits(encoder)
    layer = sum(tensor.nbytes for name, tensor in expected.items() if name.startswith("1.layers.0."))
    assert most <= layer + max(tensor.nbytes for tensor in expected.values()) + 1000


def check_bits(build: Callable[[], nn.Module]) -> tuple[int, dict[str, Tensor]]:
    """The most bytes that this model took while it was built without memory, and its tensors, which are the same."""
    found, most = replayed(build)
    torch.manual_seed(3)
    model = build()
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name
    return most, expected


def seeds() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 3)


def reads() -> nn.Module:
    return nn.Linear(3, 3) if float(torch.rand(1)) < 2 else nn.Linear(4, 4)


def reuses() -> nn.Module:
    made = nn.Linear(3, 3)
    made.weight = nn.Parameter(torch.Tensor(3, 3).normal_())
    return made


@pytest.mark.parametrize("build", [seeds, reads, reuses])
def test_a_model_that_needs_its_values(build: Callable[[], nn.Module]) -> None:
    """Such a model is refused, not initialised in another way; and the generator is as if nothing had been tried."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        found, _ = replayed(build)
    except CannotDefer:
        assert torch.equal(torch.get_rng_state(), before)
    else:
        torch.manual_seed(3)
        assert all(torch.equal(found[name], tensor) for name, tensor in build().named_parameters())
