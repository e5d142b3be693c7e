"""The section `telemetry` of the configuration."""

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
