"""A script that does not know Laststep: it saves every fifth step where it is told to, and once more at SIGTERM."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--fail-at", type=int, default=0)
parser.add_argument("--kill-at", type=int, default=0)
args = parser.parse_args()
rank, folder = int(os.environ["RANK"]), Path(os.environ["LASTSTEP_FOLDER"])
saved = folder / f"state_{rank}"
step = int(saved.read_text()) if saved.exists() else 0
resumes = os.environ.get("LASTSTEP_RESUMES", "0")
place = ":".join(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
print(f"rank {rank} at {place} from step {step}, resumes {resumes}", flush=True)
helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # left behind, whatever happens
(folder / f"helper_{rank}_{os.environ['LASTSTEP_ATTEMPT']}").write_text(str(helper.pid))


def save() -> None:
    saved.with_suffix(".tmp").write_text(str(step))
    saved.with_suffix(".tmp").replace(saved)


def stop(number: int, frame: FrameType | None) -> None:
    print(f"rank {rank} stops by {signal.Signals(number).name} at step {step}", flush=True)
    save()
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
while step < args.steps:
    time.sleep(0.05)
    step += 1
    if step % 5 == 0:
        save()
    if step == args.fail_at and resumes == "0" and rank == 1:
        sys.exit(3)
    if step == args.kill_at and resumes == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {rank} done, lr {args.lr}, {__file__}", flush=True)
