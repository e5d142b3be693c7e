"""What the sender of a tracker costs: CPU seconds per 1,000 steps, and memory. See docs/benchmarks.md.

    python -m benchmarks.track [--steps 20000] [TRACKER ...]

The training process pays nothing: it writes metrics.jsonl anyhow. Each sender reads a file of that many steps of five
values, into W&B's own files (offline), a database of MLflow's (sqlite) and trackio's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from laststep.config.config import Config
from laststep.rundir import RunDir

WORDS = {
    "wandb": ["track.wandb.project=cost"],
    "mlflow": ["track.mlflow.experiment=cost", "track.mlflow.uri=sqlite:///{folder}/mlflow.db"],
    "trackio": ["track.trackio.project=cost"],
}
# The process measures itself: its CPU with that of what it has started, before the steps and after them.
CODE = """
import json, os, resource, sys, time
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.track.wanted import wish_of
from laststep.track.sender import Sender

def cpu():
    own, others = resource.getrusage(resource.RUSAGE_SELF), 0.0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if stat[3] == str(os.getsid(0)) and int(pid) != os.getpid():
            others += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return own.ru_utime + own.ru_stime + others

run = RunDir(sys.argv[1])
sender = Sender(run, wish_of(run_config.as_submitted(run), sys.argv[2]), lambda text: None)
whole = run.metrics.read_text()
lines = whole.splitlines(keepends=True)
run.metrics.write_text("".join(lines[:10]))
sender.send(last=True)
begin = cpu()
run.metrics.write_text(whole)
sent = sender.send(last=True)
steps = cpu() - begin
memory = 0
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[3] == str(os.getsid(0)):
            memory += int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
sender.close()
print(json.dumps({"begin_s": begin, "s_per_1000": 1000 * steps / sent, "mb": memory / 1e6}))
"""


def measure(tracker: str, steps: int, folder: Path) -> dict[str, float]:
    """The cost of one sender."""
    run = RunDir(folder / tracker)
    run.path.mkdir()
    words = [word.format(folder=folder) for word in WORDS[tracker]]
    Config.load(None, [*words, f"launch.root={folder}", f"launch.name={tracker}"]).save(run.config)
    names = ("loss", "lr", "samples_per_s", "grad_norm", "mfu")
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            values = {name: step / (number + 3) for number, name in enumerate(names)}
            file.write(json.dumps({"step": step, "epoch": 1, **values, "time": time.time()}) + "\n")
    env = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    env["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(run.path), tracker],
        env=env,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line per tracker."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.track", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trackers", nargs="*", default=list(WORDS), metavar="TRACKER")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N")
    args = parser.parse_args()
    print(f"{'tracker':<10}{'CPU s to begin':>16}{'CPU s per 1,000 steps':>24}{'memory, MB':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for tracker in args.trackers:
            cost = measure(tracker, args.steps, Path(folder))
            print(f"{tracker:<10}{cost['begin_s']:>16.1f}{cost['s_per_1000']:>24.2f}{cost['mb']:>12.0f}", flush=True)


if __name__ == "__main__":
    main()
