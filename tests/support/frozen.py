"""A rank that saves a frozen state alone: what a rescue does, without the other survivors and without an agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laststep.checkpoint.files import StateChanged, Stripe
from laststep.checkpoint.store import CheckpointStore, shard_name
from laststep.checkpoint.writer import WRITE_BYTES, CheckpointInfo, FrozenState, reason_of
from laststep.loops.engine import Engine


def frozen_state(
    store: CheckpointStore,
    info: CheckpointInfo,
    state: Any,
    world_size: int = 1,
    before_commit: Callable[[], None] = lambda: None,
) -> FrozenState:
    """A state that nothing changes any more."""
    buffer = torch.empty(WRITE_BYTES, dtype=torch.uint8)
    return FrozenState(store, info, state, world_size, before_commit, buffer, is_whole=lambda: True)


def save_alone(
    store: CheckpointStore, info: CheckpointInfo, state: Any, world_size: int = 1, tag: str = "test"
) -> None:
    """Save a state in one file. Raises CheckpointError."""
    try:
        _save(frozen_state(store, info, state, world_size), tag)
    except OSError as error:
        store.discard(store.writing_folder(info.step, tag))
        raise store.write_error(info.step, reason_of(error)) from error


def save_frozen(engine: Engine) -> None:
    """Save the state that the loop has frozen; should the device change it meanwhile, the next one."""
    while True:
        try:
            with engine.frozen() as frozen:
                return _save(frozen, "rescue-0")
        except StateChanged:
            assert engine.freeze(timeout_s=0.0), "no state is whole any more"


def _save(frozen: FrozenState, tag: str) -> None:
    name = shard_name(0, 1)
    entry = frozen.write_part(tag, 0, Stripe(0, 1), name, after_chunk=lambda: None)
    frozen.commit(tag, {name: entry})
