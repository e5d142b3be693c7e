"""Check Laststep on this machine's GPUs, with the torch that is here. The parts come in order of worth.

Once the time is used up no further part starts, and what was left out has not passed. The results go to a file, as they
come. Please send it to us, whatever it says; it may contain paths and the name of this machine, so read it first.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.gpu.check import Check, NoMachine
from tests.gpu.parts import PARTS, Part
from tests.gpu.report import RESULTS, Report

# Nothing starts without these. Other packages that Laststep installs are not needed here.
NEEDED = ("torch", "torchvision", "submitit", "omegaconf", "rich", "pytest")
OLDEST_TORCH = (2, 11)
MINUTES = 20.0
EPILOG = """Ten minutes are meant for deaths and restarts, 20 for most other tests, 40 for the
benchmarks as well; it depends on the machine how far the check comes. Parts that
need more GPUs than there are, or a larger one, are skipped.

Exit status: 0 something passed and nothing failed, whatever was left out; 1 a part
failed, or nothing passed; 2 wrong input, no GPU, or a package is missing; 130 stopped
by Ctrl-C, 143 by SIGTERM.
"""


def main(words: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, and write the report; returns the exit status."""
    began = time.monotonic()
    given = _arguments(words, parts)
    if lack := _lack_of_packages():
        return _refuse(lack)
    check = Check(given.device)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, check.stop)
    try:
        check.read_machine()
        if check.stopped:
            return 128 + check.stopped
        report = Report(given.report)
    except NoMachine as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"--report {given.report}: {error.strerror}")
    machine = check.machine
    report.machine({**machine, "device": given.device, "minutes": given.minutes, "began": time.strftime("%F %T")})
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "CPUs as a stand-in"
    print(f"torch {machine['torch']}, {gpus}; at most {given.minutes:g} minutes; results in {given.report}", flush=True)
    chosen = [part for part in parts if not given.parts or part.name in given.parts]
    end = check.run(chosen, report, began + 60 * given.minutes)
    report.end(end)
    print(f"\n{end}, after {(time.monotonic() - began) / 60:.1f} minutes")
    for result in RESULTS:
        if names := report.names(result):
            print(f"{result + ':':<10}{len(names):>3}  {', '.join(names)}")
    if left := report.names("left out"):
        print(f"Not tested: what was left out. To run it: python -m tests.gpu {' '.join(left)}")
    print(f"Please send us {given.report}.", flush=True)
    if check.stopped:
        return 128 + check.stopped
    return int(bool(report.names("failed")) or not report.names("passed"))


def _arguments(words: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    """What the user wants."""
    names = [part.name for part in parts]
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(names)} (default: all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="N", help="10, 20 or 40 (default: 20)")
    file = Path(time.strftime("gpu-check-%Y%m%d-%H%M%S.jsonl"))
    parser.add_argument("--report", type=Path, default=file, metavar="FILE", help="a new file (default: named for now)")
    # CPUs stand in for GPUs, to test this program: what passes there says nothing about GPUs.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if unknown := [name for name in given.parts if name not in names]:
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(names)}")
    if not given.minutes > 0:
        parser.error(f"--minutes {given.minutes:g}: must be more than 0")
    return given


def _lack_of_packages() -> str | None:
    """What to install first; None if all is there."""
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        are = "is" if len(missing) == 1 else "are"
        return f"{', '.join(missing)} {are} not installed: {sys.executable} -m pip install {' '.join(missing)}"
    found = re.match(r"(\d+)\.(\d+)", version("torch"))
    if found and tuple(map(int, found.groups())) < OLDEST_TORCH:
        return f"torch {version('torch')} is too old: install {'.'.join(map(str, OLDEST_TORCH))} or newer"
    return None


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
