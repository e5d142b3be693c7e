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
state is saved, as the update may have been done twice; and the main thread stops, so that no rank can do the next one.
The update's kernels have been launched before, so none is loaded now; but an optimiser that is not fused allocates, for
which a driver may wait for the device. The rescue's deadline ends that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from laststep.checkpoint.files import StateChanged
from laststep.data.order import Order
from laststep.loops.held import HeldStep
from laststep.loops.learner import HeldLearner, Learner
from laststep.loops.ring import DEVICE_S, POLL_S, Ring
from laststep.ranks.device import DeviceQueue
from laststep.ranks.process import run_time
from laststep.ranks.world import Gathered

UPDATE_S = 3 * DEVICE_S  # how long the launches may take, and then the device


class LateUpdate:
    """What a rescue needs for this."""

    def __init__(self, learner: Learner, order: Order, ring: Ring[HeldStep], queue: DeviceQueue) -> None:
        self.tried = False
        self._learner, self._order, self._ring, self._queue = learner, order, ring, queue
        if queue.runs_ahead:
            learner.await_update = ring.await_newest

    @staticmethod
    def helps(learner: Learner, queue: DeviceQueue) -> bool:
        """Whether a rescue may need it. On a GPU it costs memory, which would be in vain if a rank that dies takes its
        shard with it, or if there is a copy of each step."""
        place, settings = learner.place, learner.config.checkpoint
        has_copies = settings.replicas > 0 and settings.replica_every_steps > 1
        return place.shards > 1 and (not queue.runs_ahead or place.replicas > 1 or has_copies)

    def gathered(self, steps: int) -> Gathered | None:
        """What this rank has gathered last, for those that have not; on a GPU in the last of so many steps, which the
        device has done."""
        return self._queue.ask(lambda: self._learner.gradients.gathered(steps if self._queue.runs_ahead else None))

    def do(self, gathered: Gathered) -> tuple[Mapping[str, Tensor], int] | None:
        """Do the update of this step, after the state that the ring has chosen. Returns what the step measured, and its
        samples; None if it cannot be done: then nothing has changed. Raises StateChanged if the device has gone on, and
        TimeoutError or DeviceSilent if it does not do this update."""
        self.tried = True
        if self._queue.runs_ahead and not self._ring.await_thread(DEVICE_S):
            return None  # it may still change what the update needs
        if not self._ring.is_whole():
            return None  # the device has gone on, and done this update
        measured = self._queue.ask(lambda: self._update(gathered), UPDATE_S)
        if measured is None:
            return None
        if not self._ring.redo():
            raise StateChanged("the device has gone on meanwhile, and may have done the same update")
        return measured, self._order.count(gathered.step - 1)

    def _update(self, gathered: Gathered) -> Mapping[str, Tensor] | None:
        held = self._ring.held
        if held is not None:
            assert isinstance(held.state, HeldLearner)
            if not held.state.put_back():
                return None
        if not self._learner.gradients.take(gathered):
            return None
        measured = self._learner.update()
        self._await_device()
        return measured

    def _await_device(self) -> None:
        done, deadline = self._queue.event(), run_time() + DEVICE_S
        done.record()
        while not done.query():
            if run_time() > deadline:
                raise TimeoutError(f"the device has not done the update within {DEVICE_S:.0f} s")
            time.sleep(POLL_S)
