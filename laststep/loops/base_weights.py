"""The frozen weights under adapters, which a checkpoint leaves out: the script loads them again in each attempt, and a
fingerprint shows whether they are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set

import torch
from torch import Tensor, nn

from laststep.checkpoint.shards import local_of, range_of, shard_count
from laststep.config.errors import ConfigError
from laststep.ranks.group import Group

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
AT_A_TIME = 1 << 22  # elements, each of which needs 16 bytes more
MOST_NAMES = 3


class BaseWeights:
    """Stands in a checkpoint for the frozen weights of a model that has adapters."""

    def __init__(self, model: nn.Module, adapters: Set[str], exported: Mapping[str, str], group: Group) -> None:
        """`adapters` are their names, each a part of the names of its parameters, as PEFT has them. `exported` has by
        the names in the model those of a file of adapters. A collective."""
        self.model, self._group = model, group
        self._exported = json.dumps(dict(exported))
        self._frozen = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
            and adapters.isdisjoint(name.split("."))
            and type(local_of(parameter).data) is Tensor  # what it would do to others, nobody knows
        }
        # A quantised weight has more entries in the state_dict, by names that continue its own.
        self.left_out = frozenset(
            name for name in model.state_dict(keep_vars=True) if not self._frozen.keys().isdisjoint(_prefixes(name))
        )
        self.take()

    def take(self) -> None:
        """Take the fingerprints of the weights as they are now. A collective."""
        sums = [_sum_of(parameter, self._group).to(self._group.device) for parameter in self._frozen.values()]
        ranks = torch.stack(self._group.gather(torch.stack(sums))) if sums else torch.zeros(1, 0)
        self._found: dict[str, str] = {}
        for number, (name, parameter) in enumerate(self._frozen.items()):
            total = int(ranks[: max(1, shard_count(parameter)), number].sum())
            self._found[name] = f"{parameter.dtype} {tuple(parameter.shape)} {total & (1 << 64) - 1:016x}"
        self._text = json.dumps(self._found)

    def state_dict(self) -> dict[str, str]:
        """As text: it is copied in each step, and there may be thousands."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the training began, and is not any more: a checkpoint of a model with "
                    "adapters holds the adapters alone; unfreeze before trainer.train()"
                )
        return {"fingerprints": self._text, "exported": self._exported}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raises ConfigError if these are other weights than those with which the run began."""
        before: dict[str, str] = json.loads(state["fingerprints"])
        now = self._found
        if differ := [name for name in before | now if before.get(name) != now.get(name)]:
            more = f" and {len(differ) - MOST_NAMES} more" if len(differ) > MOST_NAMES else ""
            raise ConfigError(
                f"the base model is not the one that this run began with: {', '.join(differ[:MOST_NAMES])}{more} "
                "differ; the checkpoint holds the adapters alone, so load the same base model, or start a new run"
            )


def _prefixes(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[: number + 1]) for number in range(len(parts))}


def _sum_of(parameter: Tensor, group: Group) -> Tensor:
    """The sum of the bits of all elements, each times a number that depends on its place; of a sharded parameter, the
    part of this rank. Integers: no order of adding them matters."""
    own, first, shards = local_of(parameter).data.contiguous(), 0, shard_count(parameter)
    if shards:
        first = range_of(parameter, group.world.rank % shards, shards)[0] // parameter.itemsize
    bits = (torch.view_as_real(own) if own.is_complex() else own).reshape(-1)
    bits = bits.view(INTEGERS[bits.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start, part in zip(range(0, len(bits), AT_A_TIME), bits.split(AT_A_TIME)):
        places = torch.arange(first + start, first + start + len(part), device=bits.device)
        total += ((2 * places + 1) * part).sum()
    return total
