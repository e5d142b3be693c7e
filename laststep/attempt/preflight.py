"""Preflight: each node checks itself while torch is imported, so that a bad node fails in seconds and by name.

The first rank of each node asks the driver about the GPUs and looks at memory and disks, in a thread; each rank checks
a product on its own GPU once it has its device. A node that fails is a `BadNode`: the end is counted and retried, and
its record blames the node. Anything that need not stop the run is a warning. Importing this module does not import
torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from laststep.config.config import Config
from laststep.ranks import gpu_checks, node_checks
from laststep.ranks.alarm import alarm
from laststep.ranks.bad_node import BadNode
from laststep.ranks.node_checks import Finding
from laststep.ranks.watchdog import Fault, Watchdog
from laststep.ranks.world import World, hostname
from laststep.say import say

if TYPE_CHECKING:
    import torch

DEADLINE_S = 60.0  # a driver or a disk that has not answered by then is stuck
Check = tuple[str, Callable[[], Iterable[Finding]]]  # what it asks, and the check


class Preflight:
    """The checks of this node, in a thread."""

    def __init__(self, checks: Sequence[Check], deadline_s: float = DEADLINE_S) -> None:
        self._checks = checks
        self._deadline_s = deadline_s
        self._findings: list[Finding] = []
        self._asked = ""
        self._thread = threading.Thread(target=self._check, name="preflight", daemon=True)
        if checks:
            self._thread.start()

    @classmethod
    def of(cls, config: Config, world: World) -> Preflight:
        """Start the checks that this rank has to make: none unless it is the first of its node."""
        return cls(checks_of(config, world) if config.launch.preflight and world.local_rank == 0 else [])

    def findings(self) -> list[Finding]:
        """Wait for the checks, and return what they have found."""
        if self._checks:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                stuck = Finding(f"no answer from {self._asked} within {self._deadline_s:.0f} s", fatal=True)
                return [*self._findings, stuck]
        return self._findings

    def wait(self) -> None:
        """Wait for the checks. Raises BadNode when one has failed or is stuck; prints a warning for anything else."""
        findings = self.findings()
        for found in findings:
            if not found.fatal:
                say(f"WARNING: {hostname()}: {found.text}")
        if fatal := "; ".join(found.text for found in findings if found.fatal):
            raise BadNode(hostname(), f"preflight: {fatal}")

    def _check(self) -> None:
        for asked, check in self._checks:
            self._asked = asked
            try:
                self._findings += check()
            except Exception as error:  # of the check itself: no reason to refuse a node
                say(f"WARNING: {hostname()}: preflight could not ask {asked}: {type(error).__name__}: {error}")


def checks_of(config: Config, world: World) -> list[Check]:
    """The checks of this node, before torch is imported."""
    root = config.launch.root if world.rank == 0 else None
    checks: list[Check] = [("its memory or disks", lambda: node_checks.check_host(world.local_size, root))]
    wanted = config.launch.gpus or world.local_size * (config.device == "cuda")
    if wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        checks.append(("the GPU driver", lambda: gpu_checks.check_gpus(gpu_checks.load_nvml(), wanted, visible)))
    return checks


def check_device(device: torch.device, watchdog: Watchdog) -> None:
    """Check a product on this rank's GPU; raises BadNode. A GPU that hangs is reported to the other ranks."""
    host = hostname()
    stuck = Fault(
        "hung", f"{host}: preflight: {device} has not multiplied two matrices in {DEADLINE_S:.0f} s", blames=host
    )
    with alarm(DEADLINE_S, lambda: watchdog.report(stuck)):
        error = gpu_checks.product_error(device)
    if error:
        raise BadNode(host, f"preflight: {device}: {error}")
