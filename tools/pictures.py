"""Draws the pictures of docs/ from the real output of real commands, on a throwaway Slurm and on this machine.

`python -m tools.pictures [NAME ...]`, as root, on Debian or Ubuntu, in about ten minutes. The report needs chromium.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tools import report, shares
from tools.desk import PROJECT, Desk, throwaway_desk
from tools.picture import picture
from tools.recording import recording
from tools.terminal import Line

DOCS = PROJECT / "docs"
NARROW, MIDDLE, WIDE, ROWS = 80, 100, 140, 24  # of terminals
SUBMIT = "python launch.py"
LONG = "--time 30 train.epochs=200 checkpoint.every_epochs=50"
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


def draw_recording(desk: Desk) -> None:
    """A run that is preempted and resumes."""
    (DOCS / "recording.svg").write_text(recording(desk))


def draw_status(desk: Desk) -> None:
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
    for columns, name in ((WIDE, "status"), (NARROW, "status-80")):
        lines = types(desk, "python launch.py status", columns)
        draw(name, "python launch.py status", [line.text for line in lines], columns)
    watching = "python launch.py status --watch"
    shot = desk.photographs(watching, NARROW, ROWS, "q ends", end="q")
    draw("status-watch", watching, shot.lines, NARROW)


def draw_logs(desk: Desk) -> None:
    """`logs` of a run that is resumed with another number of threads, and then meets an error of its task."""
    (desk.folder / "my_digits.py").write_text(TASK)
    types(desk, f"{SUBMIT} --tasks-per-node 2 --name first task=my_digits.Digits {LONG}")
    desk.until_step("first", 10)
    types(desk, "python launch.py cancel first")
    types(desk, "python launch.py resume first launch.cpus_per_task=2")
    desk.until_state("first", "failed")
    showing = "python launch.py logs first -n 20"
    draw("logs", showing, [line.text for line in types(desk, showing, MIDDLE)], MIDDLE)


def draw_local(desk: Desk) -> None:
    """The lines of `--local`, and its bar."""
    training = f"{SUBMIT} --local --tasks-per-node 2 --name digits"
    shot = desk.photographs(training, NARROW, ROWS, r"\d+/\d+ epoch 2", end="\x03")
    draw("local", training, shot.lines, NARROW)


def draw_report(desk: Desk) -> None:
    """The page of a run that was stopped and resumed three times."""
    report.main([str(DOCS / "report.png")])


def draw_shares(desk: Desk) -> None:
    """Three runs of changing sizes."""
    shares.main()


def types(desk: Desk, command: str, columns: int = NARROW) -> list[Line]:
    """Run a command in a terminal; returns what it prints."""
    return desk.types(command, columns).lines


def draw(name: str, command: str, lines: list[str], columns: int) -> None:
    """Write a picture of a terminal."""
    (DOCS / f"{name}.svg").write_text(picture(command, lines, columns))


PICTURES: dict[str, tuple[Callable[[Desk], None], list[str]]] = {  # how to draw them, and their files in docs/
    "recording": (draw_recording, ["recording.svg"]),
    "status": (draw_status, ["status.svg", "status-80.svg", "status-watch.svg"]),
    "logs": (draw_logs, ["logs.svg"]),
    "local": (draw_local, ["local.svg"]),
    "report": (draw_report, ["report.png"]),
    "shares": (draw_shares, ["shares.svg"]),
}


def main() -> None:
    """Draw all pictures, or the named ones, each on a desk of its own."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (default: all)")
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in names:
        with throwaway_desk() as desk:
            draws, _ = PICTURES[name]
            draws(desk)
        print(f"drawn: {name}", flush=True)


if __name__ == "__main__":
    main()
