"""The project's folder, how its ranks get collectives that do not fail when a peer dies, and editable installs as
setuptools makes them, without installing anything."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
# Either makes gloo silent, see tests/silent/silent_backend.py: this folder on PYTHONPATH for ranks that are started as
# commands, this variable for those that are forked from a test process (tests/support/ranks.py).
SILENT_PATH = str(PROJECT / "tests" / "silent")
SILENT = "LASTSTEP_TEST_SILENT"


def install_finder(name: str, mapping: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find these modules by setuptools' own finder: the module that an editable install generates."""
    from setuptools.command.editable_wheel import _finder_template  # type: ignore[import-untyped]

    module = ModuleType(f"__editable___{name}_finder")
    exec("".join(_finder_template(name, mapping, {})), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    monkeypatch.setattr(sys, "path", list(sys.path))
    module.install()
