"""Preflight: each node checks itself while torch is imported, so that a bad node fails in seconds and by name.

The first rank of each node asks the driver about the GPUs and looks at memory and disks, in a thread; each rank checks
a product on its own GPU once it has its device. A node that fails is a `BadNode`, anything that need not stop the run a
warning. `doctor --nodes` runs the same checks. Importing this module does not import torch.

The driver is asked through nvidia-ml-py, an optional package. Without it, and where a GPU does not support a question,
these checks find nothing.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.config.config import Config
from laststep.ranks.fault import BadNode, Fault
from laststep.ranks.process import Alarm
from laststep.ranks.watchdog import Watchdog
from laststep.ranks.world import World, hostname
from laststep.say import counted, say

if TYPE_CHECKING:
    import torch


MB, GB = 10**6, 10**9
SHARED_MEMORY = "/dev/shm"  # loader processes and NCCL exchange data there
FULL = 1 * MB  # less room than this is none
LITTLE = {SHARED_MEMORY: 64 * MB, "TMPDIR": 100 * MB, "launch.root": 1 * GB}
LEAST_MEMORY, LITTLE_MEMORY = 100 * MB, 1 * GB  # of each rank
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


def _size(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.0f} MB"


EDGE = 512  # of the matrices
# What the driver asks for, by the value of NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (nvmlDeviceGpuRecoveryAction_t), and
# whether the GPU is unusable until then. man nvidia-smi, "GPU Recovery Action": a drain and reset is for rows of memory
# that wait to be replaced, and programs may start on the GPU before it.
RECOVERY = {
    1: ("a reset", True),
    2: ("a reboot of the node", True),
    3: ("an end of all traffic between GPUs", True),
    4: ("a reset, once its work is done", False),
    5: ("a recovery of its IMEX domain", False),
    6: ("a reset of its bus", True),
    7: ("a reboot of the node", True),
}
# Bits of the reasons for lower clocks. A power cap, which many sites set, is none of them.
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


def load_nvml() -> Any:
    """The module of nvidia-ml-py; None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def check_gpus(nvml: Any, wanted: int, visible: str | None) -> Iterator[Finding]:
    """Ask the driver about the GPUs of this process: those that CUDA_VISIBLE_DEVICES (`visible`) names, else all, of
    which there should be `wanted`. `nvml` is what `load_nvml` returns."""
    if nvml is None:
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:  # GPUs of another maker
        return
    except nvml.NVMLError as error:
        yield Finding(f"the GPU driver does not work: {error}", fatal=True)
        return
    try:
        count = nvml.nvmlDeviceGetCount()
        if visible is None and count < wanted:
            yield Finding(f"{counted(count, 'GPU')}, but the run needs {wanted}", fatal=True)
        # An index or a UUID each. A slice of a GPU (MIG) has none of these properties.
        names = [str(index) for index in range(count)] if visible is None else visible.split(",")
        for name in [name.strip() for name in names if name.strip() and not name.strip().startswith("MIG")]:
            handle = nvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
            try:
                gpu = handle(int(name) if name.isdecimal() else name)
                yield from _check_gpu(nvml, gpu, name)
            except nvml.NVMLError_GpuIsLost:
                yield Finding(f"GPU {name}: gone from the bus", fatal=True)
            except nvml.NVMLError as error:
                yield Finding(f"GPU {name}: {error}", fatal=True)
    finally:
        nvml.nvmlShutdown()


def _check_gpu(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    """The properties of one GPU. Raises NVMLError when the GPU does not answer."""

    def ask(function: str, *words: Any) -> Any:
        """What a function of nvml returns; None where this GPU, driver or package does not have it."""
        known: Callable[..., Any] | None = getattr(nvml, function, None)
        try:
            return known(gpu, *words) if known else None
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None

    # Uncorrectable errors are no reason to refuse a GPU, which no longer uses the memory that had them: what counts is
    # whether its rows could be replaced. GPUs before Ampere cannot replace rows.
    remapped = ask("nvmlDeviceGetRemappedRows")
    *_, pending, failed = remapped or (0, 0)
    if failed:
        yield Finding(f"GPU {name}: its memory has no spare rows left to replace broken ones", fatal=True)
    elif pending:
        text = f"GPU {name}: rows of its memory are broken. The GPU works; a reset will finish their replacement"
        yield Finding(text, fatal=False)
    since_load = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if remapped is None and (errors := ask("nvmlDeviceGetTotalEccErrors", *since_load)):
        text = f"GPU {name}: {counted(errors, 'uncorrectable ECC error')} since its driver was loaded"
        yield Finding(text, fatal=False)
    action = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    for value in (ask("nvmlDeviceGetFieldValues", [action]) or []) if action is not None else []:
        if value.nvmlReturn == 0 and value.value.uiVal:
            needs, unusable = RECOVERY.get(value.value.uiVal, (f"recovery action {value.value.uiVal}", False))
            if unusable or not pending:  # else said above
                yield Finding(f"GPU {name}: the driver asks for {needs}", fatal=unusable)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the older name
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    if slowed := [why for bit, why in SLOWDOWNS.items() if reasons & bit]:
        yield Finding(f"GPU {name}: throttled ({', '.join(slowed)})", fatal=False)


def product_error(device: torch.device) -> str | None:
    """Multiply two matrices of small integers, and compare the result with what the CPU computes exactly: A(Bx) must
    be (AB)x (Freivalds). None when it is."""
    import torch

    numbers = torch.arange(EDGE * EDGE, dtype=torch.float32).reshape(EDGE, EDGE)
    left, right = numbers % 5 - 2, numbers % 7 - 3  # exact in TF32 too, and so are all sums
    vector = torch.arange(EDGE, dtype=torch.float64) % 11 + 1
    product = (left.to(device) @ right.to(device)).cpu().double()
    expected = left.double() @ (right.double() @ vector)
    wrong = int((product @ vector != expected).sum())
    return f"a product of matrices is wrong in {counted(wrong, 'row')} of {EDGE}" if wrong else None


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
    checks: list[Check] = [("its memory or disks", lambda: check_host(world.local_size, root))]
    wanted = config.launch.gpus or world.local_size * (config.device == "cuda")
    if wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        checks.append(("the GPU driver", lambda: check_gpus(load_nvml(), wanted, visible)))
    return checks


def check_device(device: torch.device, watchdog: Watchdog) -> None:
    """Check a product on this rank's GPU; raises BadNode. A GPU that hangs is reported to the other ranks."""
    host = hostname()
    stuck = Fault(
        "hung", f"{host}: preflight: {device} has not multiplied two matrices in {DEADLINE_S:.0f} s", blames=host
    )
    with Alarm(DEADLINE_S, lambda: watchdog.report(stuck)):
        error = product_error(device)
    if error:
        raise BadNode(host, f"preflight: {device}: {error}")
