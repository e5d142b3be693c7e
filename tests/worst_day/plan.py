"""Which faults to carry out: each call of the undisturbed run, by each kind of failure that such a call can have."""

from __future__ import annotations

import errno
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.worst_day.disk import Call, Fault

WHILE_S = 3.0  # longer than a retry takes, and shorter than the patience of a start
STALL_S = 3.0
EIO, ESTALE, ENOENT, ENOSPC = errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOSPC
EDQUOT, EROFS, ENOLCK = errno.EDQUOT, errno.EROFS, errno.ENOLCK
# The errors that a call can end with, by its name. ENOENT: a client of a network file system remembers that there was
# no such name.
ERRORS = {
    "create": (EIO, ENOSPC, ESTALE, EDQUOT, EROFS),
    "open": (EIO, ESTALE, ENOENT),
    "stat": (EIO, ESTALE, ENOENT),
    "fstat": (ESTALE, EIO),
    "list": (EIO, ESTALE),
    "mkdir": (EIO, ENOSPC, EDQUOT, EROFS),
    "rename": (EIO, ESTALE, ENOSPC, EROFS),
    "link": (EIO, ENOSPC),
    "symlink": (EIO, ENOSPC),
    "unlink": (EIO, ESTALE, EROFS),
    "rmdir": (EIO, ESTALE, EROFS),
    "write": (ENOSPC, EIO, EDQUOT),
    "fsync": (EIO, ENOSPC),
    "close": (ENOSPC, EIO),
    "read": (EIO, ESTALE),
    "truncate": (EIO, ENOSPC),
    "flock": (ENOLCK, EIO),
    "utime": (EIO, EROFS),
}
DONE_BUT = ("rename", "mkdir", "unlink", "rmdir", "link", "create")  # whose answer may be lost after they were done
SHORT = ("read", "write")
READING = ("open", "stat", "fstat", "list", "read", "flock")  # which leave nothing half done


class Planned(NamedTuple):
    """A run with one fault."""

    scenario: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.scenario}: {self.fault}"


def faults_of(call: Call, number: int) -> Iterator[Fault]:
    """The faults of one call, the most likely first."""
    first, *others = ERRORS[call.name]
    yield Fault(call, number, "fails", first)
    yield Fault(call, number, "whole disk fails for a while", EIO, WHILE_S)
    if call.name in DONE_BUT:
        yield Fault(call, number, "done, but fails", EIO)
    if call.name in SHORT:
        yield Fault(call, number, "is short")
    if call.name == "list":
        yield Fault(call, number, "is old")
    if call.name not in READING:
        yield Fault(call, number, "kills its process")  # a write is half done before that
    if call.name in DONE_BUT:
        yield Fault(call, number, "done, and kills its process")
    yield from (Fault(call, number, "fails", error) for error in others)
    yield Fault(call, number, "fails for a while", ESTALE if ESTALE in ERRORS[call.name] else first, WHILE_S)
    yield Fault(call, number, "stalls", 0, STALL_S)


def make_plan(traces: Mapping[str, Counter[Call]], seed: int) -> list[Planned]:
    """All runs, in an order in which any first N of them are spread evenly: each call once, then each a second time."""
    drawn = random.Random(seed)
    calls = [
        (scenario, call, number)
        for scenario, trace in sorted(traces.items())
        for call, count in sorted(trace.items())
        for number in ([1, count] if count > 2 else [1])
    ]
    drawn.shuffle(calls)
    each = []
    for scenario, call, number in calls:
        faults = list(faults_of(call, number))
        begin = drawn.randrange(len(faults))
        each.append([Planned(scenario, fault) for fault in faults[begin:] + faults[:begin]])
    rounds = itertools.zip_longest(*each)
    return [planned for one in rounds for planned in one if planned is not None]
