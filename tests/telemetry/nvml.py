"""A stand-in for the module of nvidia-ml-py: GPUs that do what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As the package's."""


class Nvml:
    """The functions that telemetry asks, and what they return."""

    NVMLError = NVMLError
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self, count: int = 2) -> None:
        self.use = [90.0] * count
        self.energy_j = [1000.0] * count
        self.throttled = [0] * count
        self.nvlink_kib = 0
        self.lost: set[int] = set()
        self.lacks: set[str] = set()  # functions that these GPUs do not know

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # as in a package that is older

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.use)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.use):
            raise NVMLError("no such GPU")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        raise NVMLError(name)

    def _of(self, gpu: int, name: str, value: Any) -> Any:
        if gpu in self.lost or name in self.lacks:
            raise NVMLError(name)
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return self._of(gpu, "use", SimpleNamespace(gpu=self.use[gpu]))

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return self._of(gpu, "memory", SimpleNamespace(used=20e9, total=80e9))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> Any:
        return self._of(gpu, "power", 300_000 + 100_000 * gpu)

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> Any:
        return self._of(gpu, "temperature", 60)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> Any:
        return self._of(gpu, "reasons", self.throttled[gpu])

    def nvmlDeviceGetPcieThroughput(self, gpu: int, way: int) -> Any:
        return self._of(gpu, "pcie", 1500)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> Any:
        return self._of(gpu, "energy", 1000 * self.energy_j[gpu])

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: Any) -> Any:
        value = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.nvlink_kib))
        return self._of(gpu, "nvlink", [value for _ in fields])
