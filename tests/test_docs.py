"""The documentation says what the code does."""

from __future__ import annotations

import difflib
import re

from tests.support.project import PROJECT
from tools import reference, scale


def test_configuration_reference_is_current() -> None:
    """A key that the page lacks, or describes as it was, sends users wrong. The cure: python -m tools.reference"""
    assert reference.TARGET.read_text() == reference.reference()


def test_scale_page_is_current() -> None:
    """Otherwise it would quote outdated figures. To update it: python -m tools.scale"""
    assert scale.TARGET.read_text() == scale.page()


def test_readme_shows_what_a_custom_loop_changes() -> None:
    """README promises that little of a loop must change, and shows all of the difference."""
    plain, custom = (
        (PROJECT / "examples" / f"{name}_loop.py").read_text().splitlines() for name in ("plain", "custom")
    )
    _, _, *difference = difflib.unified_diff(plain, custom, lineterm="", n=0)
    assert "\n".join(difference) in (PROJECT / "README.md").read_text()
    assert sum(line.startswith("+") for line in difference) <= 20


def test_the_files_that_design_names_exist() -> None:
    """The page says where everything is: a reference to a file that has moved would mislead a newcomer."""
    text = (PROJECT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`((?:trainer|tests|benchmarks|examples|docs|tools)/[\w./]+)`", text))
    assert len(named) > 40, "the twenty questions are answered by the names of files"
    assert [name for name in sorted(named) if not (PROJECT / name).exists()] == []
