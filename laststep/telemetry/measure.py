"""The measures of one node at one moment: its GPUs, the cgroup of its job, its network and its disks.

Sources: NVML (nvidia-ml-py) for GPUs; man 7 cgroups, man 5 proc. What a machine does not say is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MB, GB = 10**6, 10**9
SECTOR = 512  # bytes, of /proc/diskstats, whatever the disk has
INFINIBAND_WORD = 4  # bytes, of port_rcv_data and port_xmit_data
# Bits of NVML's reasons for lower clocks. An idle GPU has a reason too, which is none of these.
THROTTLED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
# A disk, not a part of one, nor a file or memory that looks like one.
DISK = re.compile(r"(sd[a-z]+|hd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: the GPU, its driver or the package does not say."""

    use: float | None = None  # percent of the time in which a kernel ran
    memory_gb: float | None = None
    memory_total_gb: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    pcie_mb_s: float | None = None  # both ways
    nvlink_mb: float | None = None  # both ways, since the driver was loaded
    energy_j: float | None = None  # since the driver was loaded


class Gpus:
    """The GPUs of a job on this node: those that CUDA_VISIBLE_DEVICES (`visible`) names, else all. `nvml` is the module
    of nvidia-ml-py, or None."""

    def __init__(self, nvml: Any, visible: str | None) -> None:
        self._nvml, self._handles = nvml, list[Any]()
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            every = map(str, range(nvml.nvmlDeviceGetCount()))
            names = every if visible is None else visible.split(",")
            for name in filter(None, map(str.strip, names)):
                find = nvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
                with suppress(nvml.NVMLError):  # such as a slice of a GPU (MIG)
                    self._handles.append(find(int(name) if name.isdecimal() else name))
        except nvml.NVMLError:  # no driver here
            self._handles = []

    def read(self) -> list[Gpu]:
        """The GPUs now; one that is gone from the bus has no values."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, gpu: Any) -> Gpu:
        nvml = self._nvml

        def ask(name: str, *words: Any) -> Any:
            function: Callable[..., Any] | None = getattr(nvml, name, None)
            try:
                return function(gpu, *words) if function else None
            except nvml.NVMLError:
                return None

        def scaled(value: float | None, by: float) -> float | None:
            return None if value is None else value / by

        use, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the older name
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        pcie = [ask("nvmlDeviceGetPcieThroughput", way) for way in (0, 1)]  # sent, received: KB/s
        return Gpu(
            use=None if use is None else float(use.gpu),
            memory_gb=None if memory is None else memory.used / GB,
            memory_total_gb=None if memory is None else memory.total / GB,
            power_w=scaled(ask("nvmlDeviceGetPowerUsage"), 1e3),
            temperature_c=ask("nvmlDeviceGetTemperature", 0),
            throttled=tuple(why for bit, why in THROTTLED.items() if reasons & bit),
            pcie_mb_s=None if None in pcie else sum(pcie) / 1e3,
            nvlink_mb=self._nvlink_mb(ask),
            energy_j=scaled(ask("nvmlDeviceGetTotalEnergyConsumption"), 1e3),
        )

    def _nvlink_mb(self, ask: Callable[..., Any]) -> float | None:
        """What has crossed all links of a GPU; the driver counts KiB."""
        names = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
        fields = [(getattr(self._nvml, name), 0xFFFFFFFF) for name in names if hasattr(self._nvml, name)]
        values = ask("nvmlDeviceGetFieldValues", fields) if fields else None
        if not values or any(value.nvmlReturn for value in values):
            return None
        return float(sum(value.value.ullVal for value in values) * 1024 / MB)


@dataclass(frozen=True)
class Host:
    """A node's counters, in seconds and bytes since some moment, and its memory."""

    cpu_s: float | None = None  # of the job
    memory: float | None = None  # bytes, of the job, without files that the kernel may drop
    memory_limit: float | None = None  # bytes; None: no limit is known
    network: dict[str, float] = field(default_factory=dict)  # bytes by "rx" and "tx", of the node
    disk: dict[str, float] = field(default_factory=dict)  # bytes by "read" and "write", of the node's own disks


def read_host(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Host:
    """The counters now."""
    cpu_s, memory, limit = _of_cgroup(proc, sys)
    return Host(cpu_s, memory, limit, _network(proc, sys), _disk(proc))


def _of_cgroup(proc: Path, sys: Path) -> tuple[float | None, float | None, float | None]:
    """CPU seconds, memory and its limit of the job's cgroup, of the second or first version; of the whole machine where
    this process is in none."""
    root = sys / "fs" / "cgroup"
    paths: dict[str, str] = {}
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # Of a job of Slurm all steps count.
        path = re.sub(r"(/job_\d+)/.*", r"\1", path)
        paths |= dict.fromkeys(controllers.split(",") if controllers else ["unified"], path.lstrip("/"))
    second = root / paths.get("unified", "")
    cpu = _fields(second / "cpu.stat").get("usage_usec")
    cpu_s = None if cpu is None else cpu / 1e6
    memory, limit = _number(second / "memory.current"), _number(second / "memory.max")
    files = _fields(second / "memory.stat").get("inactive_file", 0.0)
    if memory is None and "memory" in paths:
        first = root / "memory" / paths["memory"]
        memory, limit = _number(first / "memory.usage_in_bytes"), _number(first / "memory.limit_in_bytes")
        files = _fields(first / "memory.stat").get("total_inactive_file", 0.0)
    if cpu_s is None and "cpuacct" in paths:
        used = _number(root / "cpuacct" / paths["cpuacct"] / "cpuacct.usage")
        cpu_s = None if used is None else used / 1e9
    machine = _fields(proc / "meminfo")
    total = 1024 * machine.get("MemTotal:", 0.0)
    if memory is None and "MemAvailable:" in machine:
        memory, files = total - 1024 * machine["MemAvailable:"], 0.0
    if limit is None or (total and limit > total):  # "max", or a number without meaning
        limit = total or None
    if cpu_s is None and (times := _text(proc / "stat").partition("\n")[0].split()[1:]):
        busy = sum(map(int, times[:8])) - int(times[3]) - int(times[4])  # without idle and iowait
        cpu_s = busy / os.sysconf("SC_CLK_TCK")
    return cpu_s, None if memory is None else max(0.0, memory - files), limit


def _network(proc: Path, sys: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    for line in _text(proc / "net" / "dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != "lo" and len(numbers := rest.split()) >= 9:
            _add(total, {"rx": int(numbers[0]), "tx": int(numbers[8])})
    for counters in (sys / "class" / "infiniband").glob("*/ports/*/counters"):
        for way, file in (("rx", "port_rcv_data"), ("tx", "port_xmit_data")):
            _add(total, {way: INFINIBAND_WORD * (_number(counters / file) or 0.0)})
    return total


def _disk(proc: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    for line in _text(proc / "diskstats").splitlines():
        words = line.split()
        if len(words) > 9 and DISK.match(words[2]):
            _add(total, {"read": SECTOR * int(words[5]), "write": SECTOR * int(words[9])})
    return total


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _number(path: Path) -> float | None:
    with suppress(ValueError):
        return float(_text(path))
    return None


def _fields(path: Path) -> dict[str, float]:
    """A file of lines `name value [unit]`."""
    words = (line.split() for line in _text(path).splitlines())
    return {each[0]: float(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}
