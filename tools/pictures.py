"""Draws the pictures of docs/ from the real output of real commands, on a throwaway Slurm and on this machine.

`python -m tools.pictures [NAME ...]`, as root, on Debian or Ubuntu, in about ten minutes. The report needs chromium.
Each keeps the text that it was made from, so that a test sees when the program prints something else.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
from collections.abc import Callable

from tests.support.project import wait_until
from tools import report, shares, spike
from tools.desk import PROJECT, Desk, throwaway_desk
from tools.picture import picture
from tools.recording import recording
from tools.terminal import Line, normalised

Drawn = dict[str, str]  # the SVG of each file

DOCS = PROJECT / "docs"
NARROW, MIDDLE, WIDE, ROWS = 80, 100, 150, 24  # of terminals; the table of `status` fits into the widest, whole
SUBMIT = "python launch.py"
LONG = "--time 30 train.epochs=200 checkpoint.every_epochs=50"
# A step, an epoch, a wait in the queue, where Ctrl-C was typed. The words of these lines are compared in local.svg.
BY_CHANCE = re.compile(r"^[-+] (\[laststep( 0)?\] (step 0/0|epoch 0) .*|\[laststep( 0)?\] \S+: queued|.*\^C)$")
CUT_OFF = re.compile(r"(?<=[:,] )[^:,]*…$")
TASK = """\
from laststep.tasks.classification import Classification


class Digits(Classification):
    steps = 0

    def step(self, model, batch):
        self.steps += 1
        if self.steps == 30:
            raise ZeroDivisionError("no sample of class 11 in this batch")
        return super().step(model, batch)
"""

GPUS = """\
import sys

from tests.telemetry.nvml import Nvml

sys.modules[__name__] = Nvml()
"""


def draw_recording(desk: Desk) -> Drawn:
    """A run that is preempted and resumes."""
    return {"recording.svg": recording(desk)}


def draw_status(desk: Desk) -> Drawn:
    """`status` with a run in each state: more of them than four nodes can take, since each takes all their memory."""
    submit = f"{SUBMIT} launch.mem_gb=60"
    types(desk, f"{submit} --local --name digits train.epochs=4")
    types(desk, f"{submit} --name nan-lr train.epochs=2 optim.lr=1e30")
    desk.until_state("nan-lr", "failed")
    types(desk, f"{submit} --name stopped-by-hand {LONG}")
    desk.until_step("stopped-by-hand", 50)
    types(desk, "python launch.py cancel stopped-by-hand")
    types(desk, f"{submit} --nodes 2 --name baseline {LONG} train.batch_size=128")
    types(desk, f"{submit} --name wide {LONG}")
    desk.until_step("wide", 50)
    desk.requeues("wide")
    desk.until("wide", lambda run: run["state"] == "running" and run["attempts"] == 2, "running again")
    types(desk, f"{submit} --name augment {LONG} data.args.augment=true")
    desk.until_step("augment", 200)
    types(desk, f"{submit} --nodes 2 --name ema {LONG} train.ema_decay=0.999")
    desk.requeues("augment")
    desk.until_state("augment", "requeued")
    shown = {}
    for columns, name in ((WIDE, "status.svg"), (NARROW, "status-80.svg")):
        lines = types(desk, "python launch.py status", columns)
        shown[name] = picture("python launch.py status", [line.text for line in lines], columns)
    watching = "python launch.py status --watch"
    shot = desk.photographs(watching, NARROW, ROWS, "q ends", end="q")
    return {**shown, "status-watch.svg": picture(watching, shot.lines, NARROW)}


def draw_logs(desk: Desk) -> Drawn:
    """`logs` of a run that is resumed with another number of threads, and then meets an error of its task."""
    (desk.folder / "my_digits.py").write_text(TASK)
    types(desk, f"{SUBMIT} --tasks-per-node 2 --name first task=my_digits.Digits {LONG}")
    desk.until_step("first", 10)
    types(desk, "python launch.py cancel first")
    types(desk, "python launch.py resume first launch.cpus_per_task=2")
    desk.until_state("first", "failed")
    showing = "python launch.py logs first -n 20"
    lines = types(desk, showing, MIDDLE)
    return {"logs.svg": picture(showing, [line.text for line in lines], MIDDLE)}


def draw_local(desk: Desk) -> Drawn:
    """The lines of `--local`, and its bar."""
    training = f"{SUBMIT} --local --tasks-per-node 2 --name digits"
    shot = desk.photographs(training, NARROW, ROWS, r"\d+/\d+ epoch 2", end="\x03")
    return {"local.svg": picture(training, shot.lines, NARROW)}


def draw_gpus() -> None:
    """`status` of runs on two GPUs, which the stand-in of the tests plays: what they do is invented."""
    with throwaway_desk(slurm=False) as desk:
        (desk.folder / "pynvml.py").write_text(GPUS)
        desk.env["PYTHONPATH"] = str(desk.folder)
        submit = f"{SUBMIT} --local telemetry.record=always"
        types(desk, f"{submit} --name baseline train.epochs=2")
        words = f"{submit} --name digits train.epochs=200".split()
        running = subprocess.Popen(words, cwd=desk.folder, env=desk.env, stdout=subprocess.DEVNULL)
        try:
            wait_until((desk.folder / "runs" / "digits" / "plan.json").exists, "digits does not begin")
            desk.until("digits", lambda run: run["gpu_busy"] is not None, "seen by telemetry")
            first, second = "python launch.py status", "python launch.py status digits"
            lines = [line.text for line in types(desk, first, MIDDLE)]
            lines += ["", f"$ {second}", *(line.text for line in types(desk, second, MIDDLE))]
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)
    (DOCS / "gpus.svg").write_text(picture(first, lines, MIDDLE))


def types(desk: Desk, command: str, columns: int = NARROW) -> list[Line]:
    """Run a command in a terminal; returns what it prints."""
    return desk.types(command, columns).lines


def stale(kept: str, now: str) -> list[str]:
    """The lines in which two texts of a picture differ, after - and + as diff has it.

    What differs from time to time does not count: the order of lines, how many there are, where a column cuts a text
    off, and whether a run had come to a line by then (BY_CHANCE).
    """
    old, new = (dict.fromkeys(CUT_OFF.sub("…", line) for line in normalised(text)) for text in (kept, now))
    differing = [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
    return [line for line in differing if not BY_CHANCE.search(line)]


TERMINALS: dict[str, tuple[Callable[[Desk], Drawn], list[str]]] = {  # how to draw them, and their files in docs/
    "recording": (draw_recording, ["recording.svg"]),
    "status": (draw_status, ["status.svg", "status-80.svg", "status-watch.svg"]),
    "logs": (draw_logs, ["logs.svg"]),
    "local": (draw_local, ["local.svg"]),
}
OTHERS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "report": (lambda: report.main([str(DOCS / "report.png")]), ["report.png"]),
    "telemetry": (lambda: report.main([str(DOCS / "telemetry.png"), "--telemetry"]), ["telemetry.png"]),
    "gpus": (draw_gpus, ["gpus.svg"]),
    "shares": (shares.main, ["shares.svg"]),
    "spike": (spike.main, ["spike.svg"]),
}


def drawn(name: str) -> Drawn:
    """Pictures of terminals, drawn on a desk of their own."""
    with throwaway_desk(slurm=name != "local") as desk:
        return TERMINALS[name][0](desk)


def main() -> None:
    """Draw all pictures, or the named ones."""
    known = [*TERMINALS, *OTHERS]
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    names = parser.parse_args().names or known
    if unknown := set(names) - set(known):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in names:
        if name in OTHERS:
            OTHERS[name][0]()
        else:
            for file, svg in drawn(name).items():
                (DOCS / file).write_text(svg)
        print(f"drawn: {name}", flush=True)


if __name__ == "__main__":
    main()
