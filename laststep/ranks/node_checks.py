"""Checks of the node that this process runs on: its memory and disks, and the clocks of all nodes.

The GPUs are checked by `laststep.ranks.gpu_checks`. A preflight runs these before an attempt trains, and
`doctor --nodes` on every node of its roll call.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MB, GB = 10**6, 10**9
SHARED_MEMORY = "/dev/shm"  # loader processes and NCCL exchange data there
FULL = 1 * MB  # less room than this is none
LITTLE = {SHARED_MEMORY: 64 * MB, "TMPDIR": 100 * MB, "launch.root": 1 * GB}
LEAST_MEMORY, LITTLE_MEMORY = 100 * MB, 1 * GB  # of each rank
MOST_SKEW_S = 10.0
Room = Callable[[str], os.statvfs_result]


class Finding(NamedTuple):
    """What a check has found wrong."""

    text: str
    fatal: bool  # the node cannot train; else it may only be slow, or fail later


def check_host(
    ranks: int, root: str | None, room: Room = os.statvfs, memory: str = "/proc/meminfo"
) -> Iterator[Finding]:
    """Check this node's memory, for this many ranks, and the room in its disks; also in `root`, the folder of all runs,
    which all nodes share, so that it is never this node's fault."""
    yield from _check_memory(ranks, Path(memory))
    if os.path.isdir(SHARED_MEMORY):
        yield from _check_room(SHARED_MEMORY, SHARED_MEMORY, room)
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield Finding(f"TMPDIR: {error.strerror}", fatal=True)
    else:
        yield from _check_room("TMPDIR", folder, room)
    if root is not None:
        yield from (found._replace(fatal=False) for found in _check_room("launch.root", root, room))


def _check_memory(ranks: int, meminfo: Path) -> Iterator[Finding]:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines()) if meminfo.exists() else {}
    if "MemAvailable" in fields:
        available = 1024 * int(fields["MemAvailable"].split()[0])
        if available < LITTLE_MEMORY * ranks:
            text = f"{_size(available)} of memory available for {ranks} rank{'s' * (ranks > 1)}"
            yield Finding(text, fatal=available < LEAST_MEMORY * ranks)


def _check_room(name: str, folder: str, room: Room) -> Iterator[Finding]:
    where = folder if folder == name else f"{name}={folder}"
    try:
        found = room(folder)
    except OSError as error:
        yield Finding(f"{where}: {error.strerror}", fatal=True)
        return
    free = found.f_bavail * found.f_frsize
    if found.f_files and not found.f_favail:
        yield Finding(f"{where}: no free inode", fatal=True)
    elif free < LITTLE[name]:
        yield Finding(f"{where}: {'full' if free < FULL else f'only {_size(free)} free'}", fatal=free < FULL)


def skewed_clocks(hosts: Sequence[str], registered_at: Sequence[float], now: float) -> list[str]:
    """One line for each host whose clock differs too much from that of rank 0's host.

    Each rank notes the time when it registers at rank 0's store. Rank 0 did so first, and it is `now` there once it
    has read all of them. So a time outside of these two shows at least by how much a clock is wrong.
    """
    lines = {}
    for host, at in zip(hosts, registered_at):
        skew_s = min(0.0, at - registered_at[0]) + max(0.0, at - now)
        if abs(skew_s) > MOST_SKEW_S and host != hosts[0]:
            way = "ahead of" if skew_s > 0 else "behind"
            lines[host] = f"{host}: its clock is {abs(skew_s):.0f} s {way} that of {hosts[0]}"
    return list(lines.values())


def _size(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.0f} MB"
