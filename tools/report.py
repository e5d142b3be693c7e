"""Draws docs/report.png: the report of a run on this machine that is stopped and resumed three times.

    python -m tools.report docs/report.png

Needs chromium. With --folder FOLDER the run stays there, and is not trained again the next time; --dark draws the dark
page, --telemetry what the machine did, too.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import numpy
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from laststep.records.metrics import newest_step
from laststep.rundir import RunDir
from laststep.runs.run_folders import PROJECT

COMMAND = [sys.executable, "launch.py"]
START = ["--config", "mnist", "--local", "--tasks-per-node", "2", "--name", "digits", "train.epochs=20"]
STOP_AT = (160, 430, 810)  # steps of 1,260
WIDTH, MAX_HEIGHT, MARGIN = 1100, 4000, 24  # pixels
# Waits until the curves are drawn, for at most this long.
BUDGET_MS = 10_000


def main(words: Sequence[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--folder", type=Path, help="where the run is kept")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--telemetry", action="store_true")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "runs" / "digits").exists():
            train(folder, ["telemetry.record=always"] if args.telemetry else [])
        shoot(made(folder), args.picture, args.dark)


def made(folder: Path) -> Path:
    """The page of the run in this folder."""
    page = folder / "report.html"
    subprocess.run([*COMMAND, "report", "digits", "-o", str(page)], cwd=folder, check=True)
    return page


def text_of(page: Path) -> str:
    """The text of a page, a line for each element that has any."""
    _, _, body = page.read_text().partition("<body")
    body = re.sub(r"<(style|script)\b.*?</\1>", "", body.partition(">")[2], flags=re.DOTALL)
    return unescape(
        "\n".join(line for part in re.split(r"<[^>]+>", body) for line in part.splitlines() if line.strip())
    )


def train(folder: Path, more: Sequence[str] = ()) -> None:
    """A run that is stopped by Ctrl-C at each of the steps and resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.py").symlink_to(PROJECT / "launch.py")  # the report shows the commands as they are typed
    run, words = RunDir(folder / "runs" / "digits"), [*START, *more]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    for stop_at in (*STOP_AT, None):
        ranks = subprocess.Popen([*COMMAND, *words], cwd=folder)
        while stop_at and ranks.poll() is None:
            step = newest_step(run.metrics)
            if step and step["step"] >= stop_at:
                ranks.send_signal(signal.SIGINT)
                break
            time.sleep(0.2)
        ranks.wait()
        words = ["resume", "digits", "--local"]


def shoot(page: Path, picture: Path, dark: bool) -> None:
    """Save the page as chromium shows it, without the empty space below it."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--virtual-time-budget={BUDGET_MS}"]
    options += [f"--window-size={WIDTH},{MAX_HEIGHT}", f"--screenshot={picture.absolute()}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(["chromium", *options, page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    image = Image.open(picture).convert("RGB")
    rows = numpy.asarray(image)
    used = numpy.flatnonzero((rows != rows[-1, 0]).any(axis=(1, 2)))
    text = PngInfo()
    text.add_text("Text", text_of(page), zip=True)
    image.crop((0, 0, WIDTH, int(used[-1]) + MARGIN)).quantize(256).save(picture, optimize=True, pnginfo=text)


if __name__ == "__main__":
    main()
