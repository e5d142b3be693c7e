"""Checks of this node's GPUs: what the driver reports about each, and a product of matrices with a known result.

The driver is asked through nvidia-ml-py, an optional package. Without it, and where a GPU does not support a question,
these checks find nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from laststep.ranks.node_checks import Finding
from laststep.say import counted

if TYPE_CHECKING:
    import torch

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
        yield from _check_count(nvml, wanted, visible)
        for name in _names(nvml, visible):
            try:
                yield from _check_gpu(nvml, _handle(nvml, name), name)
            except nvml.NVMLError_GpuIsLost:
                yield Finding(f"GPU {name}: gone from the bus", fatal=True)
            except nvml.NVMLError as error:
                yield Finding(f"GPU {name}: {error}", fatal=True)
    finally:
        nvml.nvmlShutdown()


def _names(nvml: Any, visible: str | None) -> list[str]:
    """The GPUs to ask about: an index or a UUID each. A slice of a GPU (MIG) has none of these properties."""
    names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
    return [name.strip() for name in names if name.strip() and not name.strip().startswith("MIG")]


def _check_count(nvml: Any, wanted: int, visible: str | None) -> Iterator[Finding]:
    count = nvml.nvmlDeviceGetCount()
    if visible is None and count < wanted:
        yield Finding(f"{counted(count, 'GPU')}, but the run needs {wanted}", fatal=True)


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


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
