"""Writes configuration.md beside it: every key of the configuration, from the schema itself.

`python -m docs.reference` after a change of trainer/config/config.py; a test says when that was forgotten.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.config.keys import fields_of, kind_of

TARGET = Path(__file__).resolve().parent / "configuration.md"
HEAD = """\
# Configuration

A run's configuration is the schema's defaults, then a YAML file (`--config`, a name in `configs/` or a path), then the
`key=value` words of the command; the later one wins. `python launch.py --dry-run ...` prints the result. `null` means
"none". The run folder keeps the resolved configuration as `config.yaml`, and a resumed run reads that one.

This page is written by `python -m docs.reference` from `trainer/config/config.py`.
"""


def reference() -> str:
    """The whole page."""
    config = Config()
    sections: dict[str, list[str]] = {}
    for key, field, default in fields_of(config):
        row = f"| `{key}` | {_kind(key, field)} | {_default(default)} | {field.metadata['help']} |"
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    page = [HEAD]
    for section, rows in sections.items():
        title = type(getattr(config, section)).__doc__ if section else "The run as a whole."
        page += [f"## {section or 'Top level'}\n", f"{title}\n"]
        page += ["| key | type | default | what it does |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(page)


def _kind(key: str, field: dataclasses.Field[Any]) -> str:
    """Type and bounds, or the choices."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kind, null = kind_of(field).removesuffix(" | None"), str(field.type).endswith("None")
    above = least == 0 and _refused(f"{key}=0")
    bound = "" if least is None else f" {'above' if above else 'at least'} {least:g}"
    return f"{kind}{bound}{', or null' if null else ''}"


def _refused(word: str) -> bool:
    """Whether a configuration with this word is."""
    try:
        Config.load(None, [word])
    except ConfigError:
        return True
    return False


def _default(value: Any) -> str:
    """A default as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{value}`"


if __name__ == "__main__":
    TARGET.write_text(reference())
