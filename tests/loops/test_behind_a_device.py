"""A rescue while the device hangs in a step's collective and the CPU is ahead of it, as under NCCL.

The loops are the real ones. The device is scripted: the CPU computes what it queues at once, and at the fault the
device's memory gets the contents that it had where the device hangs. The checkpoint that the rescue saves must be, bit
for bit, the one that an undisturbed run saves after that step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from laststep.checkpoint.pack import map_tensors
from laststep.checkpoint.store import CheckpointStore
from laststep.loops.custom_loop import Phase
from laststep.loops.engine import Engine
from laststep.rundir import RunDir
from tests.loops.scripted import RewoundQueue, ScriptedEvent
from tests.support.loops import a_loop, checkpoint, lines, settings_of, undisturbed_run
from tests.support.project import DEADLINE_S, wait_until
from tests.support.states import save_frozen


@pytest.fixture(scope="module", params=["task", "custom"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDir]:
    """A run of one kind of loop with a checkpoint after each step."""
    return request.param, undisturbed_run(request.param, tmp_path_factory.mktemp(request.param))


class Disturbed:
    """A loop whose device hangs in the collective of one step. The thread that trains is left alone with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity: int | None = None, past: bool = False) -> None:
        self.queue = RewoundQueue(capacity, past)
        monkeypatch.setattr("laststep.loops.engine.open_queue", lambda device: self.queue)
        monkeypatch.setattr("laststep.loops.measured.start_copy_to_host", self.start_copy_to_host)

    def start_copy_to_host(self, scalars: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        copied, event = [float(scalar) for scalar in scalars], self.queue.event()
        event.record()

        def values() -> list[float]:
            event.synchronize()
            return copied

        return values

    def hang_in(self, engine: Engine, step: int, phase: Phase = Phase.IN_STEP) -> None:
        """Let the device hang before the update of `step` (from 1); a custom loop also has other updates."""
        begin_update = engine.ring.begin_update

        def begin() -> None:
            if engine.position.step == step - 1 and getattr(engine.loop, "phase", phase) is phase:
                self.queue.go_to(min(self.queue.limit, len(self.queue.queued)))
            begin_update()

        engine.ring.begin_update = begin  # type: ignore[method-assign]
        # All but Adam's `step`.
        self.queue.memory = lambda: [t for t in self.tensors(engine) if t.ndim or not t.is_floating_point()]

    def tensors(self, engine: Engine) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        map_tensors(engine.loop.state(), lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def train(self, engine: Engine) -> None:
        """Train in a thread until it waits for the device."""
        threading.Thread(target=self.run, args=(engine,), daemon=True).start()
        wait_until(lambda: self.queue.waiting, "the thread that trains does not wait for the device")

    def run(self, engine: Engine) -> None:
        with contextlib.suppress(Exception):
            engine.run()


@pytest.mark.parametrize("step", [1, 2, 4, 6, 7])
def test_the_step_before_is_saved(
    step: int, undisturbed: tuple[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective of `step` never ends. The CPU has queued that step's update, and what it could of the next two:
    learning rates, counters, schedules and the user's own objects are ahead of the device's memory."""
    kind, expected = undisturbed
    disturbed = Disturbed(monkeypatch)
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "hangs"), closing) as engine:
        disturbed.hang_in(engine, step)
        disturbed.train(engine)
        assert engine.position.step >= step, "the CPU is ahead"
        disturbed.queue.rewind()
        assert engine.freeze(timeout_s=0.0) and engine.position.step == step - 1
        save_frozen(engine)
    run = RunDir(tmp_path / "hangs")
    if step > 1:
        saved, whole = checkpoint(run, step - 1), checkpoint(expected, step - 1)
        assert saved == whole
    count = checkpoint(run, step - 1)["position"]["records"]
    assert lines(run) == lines(expected)[:count], "each step's line once, and no line of a later step"


def test_a_hang_at_the_end_of_an_epochs_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a custom loop sends rank 0's buffers once more. The host already holds what must not be saved: buffers
    that the device has not received. The state is that of the last step, before anything that follows the steps."""
    disturbed = Disturbed(monkeypatch)
    with contextlib.ExitStack() as closing, a_loop("custom", settings_of(tmp_path, "end"), closing) as engine:
        disturbed.hang_in(engine, 6, Phase.BETWEEN_STEPS)
        disturbed.train(engine)
        assert engine.position.over, "the CPU is ahead"
        disturbed.queue.rewind()
        assert engine.freeze(timeout_s=0.0)
        assert (engine.position.step, engine.position.batches, engine.position.over) == (5, 5, False)
        save_frozen(engine)
    run = RunDir(tmp_path / "end")
    assert checkpoint(run, 5)["position"]["records"] == len(lines(run)) == 5


def test_the_rank_comes_back_during_the_rescue(
    undisturbed: tuple[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was only slow: while the state is being copied, the device ends the collective and the queued updates. What
    was copied is discarded, and the newer step is saved, with its line."""
    kind, expected = undisturbed
    disturbed = Disturbed(monkeypatch)
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "back"), closing) as engine:
        disturbed.hang_in(engine, 3)
        disturbed.train(engine)
        assert engine.freeze(timeout_s=0.0) and engine.position.step == 2
        disturbed.queue.go_to(10**9)
        save_frozen(engine)
        step = engine.position.step
        assert step in (3, 4)
    run = RunDir(tmp_path / "back")
    assert CheckpointStore(run.checkpoints).steps() == [step]
    saved, whole = checkpoint(run, step), checkpoint(expected, step)
    assert saved == whole
    assert lines(run) == lines(expected)[: saved["position"]["records"]]


def test_a_loop_that_waits_for_the_device_after_its_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """loss.item() after optimizer.step(): the thread that trains is blocked in C for good, within the step. No lock may
    be held there."""
    disturbed = Disturbed(monkeypatch)
    waits = threading.Event()
    plain = SGD.step

    def step(optimizer: SGD, *words: Any, **more: Any) -> Any:
        result = plain(optimizer, *words, **more)
        if disturbed.queue.done < len(disturbed.queue.queued):
            waits.set()
            disturbed.queue.synchronize()  # like loss.item()
        return result

    monkeypatch.setattr(SGD, "step", step)
    with contextlib.ExitStack() as closing, a_loop("custom", settings_of(tmp_path, "item"), closing) as engine:
        disturbed.hang_in(engine, 3)
        threading.Thread(target=disturbed.run, args=(engine,), daemon=True).start()
        assert waits.wait(DEADLINE_S), "no step waited for the device"
        disturbed.queue.rewind()
        assert engine.freeze(timeout_s=0.0) and engine.position.step == 2
        save_frozen(engine)
    assert CheckpointStore(RunDir(tmp_path / "item").checkpoints).steps() == [2]


@pytest.mark.parametrize("kind", ["task", "custom"])
def test_an_update_that_moves_the_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some optimisers give the weights new memory. What the host refers to then is not yet computed, and the old memory
    may hold anything: no step is saved, rather than a wrong one."""
    disturbed = Disturbed(monkeypatch)
    plain = AdamW.step

    def step(optimizer: AdamW, *words: Any, **more: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
        return plain(optimizer, *words, **more)

    monkeypatch.setattr(AdamW, "step", step)
    with contextlib.ExitStack() as closing, a_loop(kind, settings_of(tmp_path, "moves"), closing) as engine:
        disturbed.hang_in(engine, 3)
        disturbed.train(engine)
        assert not engine.freeze(timeout_s=0.0)


def test_a_device_that_fails_during_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call on it raises from then on. Nothing is committed."""
    disturbed = Disturbed(monkeypatch)

    def fails(event: ScriptedEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with contextlib.ExitStack() as closing, a_loop("task", settings_of(tmp_path, "fails"), closing) as engine:
        disturbed.hang_in(engine, 3)
        disturbed.train(engine)
        assert engine.freeze(timeout_s=0.0)
        monkeypatch.setattr(ScriptedEvent, "query", fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            save_frozen(engine)
    assert CheckpointStore(RunDir(tmp_path / "fails").checkpoints).steps() == []
