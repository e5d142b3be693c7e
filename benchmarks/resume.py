"""What a large checkpoint adds to a resume, compared with torch.distributed.checkpoint (DCP).

`python -m benchmarks.resume [--rounds N]`. Two ranks resume a VGG-16 with its momentum, 1.1 GB, from files that are
dropped from the page cache where the system allows it. They read and hash the files while they import the user's code
and make what they train: "reading checkpoint" is what is left of that afterwards, "restore" the way into the tensors.
As the reading takes something from the making, the same parts of a start without a checkpoint are subtracted.

In turns with that, a bare program on two ranks makes the same model and optimizer, and then loads the same state with
`dcp.load`, which compares no hash. If the median of our seconds divided by its seconds is above 1 by more than the
noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks._measure import Check, conclude, new_run
from benchmarks.requeue import by_phase, of_both, resume
from benchmarks.restore import cache

WORDS = ("model.name=vgg16", "data.args.image_size=32", "train.batch_size=4", "train.log_every=1")
PARTS = ("data and model", "reading checkpoint", "restore")
ADDED, DCP_LOAD = "beyond those of a start without a checkpoint", "dcp.load"
DCP = """\
import json, os, sys, time
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchvision.models import vgg16
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(vgg16(num_classes=10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
what, folder = sys.argv[1:]
weights, state = get_state_dict(model, optimizer)  # makes the momentum
began = time.time()
if what == "save":
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
else:
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
print(json.dumps({"dcp.load": time.time() - began}), flush=True)
os._exit(0)
"""


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a resume takes longer than `dcp.load`."""
    parser = argparse.ArgumentParser(prog="benchmarks.resume", description="What a large checkpoint adds to a resume.")
    parser.add_argument("--rounds", type=int, default=3, help="resumes, in turns with DCP (default: 3)")
    rounds = parser.parse_args(words).rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2")
    load = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    with tempfile.TemporaryDirectory() as folder:
        size, found = measure(Path(folder), rounds)
    results = by_phase(found)
    print(f"{'median':>8}  {'10-90 %':>13}  seconds, with {size / 1e9:.1f} GB from the disk")
    for part, s in results.items():
        print(f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {part}")
    check = Check("resume / dcp.load", 1.0, [each[ADDED] / each[DCP_LOAD] for each in found])
    settings = {"load_before": load, "bytes": size, "rounds": rounds, "unit": "s"}
    return conclude("resume", {**settings, "results": results}, [check])


def measure(folder: Path, rounds: int) -> tuple[int, list[dict[str, float]]]:
    """The checkpoint's bytes, and the seconds of each round. The first round, which fills caches, is dropped."""
    run, saved = new_run(folder, *WORDS), folder / "dcp"
    resume(run)  # the first start, which writes the first checkpoint
    of_both(run, "dcp", [sys.executable, "-c", DCP, "save", str(saved)])
    found: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        cache(saved, False)
        peers = of_both(run, "dcp", [sys.executable, "-c", DCP, "load", str(saved)])
        cache(run.checkpoints, False)
        said, fresh = resume(run), resume(new_run(folder, *WORDS))
        parts = {part: said[part] for part in PARTS}
        ours = sum(said[part] - fresh[part] for part in PARTS)
        found.append({**parts, ADDED: ours, DCP_LOAD: max(peer[DCP_LOAD] for peer in peers)})
    newest = max(run.checkpoints.glob("step_*"))
    return sum(file.stat().st_size for file in newest.iterdir()), found[1:]


if __name__ == "__main__":
    sys.exit(main())
