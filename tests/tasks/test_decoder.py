"""The language model: it cannot see what it is to predict, and each size is what its name says.

A decoder that sees the next token, or its neighbours' documents, reports losses that no use of it will reach.
"""

from __future__ import annotations

import dataclasses
from itertools import islice

import pytest
import torch

from laststep.config.errors import ConfigError
from laststep.tasks.decoder import Decoder, generate
from laststep.tasks.language import peak_flops
from laststep.tasks.sizes import SIZES, Size, size_of

SMALL = Size(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocabulary=50)


def model(size: Size = SMALL) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(5)  # so that attention is not uniform
    return made.eval()


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_as_named(name: str) -> None:
    """Within 5 %, as the model is really built; memory and time are planned by it."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Decoder(SIZES[name]).parameters())
    number = name.rpartition("-")[2]
    assert abs(parameters / (float(number[:-1]) * {"m": 1e6, "b": 1e9}[number[-1]]) - 1) < 0.05
    assert parameters == SIZES[name].parameters


def test_weights_do_not_depend_on_where_the_model_was_made() -> None:
    """A model that is too large for one rank is made on the meta device, and given its weights in parts."""
    torch.manual_seed(1)
    here = Decoder(SMALL).state_dict()
    with torch.device("meta"):
        there = Decoder(SMALL)
    assert all(tensor.is_meta for tensor in there.state_dict().values())
    torch.manual_seed(1)
    there.to_empty(device="cpu").init_weights()
    assert all(torch.equal(tensor, here[name]) for name, tensor in there.state_dict().items())


@pytest.mark.parametrize("size", [SMALL, dataclasses.replace(SMALL, kv_heads=4, tied=False)], ids=["tied", "untied"])
def test_no_position_sees_a_later_one(size: Size) -> None:
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(size)(tokens), model(size)(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(2).all(), "each later one sees it"


def test_documents_do_not_see_each_other() -> None:
    """A document in a window gets the logits that it gets alone."""
    first, second = (torch.randint(50, (1, size), generator=torch.Generator().manual_seed(size)) for size in (5, 8))
    positions = torch.tensor([[*range(5), *range(8)]])
    together = model()(torch.cat([first, second], 1), positions)
    torch.testing.assert_close(together, torch.cat([model()(first), model()(second)], 1))


def test_order_matters() -> None:
    """Without positions, attention would see a bag of tokens."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(model()(tokens)[0, -1], model()(tokens[:, [1, 0, 2, 3]])[0, -1])


def test_generated_text_is_what_the_whole_model_would_write() -> None:
    """The cache of keys and values only saves time. Past the window it continues; a seed gives the same text."""
    made = model()
    with torch.no_grad():
        written = list(islice(generate(made, [3, 4], 40, 0.0, 0, None), 20))
        tokens = [3, 4]
        for token in written:
            assert int(made(torch.tensor([tokens]))[0, -1].argmax()) == token
            tokens.append(token)
    assert len(list(islice(generate(made, [3], 4, 1.0, 0, None), 30))) == 30
    one, same, other = (list(islice(generate(made, [3], 8, 1.0, seed, None), 30)) for seed in (1, 1, 2))
    assert one == same != other
    assert list(generate(made, [3, 4], 40, 0.0, 0, written[0])) == []


def test_flops() -> None:
    """The figure that MFU is computed from: that of nanoGPT for GPT-2, whose FFN has as many weights."""
    size = SIZES["gpt2-124m"]
    assert size.flops_per_token(1024) == 6 * (size.parameters - 25 * 768) + 12 * 12 * 768 * 1024
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("GeForce 8800") is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"heads": 3}, "model.args.heads=3: model.args.width=128 must be a multiple of 2 x heads"),
        ({"kv_heads": 3}, "model.args.kv_heads=3: model.args.heads=4 must be a multiple of kv_heads"),
        ({"vocabulary": 100}, "model.args.vocabulary=100: the data have 256 tokens; leave it out"),
        ({"layer": 3}, "model.args.layer: a language model has no such number; did you mean layers?"),
        ({"width": 1.5}, "model.args.width=1.5: must be a positive integer"),
        ({"tied": 1}, "model.args.tied=1: must be true or false"),
    ],
)
def test_sizes_that_cannot_be(args: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        size_of("tiny-1m", args, 256)
    assert str(refused.value) == says
