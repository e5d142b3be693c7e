"""A rescue does the update of a step in whose collective a rank's device hangs, while the CPU is ahead, as under NCCL.

Four real ranks, two replicas of two shards. The devices are scripted, see test_behind_a_device.py. Those of the first
node hang in what all ranks gather at the end of step 4; the second node has done that step's update. What the first
node then has must be what the second has, bit for bit.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from laststep.attempt.ending import exit_now
from laststep.checkpoint.files import StateChanged
from laststep.checkpoint.pack import map_tensors
from laststep.checkpoint.shards import local_of
from laststep.loops.engine import Engine
from laststep.loops.task_loop import TaskLoop
from laststep.ranks.group import Group
from laststep.ranks.seal import Seal
from laststep.ranks.world import Gathered
from laststep.rundir import RunDir
from tests.loops.test_behind_a_device import Disturbed
from tests.support.loops import Doubling, a_loop, lines
from tests.support.project import DEADLINE_S, wait_until
from tests.support.ranks import forked
from tests.support.records import a_world
from tests.support.runs import config

SETTINGS = (
    "train.sharding=hybrid", "train.batch_size=16", "optim.clip_norm=0.01", "optim.warmup_steps=9",
    "train.ema_decay=0.9",
)  # fmt: skip


class Larger(Doubling):
    """With batch norm, gradients that are clipped, an average, and a learning rate that changes in each step."""

    def datasets(self) -> Any:
        x = torch.arange(600.0).view(200, 3).sin()
        return TensorDataset(x, 2 * x), TensorDataset(x[:16], 2 * x[:16])


class Fused(Larger):
    """AdamW's counters are on the device. And the thread that trains does not wait for the values of step 4, but in the
    next step, before its gradients meet."""

    def optimizer(self, model: torch.nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, fused=True)


class Rank:
    """One rank, whose device hangs in its step."""

    def __init__(self, engine: Engine, disturbed: Disturbed, folder: Path, step: int) -> None:
        self.engine, self.disturbed, self.folder, self.step = engine, disturbed, folder, step
        assert isinstance(engine.loop, TaskLoop)
        self.learner = engine.loop.learner
        self.is_behind = engine.rank < 2
        tensors = disturbed.tensors
        disturbed.tensors = lambda engine: [*tensors(engine), *self.gradients()]  # type: ignore[method-assign]
        disturbed.hang_in(engine, step if self.is_behind else step + 1)
        hangs = engine.ring.begin_update

        def begin() -> None:
            disturbed.queue.event().record()  # the device has done all of the step but what all ranks gather
            hangs()

        engine.ring.begin_update = begin  # type: ignore[method-assign]

    def gradients(self) -> list[torch.Tensor]:
        """Those of the step under way: the update clips them."""
        found = [rows.grad for group in self.learner.optimizer.param_groups for rows in group["params"]]
        return [gradient for gradient in found if gradient is not None]

    def hangs(self) -> None:
        """Train until the device hangs. What the CPU has computed beyond that is not there on a device."""
        engine, queue, step = self.engine, self.disturbed.queue, self.step
        threading.Thread(target=self.disturbed.run, args=(engine,), daemon=True).start()
        if not self.is_behind:  # it waits in the next step for those that are
            wait_until(
                lambda: engine.position.step == step and self.learner.gradients.gathered(step),
                "it does not train",
            )
            assert engine.freeze(DEADLINE_S) and engine.position.step == step
            return
        wait_until(lambda: queue.waiting, "the thread that trains does not wait for the device")
        assert engine.position.step == step, "the CPU is ahead"
        queue.rewind()
        assert engine.freeze(0.0) and engine.position.step == step - 1

    def advances(self, gathered: Gathered) -> bool:
        """Do the update in the rescue. What the device has not done yet holds nothing of use."""
        self.learner.gradients._met[self.step - 1].fill_(torch.nan)  # type: ignore[attr-defined]
        for tensor in self.engine.readback._pending[-1][1].values():
            tensor.fill_(torch.nan)
        return self.engine.advance(gathered)

    def state(self) -> Any:
        """What this rank would save."""
        engine = self.engine
        if engine.rank == 0:
            engine.metrics.sync()
        saved: dict[str, Any] = {}
        map_tensors(engine._frozen_state(), lambda t: saved.setdefault(str(len(saved)), local_of(t).clone()))
        return {**saved, "position": engine.position.moment, "loss": engine.position.loss_sum}


Script = Callable[[Rank, Callable[[], Gathered]], Any]


def rescues(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """The update is done once more, with what the other node has gathered."""
    if rank.is_behind:
        assert not rank.engine.advance(Gathered(rank.step - 1, ())), "that one is done"
        assert rank.engine.gathered != gathered() and rank.advances(gathered())
        assert rank.engine.freeze(0.0) and rank.engine.position.step == rank.step
        assert not rank.engine.advance(gathered()), "once"
    return rank.state()


def wakes_up(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """The other node was only suspended. After the update in the rescue the collective returns, and this device does
    the update again; what it gives to the others in the next step follows from that."""
    engine, queue = rank.engine, rank.disturbed.queue
    if rank.is_behind:
        assert rank.advances(gathered()) and engine.freeze(0.0)
        queue.go_to(sys.maxsize)
        wait_until(lambda: engine.ring._stopped, "the thread that trains does not stop")
        assert not engine.freeze(0.0), "what it holds is nothing that should be saved"
        (rank.folder / f"stopped{engine.rank}").touch()
    else:
        wait_until(lambda: len(list(rank.folder.glob("stopped*"))) == 2, "the other node does not stop")
        assert rank.learner.gradients.gathered(rank.step + 1) is None and engine.position.step == rank.step


def has_gone_on(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """The collective has returned before the update in the rescue. The step is whole as the device left it."""
    engine = rank.engine
    if rank.is_behind:
        rank.disturbed.queue.go_to(sys.maxsize)
        wait_until(lambda: engine.ring._stopped, "the thread that trains does not stop")
        assert not engine.advance(gathered())
        assert engine.freeze(0.0) and engine.position.step == rank.step


def goes_on(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """The collective returns after all, during the update: the device does it too."""
    if rank.is_behind:
        update = rank.learner.update

        def late() -> Any:
            measured = update()
            rank.disturbed.queue.go_to(sys.maxsize)
            return measured

        rank.learner.update = late  # type: ignore[method-assign]
        with pytest.raises(StateChanged):
            rank.advances(gathered())
        assert not rank.engine.freeze(0.0), "what it holds is nothing that should be saved"


def cannot(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """What the update needs is not there any more. The step before stays as whole as it was."""
    if rank.is_behind:
        before = rank.state()
        assert not rank.engine.advance(gathered()) and rank.engine.freeze(0.0)
        after = rank.state()
        assert all(torch.equal(after[name], before[name]) for name in before if name.isdecimal())
        assert rank.engine.position.step == rank.step - 1


def still_runs(rank: Rank, gathered: Callable[[], Gathered]) -> Any:
    """The thread that trains is in the user's code, and may still change what the update needs."""
    if rank.is_behind:
        rank.engine.ring._waits = False
    cannot(rank, gathered)


def run(folder: Path, script: Script, task: type[Larger] = Larger, step: int = 4) -> list[Any]:
    """What the script returns on each rank."""
    config(folder, "run", 1, ())  # its folder
    ranks = [forked(_rank, folder, script, task, rank, step) for rank in range(4)]
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert all(rank.exitcode == 0 for rank in ranks), "\n".join(path.read_text() for path in folder.glob("error*"))
    return [torch.load(folder / f"result{rank}") for rank in range(4)]


def _rank(folder: Path, script: Script, task: type[Larger], rank: int, step: int) -> None:
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as closing:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
            if store is not None:
                (folder / "port.new").write_text(str(store.port))
                (folder / "port.new").rename(folder / "port")
            wait_until(lambda: (folder / "port").exists(), "rank 0 has no store")
            store = store or dist.TCPStore("127.0.0.1", int((folder / "port").read_text()))
            dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=4)
            world = a_world(
                rank, 4, hosts=("n1", "n1", "n2", "n2"), local_rank=rank % 2, local_size=2, node=rank // 2, nodes=2
            )
            disturbed = Disturbed(monkeypatch)
            settings = config(folder, "run", 1, (*SETTINGS, f"train.log_every={3 if task is Fused else 2}"))
            group = Group(world, store, torch.device("cpu"), "gloo", seal=Seal(b"of all ranks"))
            with a_loop(task, settings, closing, group=group) as engine:
                assert isinstance(engine.loop, TaskLoop)
                one = Rank(engine, disturbed, folder, step)
                one.hangs()
                if rank == 3:
                    torch.save(engine.gathered, folder / "gathered.new")
                    (folder / "gathered.new").rename(folder / "gathered")

                def gathered() -> Gathered:
                    wait_until(lambda: (folder / "gathered").exists(), "the other node has gathered nothing")
                    return Gathered(*torch.load(folder / "gathered", weights_only=False))

                torch.save(script(one, gathered), folder / f"result{rank}")
                done = [folder / f"result{other}" for other in range(4)]
                wait_until(
                    lambda: all(path.exists() for path in done) or any(folder.glob("error*")), "another rank is stuck"
                )
                sys.stdout.flush()
                exit_now(0)  # as after a rescue: another thread is stuck for good
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        exit_now(1)


@pytest.mark.parametrize("task", [Larger, Fused])
def test_the_update_is_done_once_more(tmp_path: Path, task: type[Larger]) -> None:
    """Both nodes would save the same bytes, with the same line of metrics.jsonl."""
    states = run(tmp_path, rescues, task)
    for behind, other in ((states[0], states[2]), (states[1], states[3])):
        assert behind.keys() == other.keys() and len(behind) > 10
        for name, value in behind.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name
    assert [line["step"] for line in lines(RunDir(tmp_path / "run"))] == [1, 2, 3, 4]


def test_another_node_wakes_up(tmp_path: Path) -> None:
    """Its ranks could do the next update without this rank's consent, and save a step that no undisturbed run has."""
    run(tmp_path, wakes_up, Fused)


def test_the_device_has_gone_on(tmp_path: Path) -> None:
    """Nothing is left to do, and a whole step must not be torn."""
    run(tmp_path, has_gone_on, Fused)


def test_the_device_goes_on(tmp_path: Path) -> None:
    """The update may have been done twice. Nothing tells how far: this rank has nothing to save."""
    run(tmp_path, goes_on)


def test_the_first_update(tmp_path: Path) -> None:
    """It has given the optimiser its state, in memory that the device has not even filled with zeros."""
    run(tmp_path, cannot, step=1)


def test_a_thread_that_still_runs(tmp_path: Path) -> None:
    """While it may change gradients and counters, no other thread may use them."""
    run(tmp_path, still_runs)
