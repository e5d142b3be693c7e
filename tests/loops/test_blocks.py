"""The parts of a model that are recomputed, compiled and gathered one by one.

With too few of them a sharded rank holds the whole model at once; nothing else would show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision import models

from laststep.loops.gradients import repeated_blocks
from laststep.tasks.decoder import Decoder
from laststep.tasks.sizes import size_of


def encoder() -> nn.Module:
    """As in torch's tutorials: layers of torch's own between an embedding and a head."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(8, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 8))


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        pytest.param(encoder, {"TransformerEncoderLayer": 3}, id="encoder"),
        pytest.param(
            lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
            {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3},
            id="transformer",
        ),
        pytest.param(lambda: models.vit_b_32(), {"EncoderBlock": 12}, id="vit"),
        pytest.param(lambda: models.resnet18(), {"BasicBlock": 8}, id="resnet"),
        pytest.param(lambda: models.resnet50(), {"Bottleneck": 16}, id="deep-resnet"),
        pytest.param(lambda: Decoder(size_of("tiny-1m", {}, 64)), {"Block": 5}, id="decoder"),
        pytest.param(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), {}, id="none"),
    ],
)
def test_repeated_blocks(build: Callable[[], nn.Module], blocks: dict[str, int]) -> None:
    """Whole layers, in any nest of containers; never the linear layers or convolutions that they consist of."""
    with torch.device("meta"):
        model = build()
    assert Counter(type(block).__name__ for block in repeated_blocks(model)) == blocks


def test_blocks_of_swin() -> None:
    """Its stages begin with layers that merge patches, which are blocks as well."""
    with torch.device("meta"):
        kinds = Counter(type(block).__name__ for block in repeated_blocks(models.swin_t()))
    assert kinds["SwinTransformerBlock"] == 12 and not kinds["Linear"] + kinds["Sequential"]
