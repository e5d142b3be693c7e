"""Other trainers, resumed exactly: an adapter for each, which a user's script imports by name. Nothing else imports
them, and they alone import the framework. Not here: the loop around the user's function, which is in `loops`."""

from __future__ import annotations

from trainer.config.errors import ConfigError

VERSIONS = {"lightning": ">=2.5,<3", "transformers": ">=5,<6", "accelerate": ">=1.1,<2"}


def missing(package: str, error: ImportError) -> ConfigError:
    """What to raise when a framework cannot be imported."""
    module = f"trainer.frameworks.{package}"
    return ConfigError(f"{module} cannot import {package} ({error}): pip install '{package}{VERSIONS[package]}'")
