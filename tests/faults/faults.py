"""All faults by name."""

from __future__ import annotations

from tests.faults import crashes, damage, signals
from tests.faults.plan import Fault

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*signals.FAULTS, *crashes.FAULTS, *damage.FAULTS)}
