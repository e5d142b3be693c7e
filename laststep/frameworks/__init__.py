"""Other trainers, resumed exactly, and a trainer for Ray clusters: an adapter for each, which a script imports by name.
Nothing else imports them, and they alone import the framework. Not here: the loop around the user's function, which is
in `loops`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from laststep.config.errors import ConfigError

# What each adapter needs, and the versions that it supports.
PACKAGES = {
    "laststep.frameworks.fabric": "lightning",
    "laststep.frameworks.lightning": "lightning",
    "laststep.frameworks.ray": "ray",
    "laststep.frameworks.transformers": "transformers",
}
VERSIONS = {
    "lightning": "lightning>=2.5,<3",
    "ray": "ray[train]>=2.58,<3",
    "transformers": "transformers[torch]>=5,<6",
}


def lightning_part(part: str) -> Any:
    """Lightning's package `pytorch` or `fabric`: of `lightning`, or of `pytorch_lightning` if the script has imported
    that. The two know nothing of each other."""
    other = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}
    return importlib.import_module(other[part] if "pytorch_lightning" in sys.modules else f"lightning.{part}")


def missing(source: str, adapter: str, package: str) -> ConfigError:
    """What to raise when an adapter's framework cannot be imported; `source` says for whom."""
    return ConfigError(f"{source}: {adapter} needs {package}: pip install '{VERSIONS[package]}'")


def unusable(adapter: str, error: ImportError) -> ConfigError:
    """What an adapter raises when its framework cannot be imported."""
    return missing(f"{type(error).__name__}: {error}", adapter, PACKAGES[adapter])
