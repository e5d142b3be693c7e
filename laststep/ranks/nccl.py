"""Environment variables of torch's NCCL collectives, where torch's own default does not suit a run.

A rank that dies leaves the others in a collective that never ends, with the state of the last whole step in their
memory. For the rescue two things must not happen: torch must not end the process, and it must not abort the
communicator, because then the collective ends, half done, and the update that is queued behind it spoils the state.

What torch does on an error or a timeout of a collective, read in its sources (torch/csrc/distributed/c10d, of about the
age of torch 2.11 and 2.15) and in the headers of 2.15; not tested, as no GPU was available:

* TORCH_NCCL_ASYNC_ERROR_HANDLING: 1 aborts the communicator and then the process, 2 only the communicator, 3, the
  default, only the process; 0 does neither (macros SHOULD_CLEAN_UP and SHOULD_TEAR_DOWN in ProcessGroupNCCL.hpp). They
  guard `WorkNCCL::handleException` and the abort in the watchdog of ProcessGroupNCCL.cpp, and in the backend of torch
  2.15, nccl2/ProcessGroupNCCL.cpp, `handleWatchdogFailure`: there the next collective then raises the error in Python.
* TORCH_NCCL_RETHROW_CUDA_ERRORS: the thread that polls the collectives (`ncclCommWatchdog`, later `Watchdog::run`)
  meets a CUDA error within 0.1 s, and by default throws it out of the thread, which ends the process without a record.
  With 0 it only logs it. Our watchdog asks the device twice a second and reports the error with the rank's name. The
  newer backend catches everything in that thread.
* TORCH_NCCL_ENABLE_MONITORING: `heartbeatMonitor` writes the flight recorder's file, so it stays on. It ends the
  process if that thread has been stuck for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, or as long after another rank has asked
  for the files. It measures by a clock, which moves on while the job is suspended.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Either variable names the files; torch prefers the first.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
HEARTBEAT_S = 7 * 24 * 3600  # torch counts in 32 bits of milliseconds

ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
DESYNC_DEBUG = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
OFF = ("", "0", "n", "no", "f", "false", "off")

# What NCCL may otherwise choose anew for each topology and message size, and what `pin_algorithms` chooses.
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
# By either name: how many parts a sum is cut into, each with its own ring.
CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")


def set_defaults(records: Path) -> None:
    """Set the variables that the user has not set. Call this before the ranks meet.

    When a collective fails, each rank writes its last collectives into a file: `records` followed by
    the rank's number. `python -m torch.distributed.flight_recorder.fr_trace` reads it. torch's default is a file in
    ~/.cache, which the ranks of all runs overwrite.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not any(name in os.environ for name in RECORDS):
        os.environ[RECORDS[0]] = str(records)
    if not any(name in os.environ for name in ERROR_HANDLING):
        os.environ[ERROR_HANDLING[0]] = "0"
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(HEARTBEAT_S))  # our watchdog is there long before


def harmful_settings() -> list[str]:
    """A line for each of the user's settings with which no step can be saved after a rank has died."""
    problems = []
    if set_to := _set(ERROR_HANDLING):
        effect = "lets half an all-reduce through" if set_to.endswith("=2") else "ends the process"
        problems.append((set_to, f"torch {effect} when a collective fails"))
    if set_to := _set(BLOCKING_WAIT):
        problems.append((set_to, "torch aborts a collective that takes too long"))
    debug = _set(DESYNC_DEBUG)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        debug = debug or "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    if debug and not _set(ERROR_HANDLING):
        problems.append((debug, "torch then ends the process when a collective fails"))
    return [f"WARNING: {set_to}: {why}; after a rank's death no step can be saved" for set_to, why in problems]


def _set(names: tuple[str, ...]) -> str | None:
    """The first of these variables that is set, and not switched off, with its value."""
    return next((f"{n}={os.environ[n]}" for n in names if os.environ.get(n, "").lower() not in OFF), None)


def pin_algorithms() -> None:
    """Take from NCCL the choices that it makes by topology and size, for train.deterministic. Call this before the
    communicator is made. A variable that the user has set stays as it is, and `describe` shows it.

    Each choice adds in another order. Ring is the one algorithm that every collective has, Simple the one protocol that
    is safe on all hardware (LL128 is not). NVLS and CollNet let switches add, in an order of their own. The number of
    channels and the order of ranks in a ring stay NCCL's: it derives them from the links of the nodes, so they are the
    same as long as the layout is and all links work. `nccl_graph` notes them.
    """
    for name, value in PINNED.items():
        os.environ.setdefault(name, value)


def describe() -> dict[str, str]:
    """NCCL's version, and the variables in the environment that determine the order of its sums."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    settings = (f"{name}={os.environ[name]}" for name in (*PINNED, *CHANNELS) if name in os.environ)
    return {"NCCL": " ".join([version, *settings])}
