"""Writes a section of docs/reports.md: which tests of tests/slurm fail on which Slurm.

`python -m tools.slurm_versions FILE...` reads what `make test-slurm` has written, a JUnit file per version. Exits with
status 1 if a test failed on any of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tools.scale import table
from tools.sections import put

PAGE = """\
## Slurm versions

`make test-slurm`: all tests of `tests/slurm` on the Slurm of this machine; with `RELEASE=trixie` or `RELEASE=sid`, on
that of another Debian release, in a chroot. Newer tests are not counted.

{totals} {results}
"""
PASSED = "passed"
Results = Mapping[str, str]  # outcome by test


def read(file: Path) -> tuple[str, Results]:
    """The version that a JUnit file is about, and the outcome of each of its tests."""
    suite = next(ElementTree.parse(file).iter("testsuite"))
    outcomes = {}
    for case in suite.iter("testcase"):
        module = case.attrib["classname"].rpartition(".")[2]
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        outcomes[f"{module}::{case.attrib['name']}"] = bad[0] if bad else PASSED
    return suite.attrib["name"], outcomes


def page(versions: Mapping[str, Results]) -> str:
    """The whole page: how many tests have passed on each version, and each test that has not passed on all of them."""
    tests = sorted({test for results in versions.values() for test in results})
    passed = {version: sum(outcome == PASSED for outcome in found.values()) for version, found in versions.items()}
    totals = "\n".join(f"* {version}: {passed[version]} of {len(found)} passed" for version, found in versions.items())
    found = {test: [results.get(test, "not run") for results in versions.values()] for test in tests}
    rows = [(f"`{test}`", *outcomes) for test, outcomes in found.items() if set(outcomes) != {PASSED}]
    return PAGE.format(totals=totals, results="\n" + table(("test", *versions), rows) + "\n" if rows else "")


def main(words: Sequence[str] | None = None) -> int:
    """Write the page from the files that are named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.slurm_versions", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    # Oldest first: "Slurm 22.05.8, Python 3.11" before "Slurm 24.11.5, Python 3.13".
    number = lambda found: [int(digits) for digits in re.findall(r"\d+", found[0])]  # noqa: E731
    versions = dict(sorted(map(read, parser.parse_args(words).files), key=number))
    put(page(versions))
    return int(any(outcome != PASSED for results in versions.values() for outcome in results.values()))


if __name__ == "__main__":
    sys.exit(main())
