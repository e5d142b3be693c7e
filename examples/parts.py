"""A loop from the parts alone, stopped by any signal and started again: torchrun --nproc-per-node 2 examples/parts.py

It sums 0 + 1 + ... + 999, 24 times, eight numbers a step; docs/custom-loops.md lists the parts.
"""

from pathlib import Path

import torch

from laststep import Config
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.data.order import Order
from laststep.ranks.group import join
from laststep.ranks.launchers import detect_world
from laststep.ranks.process import Signals
from laststep.ranks.stop import Stop
from laststep.rundir import RunDir

signals, world, run = Signals.catch(), detect_world(), RunDir(Path("runs/parts"))
run.checkpoints.mkdir(parents=True, exist_ok=True)
group = join(Config(), world, run.meeting(world.attempt), timeout_s=60)
group.connect(timeout_s=60)
stop = Stop(group.world, group.store, signals, on_failure=print)
store = CheckpointStore(run.checkpoints)
writer = CheckpointWriter(store, group.store, world.rank, world.size, group.device)

data = torch.arange(1000, device=group.device)
order = Order(samples=len(data), batch_size=8, seed=0)
total = torch.zeros((), dtype=torch.int64, device=group.device)
newest = store.newest(warn=print) if world.rank == 0 else None  # the newest intact one
first = group.broadcast_int("step", newest.step if newest else None) or 0
if first:
    total = load(store.path(first), store.manifest(first))["total"].to(group.device)
print(f"from step {first}", flush=True)

step = first
while step < 3000 and stop.begin_tick():  # every rank leaves after the same step
    (mine,) = order.micro_batches(step, world.rank, world.size, accumulate=1)
    total += group.sum(data[mine].sum())
    step += 1

info = CheckpointInfo(step, order.epoch(step), samples=8 * step, metrics={})
writer.start(info, {"total": total}, before_commit=lambda: None, keep_last=2, keep_best=0)
writer.wait(timeout_s=60)
print(f"to step {step}: {total}", flush=True)
writer.close()
stop.close()
group.close()
