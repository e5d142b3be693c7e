"""The settings of torch's compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def torch_setting(config: Any, name: str, value: object) -> Iterator[None]:
    """Give a setting this value for a while, such as `torch_setting(torch._dynamo.config, "optimize_ddp", True)`.

    pytest's monkeypatch would delete it at the end, since torch does not keep it in the module's dictionary.
    """
    entry = config._config[name]
    default = entry.default
    with config.patch({name: value}):
        try:
            yield
        finally:
            entry.default = default  # laststep.compat.compiler changes it, for all threads
