"""A rescue while the GPU's stream hangs, as it does under NCCL after a rank's death.

On one GPU a kernel that sleeps before the update plays the collective that never ends. The same is tested in
tests/loops/test_behind_a_device.py on a scripted device; here are the real stream, events and allocator.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch

from laststep.checkpoint.pack import Packed
from laststep.loops.custom_loop import Phase
from laststep.loops.engine import Engine
from laststep.loops.snapshot import Ring
from laststep.ranks.device import ANSWER_S, open_queue
from laststep.ranks.fault import DeviceSilent
from laststep.rundir import RunDir
from tests.gpu.devices import DEVICES, needs_gpu, place
from tests.support.loops import a_loop, checkpoint, lines, settings_of, undisturbed_run
from tests.support.project import DEADLINE_S, wait_until
from tests.support.states import save_frozen

ON_GPU = ("device=cuda", "train.deterministic=true")
HANGS = 20_000_000_000  # clock cycles of a GPU: more than eight seconds
KINDS = ["task", "custom"]


def hang_before(engine: Engine, step: int) -> None:
    """Let the device hang before the update of `step`, with everything else queued behind."""
    begin_update = engine.ring.begin_update

    def begin() -> None:
        if engine.position.step == step - 1 and getattr(engine.loop, "phase", Phase.IN_STEP) is Phase.IN_STEP:
            torch.cuda._sleep(HANGS)
        begin_update()

    engine.ring.begin_update = begin  # type: ignore[method-assign]


def train(engine: Engine) -> None:
    with contextlib.suppress(Exception):
        engine.run()


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDir]:
    """A run of one kind of loop with a checkpoint after each step."""
    return request.param, undisturbed_run(request.param, tmp_path_factory.mktemp(request.param), *ON_GPU)


@needs_gpu
@pytest.mark.parametrize("step", [2, 4, 7])
def test_the_step_before_is_saved(step: int, undisturbed: tuple[str, RunDir], tmp_path: Path) -> None:
    """Bit for bit, while the stream still hangs, and without an allocation on the device, which may wait for it."""
    kind, expected = undisturbed
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "hangs", *ON_GPU), closing) as engine:
        hang_before(engine, step)
        threading.Thread(target=train, args=(engine,), daemon=True).start()
        wait_until(lambda: engine.position.step >= step, "the CPU did not run ahead")
        time.sleep(0.5)  # the CPU queues what it can
        before = torch.cuda.memory_stats()
        assert engine.freeze(timeout_s=1.0) and engine.position.step == step - 1
        save_frozen(engine)
        after = torch.cuda.memory_stats()
        assert not torch.cuda.default_stream().query(), "the device must hang for longer than the rescue takes"
        for count in ("num_device_alloc", "num_device_free", "num_alloc_retries"):
            assert after.get(count) == before.get(count), f"{count}: the rescue went to the driver"
        torch.cuda.synchronize()
    run = RunDir(tmp_path / "hangs")
    saved = checkpoint(run, step - 1)
    assert saved == checkpoint(expected, step - 1)
    assert lines(run) == lines(expected)[: saved["position"]["records"]]


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_queue(kind: str, tmp_path: Path) -> None:
    """A device takes about a thousand kernels in advance. Then the thread that trains waits in C, in the middle of an
    update. If the driver keeps its lock meanwhile, the rescue must give up within seconds; else the step is saved."""
    queueing = threading.Event()
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "full", *ON_GPU), closing) as engine:
        hang_before(engine, 4)
        begin_update, scratch = engine.ring.begin_update, torch.zeros(1, device="cuda")

        def begin() -> None:
            begin_update()
            if engine.position.step == 3 and getattr(engine.loop, "phase", Phase.IN_STEP) is Phase.IN_STEP:
                queueing.set()
                for _ in range(10_000):
                    scratch.add_(1)

        engine.ring.begin_update = begin  # type: ignore[method-assign]
        threading.Thread(target=train, args=(engine,), daemon=True).start()
        assert queueing.wait(DEADLINE_S), "step 4 did not begin its update"
        time.sleep(1.0)  # the queue fills
        began = time.monotonic()
        try:
            assert engine.freeze(timeout_s=0.0) and engine.position.step == 3
        except DeviceSilent as silence:
            assert time.monotonic() - began < 2 * ANSWER_S
            print(f"this driver keeps its lock while the queue is full: {silence}")
            return torch.cuda.synchronize()
        save_frozen(engine)
        assert not torch.cuda.default_stream().query(), "the device must hang for longer than the rescue takes"
        torch.cuda.synchronize()
    assert checkpoint(RunDir(tmp_path / "full"), 3)["position"]["step"] == 3


@needs_gpu
def test_a_capture_in_torchs_default_mode() -> None:
    """The watchdog asks how far the device is while a custom loop captures a graph. That must not spoil the graph."""
    queue = open_queue(place("cuda"))
    ring: Ring[int] = Ring(queue, lambda: 0)
    with ring.update():
        pass
    value, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        doubled = 2 * value
        assert [ring.passed() for _ in range(10)] == [2] * 10
    graph.replay()
    assert doubled.tolist() == [2.0] * 8
    queue.close()


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_comes_back_during_the_save(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank was only slow. What was copied before is discarded: a mixture would have intact hashes."""
    whole = Packed.copy

    def slow(packed: Packed, start: int, stop: int, into: torch.Tensor) -> None:
        whole(packed, start, stop, into)
        torch.cuda.default_stream().synchronize()  # until the device has come back

    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "back", *ON_GPU), closing) as engine:
        hang_before(engine, 3)
        threading.Thread(target=train, args=(engine,), daemon=True).start()
        wait_until(lambda: engine.position.step >= 3, "the CPU did not run ahead")
        assert engine.freeze(timeout_s=1.0) and engine.position.step == 2
        monkeypatch.setattr(Packed, "copy", slow)
        save_frozen(engine)
        step = engine.position.step
    assert step in (3, 4) and checkpoint(RunDir(tmp_path / "back"), step)["position"]["step"] == step


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_allocates(kind: str, tmp_path: Path) -> None:
    """From the third step on all memory comes from torch's cache: a call to the driver may wait for the device."""
    counts: list[int] = []
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "calm", *ON_GPU), closing) as engine:
        end_update = engine.ring.end_update

        def end() -> None:
            counts.append(torch.cuda.memory_stats()["num_device_alloc"])
            end_update()

        engine.ring.end_update = end  # type: ignore[method-assign]
        engine.run()
    assert len(set(counts[4:])) == 1, counts


@pytest.mark.parametrize("device", DEVICES)
def test_own_work_is_told_from_waiting(device: str) -> None:
    """What names a straggler: the device's time in the forward pass, not in a collective, whoever was late for it."""
    queue = open_queue(place(device))
    ring: Ring[int] = Ring(queue, lambda: 0)
    unit = 0.02

    def work(units: int) -> None:
        torch.cuda._sleep(int(units * unit * 1e9)) if device == "cuda" else time.sleep(units * unit)

    with ring.update():
        pass
    queue.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        ring.begin_work()
        work(1)
        ring.end_work()
        work(3)  # the backward pass waits for other ranks
        with ring.update():
            pass
    queue.synchronize()
    took_s = time.perf_counter() - began
    assert 0.1 * took_s < ring.busy_s < 0.4 * took_s
    assert ring.passed() == 18


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_is_read_beside_the_queue(device: str) -> None:
    """From a thread of its own, whose current device is not set, while the queue is busy."""
    queue = open_queue(place(device))
    value = torch.arange(1 << 20, dtype=torch.float32, device=device)
    queue.synchronize()
    buffer, found = queue.host_buffer(value.nbytes), []
    if device == "cuda":
        torch.cuda._sleep(HANGS // 5)

    def read() -> None:
        with queue.beside():
            Packed([value]).copy(0, value.nbytes, buffer)
            found.append(value[-1].item())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(timeout=60)
    assert device == "cpu" or not torch.cuda.default_stream().query(), "the queue is still busy"
    assert torch.equal(buffer.view(torch.float32), torch.arange(1 << 20, dtype=torch.float32)) and found == [2**20 - 1]
    queue.synchronize()
