"""The exponential moving average of a model's weights and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from laststep.checkpoint.shards import local_of


class Average(AveragedModel):
    """torch's AveragedModel, bit for bit, without a wait for the device.

    torch keeps the counter on the CPU and copies it to the device in each update, where an exponential average ignores
    it. Here it is on the device, so it also counts only the updates that the device has done.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device | None) -> None:
        super().__init__(model, device, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.requires_grad_(False)
        self._update = get_ema_multi_avg_fn(decay)
        self.is_empty = True  # whether the counter is 0

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model as it is now. The first one is copied."""
        own, others = _tensors(self.module), _tensors(model)
        if self.is_empty:
            for averaged, tensor in zip(own, others):
                averaged.copy_(tensor)
        else:
            by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
            for averaged, tensor in zip(own, others):
                pair = by_dtype.setdefault(averaged.dtype, ([], []))
                pair[0].append(averaged)
                pair[1].append(tensor)
            for averaged_group, group in by_dtype.values():
                self._update(averaged_group, group, self.n_averaged)
        self.is_empty = False
        self.n_averaged += 1

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See torch."""
        result = super().load_state_dict(state_dict, strict, assign)
        self.is_empty = bool(self.n_averaged == 0)
        return result


def _tensors(module: nn.Module) -> list[Tensor]:
    """Its weights and buffers; of those that are sharded, what this rank holds."""
    return [local_of(tensor) for tensor in (*module.parameters(), *module.buffers())]
