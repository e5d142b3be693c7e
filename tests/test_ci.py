"""What CI does is what anyone can run: `.ci/run`, whoever hosts the project."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.support.project import PROJECT


def test_the_workflow_runs_only_our_script() -> None:
    """A check that lived in the workflow alone would fail there after it had passed everywhere else."""
    workflow: Any = yaml.safe_load((PROJECT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [line.partition("  #")[0] for step in job["steps"] for line in step.get("run", "").splitlines()]
    assert commands == ['git config --system --add safe.directory "$GITHUB_WORKSPACE"', "bash .ci/run"]
    assert [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step] == ["actions/checkout"]


def test_the_script_checks_and_tests() -> None:
    """In CI a missing program fails the tests that need it: if they were skipped, nobody would notice."""
    lines = (PROJECT / ".ci" / "run").read_text().splitlines()
    assert "make check" in lines and "LASTSTEP_REQUIRE_ALL=1 make test" in lines


def test_contributing_names_what_exists() -> None:
    """The guide's commands are targets of the Makefile, and its files are there."""
    guide = (PROJECT / "CONTRIBUTING.md").read_text()
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)", guide))
    assert {"check", "test", "test-fast"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    files = set(re.findall(r"`([\w.]+/[\w./]+|[A-Z]+\.md)`", guide))
    assert [file for file in files if not (PROJECT / file).exists()] == []
