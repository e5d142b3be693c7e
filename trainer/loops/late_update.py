"""The update of a step in which a rank's main thread is stuck, done by the thread of a rescue.

A fault may find ranks of a sharded run one step apart. Some have what all ranks gather at the end of a step, and have
done its update; another has its gradients, and waits for what they gathered. It can do its update with theirs:

* One rank that has gathered proves that all ranks have contributed, and they do that with gradients that are complete.
* The rescue has frozen the ring, so the main thread never gets beyond the beginning of an update, even if the
  collective returns after all. Until there it only assigns what it has gathered, which is the same on every rank.
* All that the update needs is on this rank, and only the update itself changes it.

On a GPU the host is ahead: it has queued this update behind the collective that hangs, and begun the next step. So the
gradients are kept until the device has done their update: a rank has those of two steps in memory. In the rescue the
host is given back what it held before the update, and does it once more, on the stream beside. That is safe while the
main thread waits for the device, and the device for the collective. Should it go on after all, nothing of this rank's
state is saved: the update may have been done twice. Its kernels have been launched before, so none is loaded now; but
an optimiser that is not fused allocates, for which a driver may wait for the device. The rescue's deadline ends that.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.data.order import Order
from trainer.loops.held import HeldState
from trainer.loops.learner import Learner
from trainer.world.shard_place import Gathered


class LateUpdate:
    """What a rescue needs for this."""

    def __init__(self, learner: Learner, order: Order) -> None:
        self.tried = False
        self._learner, self._order = learner, order

    def gathered(self, steps: int | None) -> Gathered | None:
        """What this rank has gathered in the last of so many steps, None: of all, for those that have not."""
        return self._learner.gradients.gathered(steps)

    def do(self, gathered: Gathered, held: HeldState | None) -> tuple[Mapping[str, Tensor], int] | None:
        """Do the update of this step; `held` is what the host held right before, None if it still does. Returns what
        the step measured, and its samples; None if it cannot be done: then nothing has changed."""
        if held is not None and not self._learner.put_back(held):
            return None
        if not self._learner.gradients.take(gathered):
            return None
        return self._learner.update(), self._order.count(gathered.step - 1)
