"""Environment variables of torch's NCCL collectives, where torch's own default does not suit a run.

According to the headers of torch 2.11 and 2.15 and sources of about that age; not tested, as no GPU was available. Two
defaults suit as they are. The flight recorder is on (TORCH_FR_BUFFER_SIZE, 2000 collectives). And errors are detected
even when no thread waits for a collective (TORCH_NCCL_ASYNC_ERROR_HANDLING=3): a rank that detects one ends itself, in
2.15 at once, in 2.11 a minute later. If it survived, it might save a state that contains half an all-reduce.
"""

from __future__ import annotations

import os
from pathlib import Path

# Either variable names the files; torch prefers the first.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_defaults(records: Path, timeout_s: float) -> None:
    """Set the variables that the user has not set. Call this before the ranks meet. `timeout_s` is the hang timeout.

    When a collective fails or takes too long, each rank writes its last collectives into a file: `records` followed by
    the rank's number. `python -m torch.distributed.flight_recorder.fr_trace` reads it. torch's default is a file in
    ~/.cache, which the ranks of all runs overwrite.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not any(name in os.environ for name in RECORDS):
        os.environ[RECORDS[0]] = str(records)
    # torch ends a process whose NCCL thread is stuck for this long. Our watchdog, which saves, must act first.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{2 * timeout_s:.0f}")
