"""The update of a step in which a rank's main thread is stuck, done by the thread of a rescue.

A fault may find ranks of a sharded run one step apart. Some have what all ranks gather at the end of a step, and have
done its update; another has its gradients, and waits for what they gathered. It can do its update with theirs:

* One rank that has gathered proves that all ranks have contributed, and they do that with gradients that are complete.
* The rescue has frozen the ring, so the main thread never gets beyond the beginning of an update, even if the
  collective returns after all. Until there it only assigns what it has gathered, which is the same on every rank.
* All that the update needs is on this rank, and only the update itself changes it.

Only on a CPU. On a GPU the host is ahead: it has queued this update behind the collective that hangs, counted it, and
let go of the gradients, whose memory the next step may already use.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.data.order import Order
from trainer.loops.learner import Learner
from trainer.world.shard_place import Gathered


class LateUpdate:
    """What a rescue needs for this."""

    def __init__(self, learner: Learner, order: Order) -> None:
        self.tried = False
        self._learner, self._order = learner, order

    @property
    def gathered(self) -> Gathered | None:
        """What this rank has gathered last, for those that have not."""
        return self._learner.gradients.gathered

    def do(self, gathered: Gathered) -> tuple[Mapping[str, Tensor], int] | None:
        """Do the update of this step. Returns what the step measured, and its samples; None if this rank's gradients
        are not complete."""
        self.tried = True
        if not self._learner.gradients.take(gathered):
            return None
        return self._learner.update(), self._order.count(gathered.step - 1)
