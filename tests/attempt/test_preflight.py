"""The preflight: a bad node is named in seconds, before it has cost an hour; a good one is never refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from laststep.attempt import preflight as preflight_module
from laststep.attempt.attempt import Attempt
from laststep.attempt.preflight import GB, MB, Finding, Preflight, check_device, check_host, checks_of
from laststep.config.config import Config
from laststep.ranks.fault import BadNode
from laststep.ranks.group import skewed_clocks
from laststep.ranks.process import Signals
from laststep.ranks.world import hostname
from laststep.records.attempt_record import read_ended_attempts
from laststep.rundir import RunDir
from tests.support.project import PROJECT
from tests.support.records import a_world
from tests.support.runs import config


class NVMLError(Exception):
    pass


class FakeNvml:
    """nvidia-ml-py on a node with two healthy GPUs; `broken` replaces what one of its functions returns or raises."""

    NVMLError = NVMLError
    NVMLError_GpuIsLost = type("NVMLError_GpuIsLost", (NVMLError,), {})
    NVMLError_LibraryNotFound = type("NVMLError_LibraryNotFound", (NVMLError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, **broken: Any) -> None:
        self.asked: list[Any] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Callable[..., Any]:
        healthy = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetHandleByUUID": "gpu",
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (3, 0, 0, 0),
            "nvmlDeviceGetFieldValues": [value(0)],
            "nvmlDeviceGetCurrentClocksEventReasons": 0x5,  # idle, and a power cap
        }
        if name not in healthy or self._broken.get(name) == "missing":
            raise AttributeError(name)

        def function(*words: Any) -> Any:
            self.asked.append((name, *words))
            result = self._broken.get(name, healthy[name])
            if isinstance(result, Exception):
                raise result
            return result

        return function


def value(number: int, error: int = 0) -> Any:
    return SimpleNamespace(nvmlReturn=error, value=SimpleNamespace(uiVal=number))


def test_healthy_gpus() -> None:
    """Also with an older package, on GPUs that cannot answer, and without a driver of this maker."""
    nvml = FakeNvml()
    assert list(preflight_module.check_gpus(nvml, 2, None)) == []
    assert nvml.asked[-1] == ("nvmlShutdown",)
    questions = ("TotalEccErrors", "RemappedRows", "FieldValues", "CurrentClocksEventReasons")
    old = FakeNvml(**{f"nvmlDeviceGet{name}": FakeNvml.NVMLError_NotSupported() for name in questions})
    assert list(preflight_module.check_gpus(old, 2, None)) == []
    older = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons="missing", nvmlDeviceGetRemappedRows="missing")
    assert list(preflight_module.check_gpus(older, 2, None)) == []
    assert list(preflight_module.check_gpus(FakeNvml(nvmlInit=FakeNvml.NVMLError_LibraryNotFound()), 2, None)) == []
    unknown = FakeNvml(nvmlDeviceGetFieldValues=[value(1, error=3)])
    assert list(preflight_module.check_gpus(unknown, 2, None)) == [], "the driver does not know this field"


def test_the_gpus_of_this_job() -> None:
    """On a node that is shared, the others' GPUs are none of our business."""
    nvml = FakeNvml()
    assert list(preflight_module.check_gpus(nvml, 4, "1,GPU-12ab,MIG-77")) == []
    handles = [call for call in nvml.asked if call[0].startswith("nvmlDeviceGetHandle")]
    assert handles == [("nvmlDeviceGetHandleByIndex", 1), ("nvmlDeviceGetHandleByUUID", "GPU-12ab")]


@pytest.mark.parametrize(
    ("broken", "text", "fatal"),
    [
        ({"nvmlInit": NVMLError("Driver/library version mismatch")}, "the GPU driver does not work: Driver/lib", True),
        ({"nvmlDeviceGetCount": 1}, "1 GPU, but the run needs 2", True),
        ({"nvmlDeviceGetHandleByIndex": FakeNvml.NVMLError_GpuIsLost()}, "GPU 0: gone from the bus", True),
        ({"nvmlDeviceGetRemappedRows": FakeNvml.NVMLError_GpuIsLost()}, "GPU 0: gone from the bus", True),
        ({"nvmlDeviceGetHandleByIndex": NVMLError("Not Found")}, "GPU 0: Not Found", True),
        ({"nvmlDeviceGetRemappedRows": (0, 9, 1, 1)}, "GPU 0: its memory has no spare rows left", True),
        ({"nvmlDeviceGetRemappedRows": (0, 9, 1, 0)}, "GPU 0: rows of its memory are broken. The GPU works;", False),
        ({"nvmlDeviceGetFieldValues": [value(1)]}, "GPU 0: the driver asks for a reset", True),
        ({"nvmlDeviceGetFieldValues": [value(2)]}, "GPU 0: the driver asks for a reboot of the node", True),
        ({"nvmlDeviceGetFieldValues": [value(3)]}, "GPU 0: the driver asks for an end of all traffic betw", True),
        ({"nvmlDeviceGetFieldValues": [value(4)]}, "GPU 0: the driver asks for a reset, once its work is d", False),
        ({"nvmlDeviceGetFieldValues": [value(99)]}, "GPU 0: the driver asks for recovery action 99", False),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x8C}, "GPU 0: throttled (hardware slowdown, power brake)", False),
    ],
)
def test_bad_gpus(broken: dict[str, Any], text: str, fatal: bool) -> None:
    """What would make a step wrong, or end it, fails the node; what only makes it slow is a warning."""
    found = next(preflight_module.check_gpus(FakeNvml(**broken), 2, None))
    assert found.text.startswith(text) and found.fatal == fatal


def test_uncorrectable_errors_refuse_no_gpu() -> None:
    """They count since the driver was loaded, which may be months ago. An H100 has replaced such a row, or will at its
    next reset, and until then keeps off it: refusing the GPU would waste the whole node."""
    replaced = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetRemappedRows": (0, 1, 0, 0)}
    assert list(preflight_module.check_gpus(FakeNvml(**replaced), 1, "0")) == []
    waits = {**replaced, "nvmlDeviceGetRemappedRows": (0, 1, 1, 0), "nvmlDeviceGetFieldValues": [value(4)]}
    (found,) = preflight_module.check_gpus(FakeNvml(**waits), 1, "0")
    assert found == Finding(
        "GPU 0: rows of its memory are broken. The GPU works; a reset will finish their replacement", fatal=False
    )
    older = {"nvmlDeviceGetTotalEccErrors": 1, "nvmlDeviceGetRemappedRows": FakeNvml.NVMLError_NotSupported()}
    (found,) = preflight_module.check_gpus(FakeNvml(**older), 1, "0")
    assert found == Finding("GPU 0: 1 uncorrectable ECC error since its driver was loaded", fatal=False)


def test_a_reset_that_is_due_refuses_the_gpu_whatever_its_rows() -> None:
    """Both may hold at once: the one that leaves the GPU unusable must not hide behind the other."""
    both = {"nvmlDeviceGetRemappedRows": (0, 1, 1, 0), "nvmlDeviceGetFieldValues": [value(1)]}
    findings = list(preflight_module.check_gpus(FakeNvml(**both), 1, "0"))
    assert [found.fatal for found in findings] == [False, True]


def test_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that computes wrongly ruins a run silently, and its other checks may all pass."""
    cpu = torch.device("cpu")
    assert preflight_module.product_error(cpu) is None
    before = torch.Tensor.__matmul__

    def one_bit_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = before(left, right)
        if product.dim() == 2:
            product[17, 4] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", one_bit_wrong)
    assert preflight_module.product_error(cpu) == "a product of matrices is wrong in 1 row of 512"
    with pytest.raises(BadNode, match=f"{hostname()}: preflight: cpu: a product"):
        check_device(cpu, Mock())


def test_a_gpu_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits in the driver. The other ranks must not wait for it until the hang timeout."""
    reported = threading.Event()
    watchdog = Mock()
    watchdog.report.side_effect = lambda fault: reported.set()
    monkeypatch.setattr(preflight_module, "DEADLINE_S", 0.05)
    monkeypatch.setattr(preflight_module, "product_error", lambda device: None if reported.wait(20) else "not reported")
    check_device(torch.device("cpu"), watchdog)
    (fault,) = watchdog.report.call_args.args
    assert (fault.reason, fault.blames) == ("hung", hostname())
    assert "cpu has not multiplied two matrices" in fault.text


def room(**free: tuple[int, int]) -> preflight_module.Room:
    """A statvfs: free bytes and free inodes of a folder, by the last part of its path; plenty elsewhere."""

    def statvfs(folder: str) -> Any:
        bytes_, inodes = free.get(Path(folder).name, (100 * GB, 10**6))
        if bytes_ < 0:
            raise OSError(116, "Stale file handle")
        return SimpleNamespace(f_bavail=bytes_ // 4096, f_frsize=4096, f_files=10**6, f_favail=inodes)

    return statvfs


def found(tmp_path: Path, available: int = 64 * GB, **free: tuple[int, int]) -> list[Finding]:
    """What check_host finds on a node of four ranks."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    return list(check_host(4, "/scratch/runs", room(**free), str(tmp_path / "meminfo")))


def test_memory_and_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk fails the node; little room is a warning. The run's disk is shared: no node is to blame for it."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/local/tmp")
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/dev/shm")
    assert found(tmp_path) == []
    assert found(tmp_path, shm=(0, 9)) == [Finding("/dev/shm: full", fatal=True)]
    assert found(tmp_path, shm=(20 * MB, 9)) == [Finding("/dev/shm: only 20 MB free", fatal=False)]
    assert found(tmp_path, tmp=(9 * GB, 0)) == [Finding("TMPDIR=/local/tmp: no free inode", fatal=True)]
    assert found(tmp_path, tmp=(-1, 0)) == [Finding("TMPDIR=/local/tmp: Stale file handle", fatal=True)]
    assert found(tmp_path, runs=(0, 9)) == [Finding("launch.root=/scratch/runs: full", fatal=False)]
    assert found(tmp_path, available=3 * GB) == [Finding("3.0 GB of memory available for 4 ranks", fatal=False)]
    assert found(tmp_path, available=GB // 4) == [Finding("250 MB of memory available for 4 ranks", fatal=True)]


def test_clocks() -> None:
    """Only what is certain: ranks register at different times, and rank 0 reads them all later."""
    hosts = ["n1", "n1", "n2", "n3", "n4"]
    assert skewed_clocks(hosts, [100.0, 101.0, 102.0, 130.0, 95.0], now=130.0) == []
    assert skewed_clocks(hosts, [100.0, 101.0, 102.0, 190.0, 60.0], now=130.0) == [
        "n3: its clock is 60 s ahead of that of n1",
        "n4: its clock is 40 s behind that of n1",
    ]


def test_which_rank_checks_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank of each node, and the driver only where GPUs are asked for: a run on CPUs must not wait for it."""

    def asked(*words: str) -> list[str]:
        return [what for what, _ in checks_of(Config.load(None, words), a_world())]

    assert asked() == ["its memory or disks"]
    assert asked("launch.gpus_per_node=2") == ["its memory or disks", "the GPU driver"]
    assert asked("device=cuda") == ["its memory or disks", "the GPU driver"]
    assert not list(preflight_module.check_gpus(None, 8, None)), "nvidia-ml-py is not installed"
    monkeypatch.setattr(preflight_module, "checks_of", lambda *_: pytest.fail("another rank checks this node"))
    Preflight.of(Config.load(None, ["launch.preflight=false"]), a_world()).wait()
    Preflight.of(Config.load(None), a_world(rank=1, size=2)).wait()


def test_warnings_and_failures(capfd: pytest.CaptureFixture[str]) -> None:
    """All reasons at once: a node that is repaired for one of them would fail again. A check that breaks refuses no
    node."""

    def breaks() -> Iterator[Finding]:
        yield Finding("slow", fatal=False)
        raise ValueError("no such field")

    Preflight([("the driver", breaks)]).wait()
    said = capfd.readouterr().out
    assert f"WARNING: {hostname()}: slow" in said
    assert "preflight could not ask the driver: ValueError: no such field" in said
    two = [Finding("GPU 0: gone", fatal=True), Finding("full", fatal=True)]
    with pytest.raises(BadNode, match=f"^{hostname()}: preflight: GPU 0: gone; full$"):
        Preflight([("the driver", lambda: two)]).wait()


def test_a_check_that_hangs() -> None:
    """A stuck driver must not hang the start: nothing would be known but that the ranks did not meet."""
    forever = threading.Event()
    preflight = Preflight([("the GPU driver", lambda: [] * forever.wait(20))], deadline_s=0.05)
    with pytest.raises(BadNode, match="no answer from the GPU driver within 0 s"):
        preflight.wait()
    forever.set()


def test_a_bad_node_is_blamed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names it, the record blames it, and the run continues: under Slurm or a launcher that restarts its
    ranks, an error of the node must not end it."""
    monkeypatch.setattr(preflight_module, "check_host", lambda *_: [Finding("/dev/shm: full", fatal=True)])
    small = config(root, "bad-node", 1, ())
    run = RunDir(root / "bad-node")
    run.path.mkdir()
    small.save(run.config)
    world = a_world(supervised=True)
    signals = cast(Signals, SimpleNamespace(first=None, first_at=None, received=[], requeue=None))
    with pytest.raises(SystemExit):
        Attempt(small, run, world, signals).run()
    (record,) = read_ended_attempts(run.attempts)
    assert (record["reason"], record["blamed"], record["requeue"]) == ("failed", [hostname()], True)
    assert record["error"] == f"rank 0 on {world.host_of(0)} failed:\n{hostname()}: preflight: /dev/shm: full"


def test_torch_is_imported_late() -> None:
    """Else there would be no import for the preflight to run beside, nor for a signal to arrive in, and rank 0 would
    take the run's folder seconds later."""
    code = "import sys, laststep.attempt.attempt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
