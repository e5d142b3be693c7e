"""The device of a rank: choosing it, making its arithmetic reproducible, and reading from it without waiting.

A GPU does what the CPU queues, but up to two steps later, and may stop at a collective that waits for a dead rank.
Once a CUDA stream's queue of about 1,024 kernels is full, the next launch waits in C, and the driver holds its lock
meanwhile: then every other call to it waits too, from any thread, even one that only asks about an event (pytorch
issues 110449 and 130844). Therefore the device writes its progress into host memory (`Mark`). `DeviceThread` reads its
memory; where that thread waits for the lock, another process does (`MemoryReader`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laststep import compat
from laststep.compat.cuda_driver import CudaDriver, MemoryReader
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks import nccl
from laststep.ranks.fault import DeviceSilent
from laststep.ranks.process import start_thread
from laststep.ranks.world import World, hostname
from laststep.say import counted, say

DRIVER = Path("/sys/module/nvidia/version")  # such as 580.65.06; absent where another driver is in use
NCCL_GRAPH = "NCCL graph"  # in what `describe_numerics` returns
FIRST_WITH_TF32 = (8, 0)  # compute capability
SLICE = "MIG-"  # begins the UUID of a slice of a GPU


def set_up_device(config: Config, world: World) -> torch.device:
    """Choose this rank's device and make its arithmetic as reproducible as the configuration asks. Raises ConfigError
    when this machine lacks what the configuration asks for."""
    device = _choose_device(config, world)
    _check_precision(config.train.precision, device)
    if config.train.cuda_graphs and device.type == "cpu":
        raise ConfigError("train.cuda_graphs=true: only GPUs have CUDA graphs, but this rank uses the CPU; remove it")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        compat.draw_from_default_generators()
        with warnings.catch_warnings():
            # torch 2.9 and later announce that these attributes will be replaced. But after the new ones were set,
            # torch raises an error where anything reads the old ones, as its own compiler does. The old ones set both.
            warnings.simplefilter("ignore", UserWarning)
            torch.backends.cuda.matmul.allow_tf32 = config.train.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = config.train.precision == "tf32"  # torch's own default is True
        torch.backends.cudnn.benchmark = not config.train.deterministic
    else:
        keep_freed_memory()
    if is_deterministic(config, device):
        compat.compile_without_timing()
        # cuBLAS reads this when it starts. Without it, cuBLAS may split a product differently from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # an operator without a deterministic kernel raises RuntimeError
        # By default this also fills each new tensor before it is computed. No result depends on that.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if "OMP_NUM_THREADS" not in os.environ:
        # A sum's last bits depend on the number of threads, so it must be the same in every attempt.
        cores = len(os.sched_getaffinity(0)) // world.local_size
        granted = int(os.environ.get("SLURM_CPUS_PER_TASK", config.launch.cpus_per_task))
        # With train.shares not even on the number of ranks on this machine.
        is_granted = world.launcher in ("submitit-slurm", "srun") or config.train.shares is not None
        torch.set_num_threads(granted if is_granted else max(1, cores))
    return device


def is_deterministic(config: Config, device: torch.device) -> bool:
    """Whether torch must refuse, on this device, an operator that may add in another order each time."""
    return config.train.deterministic and device.type == "cuda"


def describe_numerics(
    device: torch.device,
    world: World,
    backend: str,
    at_any_size: bool = False,
    sharding: str = "none",
    nccl_graph: str | None = None,
) -> dict[str, str | int]:
    """Everything that the last bits of a step depend on. With `at_any_size` (train.shares) neither the layout nor
    NCCL's graph is part of it, as NCCL adds nothing, and full and hybrid sharding are the same."""
    if at_any_size and sharding != "none":
        sharding = "full or hybrid"
    if device.type != "cuda":
        # Torch uses different loops on a processor with wider vectors.
        processor = f"cpu with {torch.backends.cpu.get_cpu_capability()}"
        shards: dict[str, str | int] = {} if sharding == "none" else {"sharding": sharding}
        return {"torch": str(torch.__version__), "device": processor, "threads": torch.get_num_threads(), **shards}
    layout = f"{counted(world.nodes, 'node')} x {counted(world.local_size, 'GPU')}"
    found: dict[str, str | int | None] = {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device),
        "driver": DRIVER.read_text().strip() if DRIVER.exists() else None,
        "cuDNN": torch.backends.cudnn.version(),
        "TF32": "on" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "off",
        "layout": None if at_any_size else layout,
        "sharding": None if sharding == "none" else sharding,
        **(nccl.describe() if backend == "nccl" and world.size > 1 and not at_any_size else {}),
        NCCL_GRAPH: None if at_any_size else nccl_graph,
    }
    return {name: value for name, value in found.items() if value is not None}


def changed_numerics(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> str | None:
    """One line that names what has changed between two results of `describe_numerics`; None when nothing has."""
    replicated = {"sharding": "none"}  # which is not written down
    before, now = replicated | dict(before), replicated | dict(now)
    changed = {name: old for name, old in before.items() if now.get(name, old) != old}
    if not changed:
        return None
    changes = ", ".join(f"{name} {now[name]} (was {old})" for name, old in changed.items())
    fix = f"; set OMP_NUM_THREADS={before['threads']} to keep them" if list(changed) == ["threads"] else ""
    if NCCL_GRAPH in changed:
        fix = "; with train.shares they would not depend on NCCL's graph"
    return f"resuming with {changes}: the last bits may differ{fix}"


def choose_backend(config: Config, device: torch.device) -> str:
    """The backend of the ranks' collectives, nccl or gloo. Raises ConfigError when it is not available here."""
    backend = config.launch.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        why = "torch finds no GPU on this machine" if not torch.cuda.device_count() else "this rank uses the CPU"
        raise ConfigError(f"launch.backend=nccl: needs a GPU for each rank, but {why}; use gloo")
    if not dist.is_backend_available(backend):
        other = "gloo" if backend == "nccl" else "nccl"
        raise ConfigError(f"launch.backend={backend}: torch {torch.__version__} is built without it; use {other}")
    return backend


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, or of a slice of one (MIG), as `nvidia-smi -L` shows it. Empty for a CPU, if the driver does
    not say, or if NCCL_HOSTID is set: by it NCCL tells on which host a rank is, and lets ranks of different hosts use
    one GPU."""
    if device.type != "cuda" or "NCCL_HOSTID" in os.environ:
        return ""
    # It names a slice by its UUID. The one that CUDA itself reports may be that of the whole GPU.
    asked_for = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device.index or 0 :][:1]
    if asked_for and asked_for[0].strip().startswith(SLICE):
        return asked_for[0].strip()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"GPU-{uuid}" if uuid.strip("0-") else ""


def _check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError for arithmetic that the device lacks: it would be emulated, or silently replaced by another."""
    if device.type == "cpu":
        if precision == "tf32":
            raise ConfigError("train.precision=tf32: only GPUs have TF32, but this rank uses the CPU; use fp32 or bf16")
        return
    lacks_bf16 = precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if lacks_bf16 or (precision == "tf32" and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"train.precision={precision}: {name} has no {precision} arithmetic; use fp16 or fp32")


def _choose_device(config: Config, world: World) -> torch.device:
    count = torch.cuda.device_count()
    wanted = config.device
    if wanted == "auto":
        # On a node that does not enforce limits, a CPU job sees the GPUs of other jobs too. CUDA_VISIBLE_DEVICES names
        # those that Slurm gave to this job.
        granted = not world.on_slurm or "CUDA_VISIBLE_DEVICES" in os.environ
        wanted = "cuda" if config.launch.gpus or (count and granted) else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not count:
        given = ", ".join(filter(None, (f"device={config.device}", config.launch.gpus_key)))
        raise ConfigError(f"{given}: torch finds no GPU on this machine; use device=cpu")
    if count == 1 and (world.local_size == 1 or world.on_slurm):  # gpus_per_task=1 hides the other ranks' GPUs
        return torch.device("cuda", 0)
    if world.local_size < count and world.local_rank == 0 and world.on_slurm:
        idle = f"{counted(count, 'GPU')}, but {counted(world.local_size, 'rank')} of this run"
        say(f"WARNING: {hostname()} has {idle}: the other GPUs stay idle; set launch.gpus_per_node={count} to use them")
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} ranks on this node, but it has {counted(count, 'GPU')}: "
            f"use --gpus-per-node {count} or device=cpu"
        )
    return torch.device("cuda", world.local_rank)


def start_copy_to_host(scalars: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Start copying scalars on one device to the CPU. Returns a function that waits for their values."""
    if not scalars or scalars[0].device.type != "cuda":  # one by one: in a tenth of the time of a stack of them
        values_now = [float(scalar) for scalar in scalars]
        return lambda: values_now
    tensor = torch.stack(list(scalars)).double()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def values() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return values


T = TypeVar("T")

NUMBERS: set[Any] = {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}


class Event:
    """A mark in the queue. That of a CPU is passed as soon as it is recorded; `CudaEvent` is that of a GPU."""

    _at = 0.0

    def record(self) -> None:
        """Put the mark at the end of the queue, and take it from where it was before."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Whether the device has passed the mark. Waits for nothing."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the device's time from this mark to another; it has passed both."""
        return 1000 * (end_event._at - self._at)


class DeviceQueue:
    """The queue of a CPU, where everything queued is done; `CudaQueue` is that of a GPU."""

    runs_ahead = False  # whether the CPU may be ahead of the device

    def event(self, asked: bool = True, waited: bool = True) -> Event:
        """A new mark. Only if it is `asked` may other threads query it; only if it is `waited` for may the thread that
        trains wait for it, or for a time that it measures."""
        return Event()

    def synchronize(self) -> None:
        """Wait until the device has done everything that is queued."""

    def beside(self) -> AbstractContextManager[None]:
        """Read the device's memory in this block, in any thread, without waiting for what is queued."""
        return contextlib.nullcontext()

    @property
    def takes_launches(self) -> bool:
        """Whether another thread than the one that trains can launch kernels, as far as is known."""
        return True

    def look(self, work: Callable[[], T]) -> T:
        """Do this, which only asks marks of this queue, and return what it returns. Raises DeviceSilent."""
        return work()

    def launch(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Do this `beside` the queue, for threads other than the one that trains, and return what it returns. Raises
        DeviceSilent when the device does not answer in time; see DeviceThread."""
        return work()

    def read(self, work: Callable[[], T]) -> T:
        """The same for what only reads the device's memory, which is possible in more cases."""
        return work()

    @property
    def blind_spot(self) -> str:
        """Why the device's memory cannot be read once its driver does not answer; empty if it can."""
        return ""

    def note_memory(self) -> None:
        """An update has been queued: the device's memory may be elsewhere than before."""

    def close(self) -> None:
        """Nothing is asked any more."""

    def host_buffer(self, count: int) -> Tensor:
        """`count` bytes of host memory that the device copies to directly; uint8."""
        return torch.empty(count, dtype=torch.uint8)  # takes no memory until it is used

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the CPU changes this tensor itself, ahead of the device."""
        return False


class ReadThrough(TorchFunctionMode):
    """In a block of this, the number in a scalar on the device is read through `buffer`, 8 bytes of pinned host memory.
    torch would take such memory from its cache, or, where that has none, from the driver."""

    def __init__(self, buffer: Tensor, device_type: str, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._buffer, self._device_type, self._synchronize = buffer, device_type, synchronize
        self._lock = threading.Lock()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides: called in place of each of torch's functions."""
        if func not in NUMBERS or type(args[0]) is not Tensor or args[0].device.type != self._device_type:
            return func(*args, **(kwargs or {}))
        if args[0].numel() != 1 or args[0].element_size() > len(self._buffer):
            return func(*args)  # which raises an error, or reads a complex number
        scalar = args[0].detach().reshape(1)
        with self._lock:
            number = self._buffer[: scalar.element_size()].view(scalar.dtype)
            number.copy_(scalar, non_blocking=True)
            self._synchronize()
            return func(number)


class Mark:
    """A number in pinned host memory, which the device writes once it comes to a place in its queue."""

    def __init__(self, driver: CudaDriver, cell: Tensor) -> None:
        """`cell` is that memory: int32, one element."""
        self._driver, self._cell, self._number = driver, cell.numpy(), 0
        self._address = cell.data_ptr()

    def put(self, stream: int) -> bool:
        """Put the mark at the end of this stream. False if this device has no such marks, or has failed."""
        self._number = self._number % 0x7FFFFFFF + 1
        return self._driver.write_number(stream, self._address, self._number)

    def is_reached(self) -> bool:
        """Whether the device has come there. Calls no driver."""
        return int(self._cell[0]) == self._number


class CudaEvent(Event):
    """A mark in a stream. Unlike torch's own, it does not hold Python's lock during a query."""

    def __init__(self, driver: CudaDriver | None, mark: Mark | None = None, waited: bool = True) -> None:
        """With a `mark` other threads may query the event, and if it is not `waited` for they do nothing else."""
        # blocking: a thread that waits for it sleeps
        self._event, self._driver = torch.cuda.Event(enable_timing=True, blocking=True), driver
        self._mark, self._is_recorded = mark, waited or mark is None

    def record(self) -> None:
        if self._is_recorded:
            self._event.record()
        if self._mark is not None:
            self._mark.put(torch.cuda.current_stream().cuda_stream)

    def query(self) -> bool:
        if self._mark is not None:
            return self._mark.is_reached()
        handle = self._event.cuda_event  # none before it is first recorded
        passed = self._driver.has_passed(handle) if self._driver is not None and handle else None
        return self._event.query() if passed is None else passed  # torch raises the driver's error, with its name

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end_event: CudaEvent) -> float:
        return self._event.elapsed_time(end_event._event)


class CudaQueue(DeviceQueue):
    """The stream of a GPU on which the rank trains. It is read on a second stream, which never waits for the first."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, CudaDriver.load()
        self._stream = torch.cuda.Stream(device)
        # While a collective hangs, new memory may wait for it. So what a rescue needs is held from now on, since torch
        # empties its caches whenever it records a CUDA graph.
        buffer = torch.empty(8, dtype=torch.uint8, pin_memory=True)
        self._reads = ReadThrough(buffer, "cuda", self.synchronize)
        with self.beside():
            self._held = torch.zeros(1, device=device)  # and with it the 2 MB around it, where hashes are computed
            self._held.item()  # makes the event with which torch marks a copy
        self._cells = torch.zeros(MARKS, dtype=torch.int32, pin_memory=True)
        self._free_cells = iter(range(MARKS))
        self._has_marks = self._driver is not None and self._can_mark(self._driver)
        self._memory = None if self._driver is None else MappedMemory(device, self._driver)
        self.note_memory()
        past = None if self._memory is None else DeviceThread(self._elsewhere)
        self.ways = Ways(DeviceThread(self.beside), past)

    def event(self, asked: bool = True, waited: bool = True) -> Event:
        cell = next(self._free_cells, None) if self._has_marks and asked else None
        if cell is None or self._driver is None:
            return CudaEvent(self._driver)
        return CudaEvent(self._driver, Mark(self._driver, self._cells[cell : cell + 1]), waited)

    def _can_mark(self, driver: CudaDriver) -> bool:
        mark = Mark(driver, self._cells[next(self._free_cells) :][:1])
        if not mark.put(torch.cuda.current_stream(self._device).cuda_stream):
            return False
        self.synchronize()
        return mark.is_reached()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)  # each thread has its own, at first the first GPU
        ignoring_captures = self._driver.ignoring_captures if self._driver else contextlib.nullcontext
        with ignoring_captures(), torch.cuda.stream(self._stream), self._reads:
            yield

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)  # now, while the driver answers
        assert self._memory is not None
        with self._memory:
            yield

    @property
    def takes_launches(self) -> bool:
        return not self.ways.is_direct_stuck

    def look(self, work: Callable[[], T]) -> T:
        return work() if self._has_marks else self.ways.direct.ask(work)

    def launch(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        return self.ways.direct.ask(work, timeout_s)

    def read(self, work: Callable[[], T]) -> T:
        return self.ways.read(work)

    @property
    def blind_spot(self) -> str:
        return "only the memory of CUDA's GPUs can be rescued" if self._memory is None else self._memory.lack

    def note_memory(self) -> None:
        if self._memory is not None:
            self._memory.note()

    def close(self) -> None:
        self.ways.close()
        if self._memory is not None:
            self._memory.close()

    def host_buffer(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.is_cpu


MARKS = 64  # more than a ring has
NOTED_EVERY_S = 5.0  # how often it is looked where torch's memory is
CHUNK_BYTES = 16 << 20
CHUNK_S = 30.0  # the first one waits until the other process has begun


class MappedMemory(TorchFunctionMode):
    """A device's memory as another process reads it. In a block of this, numbers and copies to the host come from
    there, and no driver is called; nothing may be computed on the device."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        super().__init__()
        self._device, self._driver = device, driver
        self._reader = MemoryReader(device.index or 0, CHUNK_BYTES)
        # Torch's segments of the device's memory, in order: start, end, handle. Replaced as a whole: a thread may read.
        self._segments: list[tuple[int, int, bytes]] = []
        self._noted_at, self._notes, self._known = -NOTED_EVERY_S, 0, (-1, -1)

    @property
    def lack(self) -> str:
        """Why no other process can read, as far as is known; empty if one can."""
        if self._driver.is_exclusive(self._device.index or 0):
            return "the GPU takes one process alone (compute mode EXCLUSIVE_PROCESS)"
        if not self._segments:
            return "torch's memory has no IPC handles, as with expandable_segments in PYTORCH_ALLOC_CONF"
        return ""

    def note(self) -> None:
        """In the thread that trains, after an update: note where torch's memory is, if that may have changed."""
        now = time.monotonic()
        if self._notes >= 3 and now < self._noted_at + NOTED_EVERY_S:  # the first steps allocate
            return
        self._noted_at, self._notes = now, self._notes + 1
        stats = torch.cuda.memory_stats(self._device)
        known = (stats.get("num_device_alloc", 0), stats.get("num_device_free", 0))
        if known == self._known:
            return
        found = []
        for segment in torch.cuda.memory_snapshot():
            start = segment["address"]
            if segment["device"] == (self._device.index or 0):
                # A segment that was freed and allocated anew has another handle: it is asked each time.
                handle = self._driver.handle_of(start)
                if handle is not None:
                    found.append((start, start + segment["total_size"], handle))
        self._segments, self._known = sorted(found), known

    def __enter__(self) -> MappedMemory:
        _here.is_past_the_driver = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _here.is_past_the_driver = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides: called in place of each of torch's functions."""
        kwargs = kwargs or {}
        if func in ON_HOST and self._is_there(args[0]):
            return func(self._on_host(args[0]), *args[1:], **kwargs)
        if func is Tensor.copy_ and self._is_there(args[1]) and not self._is_there(args[0]):
            into, source = args[:2]
            if into.dtype == source.dtype and into.is_contiguous() and source.is_contiguous():
                self._fetch(source.data_ptr(), into.view(-1).view(torch.uint8))
                return into
            return into.copy_(self._on_host(source))
        if func is Tensor.new_empty_strided and self._is_there(args[0]):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)

    @staticmethod
    def _is_there(tensor: Tensor) -> bool:
        """Whether a tensor is in the device's memory."""
        return tensor.is_cuda

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A copy with the same strides."""
        tensor = tensor.detach()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        content = torch.empty(span * tensor.element_size() if tensor.numel() else 0, dtype=torch.uint8)
        self._fetch(tensor.data_ptr(), content)
        return content.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _fetch(self, address: int, into: Tensor) -> None:
        """Copy the device's memory from `address` on into a row of bytes. Raises DeviceSilent."""
        for begin in range(0, len(into), CHUNK_BYTES):
            part = into[begin : begin + CHUNK_BYTES]
            start, handle = self._segment_of(address + begin, len(part))
            try:
                content = self._reader.read(handle, address + begin - start, len(part), CHUNK_S)
            except OSError as error:
                raise DeviceSilent(f"{NO_ANSWER}; {error}") from error
            part.copy_(torch.frombuffer(content, dtype=torch.uint8))

    def _segment_of(self, address: int, count: int) -> tuple[int, bytes]:
        segments = self._segments
        place = bisect_right(segments, address, key=lambda segment: segment[0]) - 1
        if place >= 0:
            start, stop, handle = segments[place]
            if address + count <= stop:
                return start, handle
        raise DeviceSilent(f"{NO_ANSWER}, and another process cannot map this memory")

    def close(self) -> None:
        """Read no more."""
        self._reader.close()


ON_HOST = NUMBERS | {Tensor.cpu, Tensor.tolist}
_here = threading.local()  # what the thread that asks is in


def await_copies(devices: Iterable[torch.device]) -> None:
    """Wait until what this thread has begun to copy from these devices to the host is there."""
    if not getattr(_here, "is_past_the_driver", False):  # else it is
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def is_due_to_capture(error: RuntimeError) -> bool:
    """Whether a call failed because a stream captures a graph. That says nothing about the device."""
    return "captur" in str(error)  # each of CUDA's errors 900 to 908 has the word


def open_queue(device: torch.device) -> DeviceQueue:
    """The queue of this device. Open it before the warm-up: nothing is allocated on the device later."""
    return CudaQueue(device) if device.type == "cuda" else DeviceQueue()


# How long the device may take for one answer. What legitimately keeps the driver's lock takes less: a kernel that is
# loaded, memory that is pinned. And after a SIGTERM there may be no more than twelve seconds left.
ANSWER_S = 5.0
START_S = 60.0
PAST_S = 60.0  # for one call past the driver: another process begins, and reads some 16 MB, or thousands of numbers
ROUND_S = 0.1  # silence is counted in rounds of this length, so not while the process is suspended


NO_ANSWER = (
    f"its device does not answer: its driver has not returned from a call for {ANSWER_S:.0f} s, as happens while "
    "another thread waits to launch a kernel into a full queue"
)


class DeviceThread:
    """A thread that has entered `beside` for good, see `DeviceQueue`, made while the device is sure to answer. Raises
    what entering raises, and DeviceSilent."""

    def __init__(self, beside: Callable[[], AbstractContextManager[None]]) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self._stuck: Future[Any] | None = None  # the call that did not return in time
        self._entered = ExitStack()
        self.thread = start_thread("beside", self._serve)
        self.ask(lambda: self._entered.enter_context(beside()), START_S)

    def ask(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Do this in the thread, one caller after another, and return what it returns. Raises what it raises, and
        DeviceSilent if it takes longer than `timeout_s` (by default ANSWER_S), or at once while an earlier call has not
        returned. Work that was given up may still be done later."""
        if threading.current_thread() is self.thread:
            return work()
        with self._one_at_a_time:
            if self.is_stuck:
                raise DeviceSilent(NO_ANSWER)
            call: Future[T] = Future()
            self._stuck = None
            self._calls.put((call, work))
            for _ in range(round((ANSWER_S if timeout_s is None else timeout_s) / ROUND_S)):
                if wait([call], ROUND_S).done:
                    return call.result()
            self._stuck = call
            raise DeviceSilent(NO_ANSWER)

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was given up has not returned."""
        stuck = self._stuck
        return stuck is not None and not stuck.done()

    def close(self) -> None:
        """End the thread, unless it is stuck."""
        self._calls.put(None)

    def _serve(self) -> None:
        with self._entered:
            while (asked := self._calls.get()) is not None:
                call, work = asked
                try:
                    call.set_result(work())
                except BaseException as error:
                    call.set_exception(error)
                del asked, call, work  # what they refer to must not live until the next one


class Ways:
    """Two ways to a device's memory: through the driver, and, where it does not answer, past it."""

    def __init__(self, direct: DeviceThread, past: DeviceThread | None) -> None:
        """In `past` nothing calls the driver. None: there is no such way."""
        self.direct, self.past = direct, past
        self._said = False

    @property
    def is_direct_stuck(self) -> bool:
        """Whether the driver has not answered, and still does not."""
        return self.direct.is_stuck

    def read(self, work: Callable[[], T]) -> T:
        """Do this, which only reads. Raises what it raises, and DeviceSilent. A call that was given up may still end,
        in the thread that is stuck with it: each thread must write elsewhere."""
        try:
            return self.direct.ask(work)
        except DeviceSilent:
            if self.past is None or threading.current_thread() is self.past.thread:
                raise
        if not self._said:
            self._said = True
            say(f"another process reads this rank's memory, since {NO_ANSWER}")
        return self.past.ask(work, PAST_S)

    def close(self) -> None:
        """End both threads, unless they are stuck."""
        self.direct.close()
        if self.past is not None:
            self.past.close()


# See malloc.h and mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST = 32 << 20  # bytes of a block that is kept; gaps left by larger ones would raise the peak memory


def keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed, or each step would take its memory anew, page by page. A user who
    has chosen how to allocate memory keeps that."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_THRESHOLD, LARGEST)
