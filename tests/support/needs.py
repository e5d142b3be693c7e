"""What a test needs of the machine: in CI its absence is a failure, elsewhere the test is skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

# Packages that Laststep works with, and imports only for those who name them.
OPTIONAL = frozenset({"accelerate", "lightning", "mlflow", "optuna", "ray", "transformers", "wandb"})


def require(missing: str | None) -> None:
    """Skip the test if something is `missing`, or fail it in CI (LASTSTEP_REQUIRE_ALL=1)."""
    if missing is None:
        return
    if os.environ.get("LASTSTEP_REQUIRE_ALL"):
        pytest.fail(missing)
    pytest.skip(missing)


def require_program(name: str, install: str, path: str | None = None) -> None:
    """Require a program on the PATH (or on `path`); `install` is the command that installs it."""
    require(None if shutil.which(name, path=path) else f"no {name} on this machine: {install}")


def require_root(reason: str) -> None:
    """Require that the tests run as root."""
    require(None if os.geteuid() == 0 else f"needs root: {reason}")


def require_package(name: str) -> None:
    """Require an optional package."""
    require(None if importlib.util.find_spec(name) else f"no {name} in this environment: pip install -e .[dev]")
