"""Telemetry: what the machines of a run do, a line every ten seconds per node, read by status, report and alerts.

A program beside the training of each node takes the measures; the training itself measures nothing. Not here: what a
step has measured (laststep/loops/measured.py), and checks of a node before it trains (laststep/attempt/preflight.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from laststep.config.setting import setting


@dataclass
class Telemetry:
    """The use of GPUs, CPUs, memory, network and disks, for status and report."""

    record: str = setting(
        "auto",
        "write it down every ten seconds, a process per node. auto: where there are GPUs (nvidia-ml-py reads them)",
        choices=("auto", "always", "never"),
    )
