"""The state of a custom training loop, as a checkpoint made at this moment would hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from laststep.checkpoint.restore import SharedCheckpoint
from laststep.loops.held import HeldState
from laststep.loops.registered import FingerprintedState, Registered, State
from laststep.ranks.group import Group


class CustomState:
    """What a checkpoint of a custom training loop holds.

    Until the function has registered its objects, that is nothing. From then on it is the state of these objects at the
    end of the last step. When an epoch has no more steps, it stays the state that these steps
    have left, until everything that follows them in the epoch is done: a resumed run does all of that again.
    """

    def __init__(
        self,
        group: Group,
        row: Tensor,
        update: Callable[[], AbstractContextManager[None]],
        advance: Callable[[], None],
    ) -> None:
        """`row` is broadcast with the buffers, see `Registered`. The state changes within `update`, see `Ring`;
        `advance` is called while a checkpoint is loaded."""
        self._group = group
        self._row = row
        self._update = update
        self._advance = advance
        self.checkpoint: SharedCheckpoint | None = None  # until the first step
        self.registered: Registered | None = None
        self._after_steps: FingerprintedState | None = None  # at the end of the epoch's steps
        self._at_break: FingerprintedState | None = None  # the same, where a break has ended them

    def register(self, objects: Mapping[str, Any], opaque: bool) -> Registered:
        """Hold the state of these objects from now on; `opaque`: a framework holds the rest. Raises ConfigError."""
        self.registered = Registered(objects, self._group, self._row, opaque)
        return self.registered

    def restore(self) -> None:
        """Load the checkpoint into the registered objects, if there is one. A collective. Raises ConfigError."""
        if self.checkpoint is not None:
            self._known().restore(self.checkpoint, self._advance, last=False)

    def restore_for_first_step(self) -> None:
        """Load the checkpoint again: it already holds every change that the function makes before its first step. A
        collective."""
        if self.checkpoint is not None:
            with self._update():
                self._known().restore(self.checkpoint, self._advance, last=True)
            self.checkpoint = None

    def current(self) -> State:
        """The state for a checkpoint. References."""
        if self._after_steps is not None:
            return self._after_steps.state
        return {} if self.registered is None else self.registered.state()

    @property
    def steps_over(self) -> bool:
        """Whether this is the state that the steps of an epoch have left."""
        return self._after_steps is not None

    def unchanged(self) -> bool:
        """Whether what follows the steps of an epoch has left the state alone. True when no epoch's steps are over."""
        return self._after_steps is None or self._after_steps.unchanged()

    def unchanged_everywhere(self) -> bool:
        """The same, on every rank: of a sharded state, what has changed may be another rank's rows. A collective."""
        unchanged = self.unchanged()
        if self._known().place.shards == 1:
            return unchanged
        return all(map(bool, self._group.gather(torch.tensor(unchanged, device=self._group.device))))

    def meet(self) -> None:
        """See `Registered.meet`."""
        if self.registered is not None:
            self.registered.meet()

    def hold(self, on_host: Callable[[Tensor], bool]) -> HeldState:
        """What the host holds of the state now, see `HeldState`."""
        return self._after_steps or self._known().hold(on_host)

    def snapshot(self) -> None:
        """Take over what the function has changed since the last epoch's steps."""
        with self._update():
            self._known().snapshot()

    def sync(self) -> None:
        """Make the state the same on every rank, for a save between two steps: a forward pass after the update has made
        the buffers differ. A collective."""
        if self.registered is not None and self._after_steps is None:
            self.registered.sync_buffers()
            with self._update():
                self.registered.apply_synced()
                self.registered.snapshot()

    def break_off(self) -> None:
        """A break has left the loop over steps after the update of a step: hold the state as it is now."""
        self._known().snapshot()
        self._at_break = FingerprintedState(self._known().state())

    def end_steps(self) -> None:
        """The epoch has no more steps: hold the state that they have left. A collective, except after `break_off`."""
        if self._at_break is None:
            self.sync()
        with self._update():
            self._after_steps = self._at_break or FingerprintedState(self._known().state())
            self._at_break = None

    def end_epoch(self) -> None:
        """What follows the steps is done too: the state of the registered objects counts again."""
        self._after_steps = None

    def _known(self) -> Registered:
        assert self.registered is not None
        return self.registered
