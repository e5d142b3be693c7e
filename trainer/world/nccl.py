"""What torch's NCCL collectives read from the environment, where torch's own default does not suit a run.

Read in the headers of torch 2.11 and 2.15 and in sources of about their age, and untried: no GPU was at hand. What
suits as it is: the flight recorder is on (TORCH_FR_BUFFER_SIZE, 2000 collectives), and errors are looked for while
nobody waits for a collective (TORCH_NCCL_ASYNC_ERROR_HANDLING=3): a rank that finds one ends itself, in 2.15 at once,
in 2.11 a minute later. If it lived on, it might save what came of half an all-reduce.
"""

from __future__ import annotations

import os
from pathlib import Path

# Either names the files; the first one wins.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_defaults(records: Path, timeout_s: float) -> None:
    """Set what the user's environment has not. To be called before the ranks meet.

    `records`, with the rank's number behind it, is where each rank writes what it did last when a collective failed or
    took too long (`python -m torch.distributed.flight_recorder.fr_trace` reads it); else that would be in ~/.cache,
    where the ranks of all runs overwrite it. `timeout_s` is the hang timeout.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not any(name in os.environ for name in RECORDS):
        os.environ[RECORDS[0]] = str(records)
    # torch ends a process whose thread for NCCL is stuck for so long. Our watchdog, which saves, must come first.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{2 * timeout_s:.0f}")
