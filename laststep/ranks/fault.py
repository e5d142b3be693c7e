"""What ends an attempt other than in the orderly way: the `Fault` that ranks report, and their own errors.

Any error of a rank may be a bug of the user's, and blames no node. `blamed_host` knows those that do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from laststep.config.errors import CheckpointError, ConfigError, DiskError, NotFinite

FaultReason = Literal["failed", "hung", "signal"]  # signal: the grace period after one is running out
# Whether a retry may succeed; if_trained: only if the run has trained before as it is configured now.
Retry = Literal["yes", "if_trained", "no"]


@dataclass(frozen=True)
class Fault:
    """Why an attempt cannot end in the orderly way."""

    reason: FaultReason
    text: str  # what happened and where: one line, or an error with its traceback
    cause: bool = True  # False for a mere consequence of another rank's fault
    retry: Retry = "yes"
    silent: bool = False  # a rank gives no sign of life: its node may be cut off from the others, and from srun
    blames: str = ""  # the hosts of the ranks that the others wait for, separated by commas


class DeviceConflict(ConfigError):
    """Some ranks have another device or backend than the others, or two use one GPU. All ranks raise it; the
    message names those ranks."""


class DeviceSilent(Exception):
    """The device does not answer. The message says so of a rank's device, in words for the log and the record."""


class MeetingError(RuntimeError):
    """The ranks of an attempt did not find each other."""


class RankEnded(MeetingError):
    """A rank has ended before this one has met it, as its supervisor says. `host`: the host of that rank if it was
    killed, else empty."""

    def __init__(self, message: str, host: str) -> None:
        super().__init__(message)
        self.host = host


# What CUDA and torch say of a GPU or a driver that has failed. Not of an illegal memory access or a failed assertion,
# which a kernel of the user's may cause, nor of memory that runs out.
_HARDWARE = re.compile(
    r"CUDA error: (uncorrectable|unknown error|no CUDA-capable device|CUDA-capable device\(s\) is/are busy"
    r"|startup failure|system (not yet initialized|has unsupported display driver)"
    r"|Invalid access of peer GPU memory over nvlink or a hardware error)"
    r"|No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver initialization failed"
)


class BadNode(RuntimeError):
    """A check has found that a node is bad. Raised in a rank, it ends the attempt, and the record blames the node."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host


# These explain themselves in one line; anything else needs its traceback.
ONE_LINE = (ConfigError, DiskError, CheckpointError, NotFinite, MeetingError, BadNode)


def blamed_host(error: BaseException, host: str) -> str:
    """The node that is to blame for an error of a rank on `host`; empty if none is."""
    if isinstance(error, (BadNode, RankEnded)):
        return error.host
    return host if isinstance(error, RuntimeError) and _HARDWARE.search(str(error)) else ""
