"""All faults by name."""

from __future__ import annotations

from tests.faults import crashes, damage, processes, signals
from tests.faults.plan import Fault

# Those of `make chaos`, at random; and those of the worst day of processes, each at every moment in turn.
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*signals.FAULTS, *crashes.FAULTS, *damage.FAULTS)}
PROCESSES: dict[str, Fault] = {fault.name: fault for fault in processes.FAULTS}
ALL = {**FAULTS, **PROCESSES}
