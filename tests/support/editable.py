"""Editable installs as setuptools makes them, without installing anything."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


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
