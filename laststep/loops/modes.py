"""How a custom loop has set its modules, which no checkpoint restores: in which mode they are, and what is frozen.

The function must do so again in each attempt. The position has a fingerprint of it, taken when the update of the last
step began, so that the next attempt notices if it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from torch import Tensor, nn

from laststep.checkpoint.manager import Position

OTHER_MODE = (
    "WARNING: other modules are in training mode than before the run was resumed, so it may end with other results: "
    "call model.train() after each validation, and model.eval() only where every attempt does"
)
OTHER_FROZEN = (
    "WARNING: other parameters are frozen than before the run was resumed, so it may end with other results: freeze "
    "them where every attempt does, as in `if epoch >= 3`, not `if epoch == 3`"
)


class Modes:
    """Of the registered modules. Wrappers, such as DistributedDataParallel and torch.compile, do not count: the next
    attempt may do without them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` is called with a warning."""
        self._say = say
        self._parts: list[nn.Module] = []
        self._parameters: list[Tensor] = []
        self._before = ""
        self.fingerprint = ""  # as the newest update began: checksums of the modes, and of what is frozen

    def resume(self, position: Position) -> None:
        """Compare the next fingerprint with the one of this position. Not at the end of an epoch, between whose steps
        and the next one's a loop may change the modes."""
        self._before = position.modes if position.batches and not position.over else ""

    def update_begins(self, modules: Sequence[nn.Module]) -> None:
        """Take a new fingerprint of these modules, the same at each call. Say so if a resume has changed anything."""
        if not self._parts:
            self._parts = [part for module in modules for part in module.modules() if not any(part.children())]
            self._parameters = [parameter for module in modules for parameter in module.parameters()]
        training = crc32(bytes([part.training for part in self._parts]))
        trained = crc32(bytes([parameter.requires_grad for parameter in self._parameters]))
        self.fingerprint = f"{training:08x}{trained:08x}"
        before, self._before = self._before, ""
        if before not in ("", self.fingerprint):
            self._say(OTHER_MODE if before[:8] != self.fingerprint[:8] else OTHER_FROZEN)
