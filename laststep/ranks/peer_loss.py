"""Tells the loss of a peer from a rank's own errors: then the peer's error, if it had one, is what matters."""

from __future__ import annotations

import re

import torch.distributed as dist

# gloo has no type of its own: its errors are RuntimeErrors that begin with the place in its source that lost the peer.
# Its checks of arguments begin with "[enforce fail at" instead.
GLOO_PEER_LOSS = re.compile(r"\[\S*gloo/transport/\S+:\d+\] |Application timeout caused pair closure")
# NCCL reports with one type that a peer is gone, and what is wrong with this rank's own GPU or call.
NCCL_OWN_ERROR = re.compile("^nccl(UnhandledCudaError|InvalidArgument|InvalidUsage):", re.MULTILINE)


class PeerLost(RuntimeError):
    """Another rank is gone."""


def is_peer_loss(error: Exception) -> bool:
    """Whether an error says only that a peer is gone. Then the peer's own error, if it had one, is what matters."""
    if isinstance(error, dist.DistBackendError):
        return not NCCL_OWN_ERROR.search(str(error))
    if isinstance(error, (PeerLost, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(GLOO_PEER_LOSS.match(str(error)))
