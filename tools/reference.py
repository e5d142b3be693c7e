"""Writes docs/configuration.md, which lists every key of the configuration, from the schema.

Run `python -m tools.reference` after changing the schema in laststep/config; tests/test_docs.py fails until you do.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.keys import fields_of, kind_of

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

A run's configuration has four layers; a later layer overrides an earlier one:

1. the defaults in the tables below,
2. a site profile (`--site`: a name in `configs/site/`, or a path),
3. a YAML file (`--config`: a name in `configs/`, or a path),
4. the `key=value` words of the command.

`python launch.py --dry-run ...` prints the result. `null` means "none". The run folder keeps the resolved configuration
as `config.yaml`, and a resumed run reads that file.

`python -m tools.reference` writes this page from the schema in `laststep/config`.
"""


def reference() -> str:
    """The whole page."""
    config = Config()
    sections: dict[str, list[str]] = {}
    for key, field, default in fields_of(config):
        row = f"| `{key}` | {_type(key, field)} | {_default(default)} | {field.metadata['help']} |"
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    page = [HEAD]
    for section, rows in sections.items():
        title = type(getattr(config, section)).__doc__ if section else "The whole run."
        page += [f"## {section or 'Top level'}\n", f"{title}\n"]
        page += ["| key | type | default | what it does |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(page)


def _type(key: str, field: dataclasses.Field[Any]) -> str:
    """The type column: type and limits, or the allowed values."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kind, null = kind_of(field).removesuffix(" | None"), str(field.type).endswith("None")
    above = least == 0 and _refused(f"{key}={'[0]' if 'list' in str(field.type) else 0}")
    bound = "" if least is None else f" {'>' if above else '>='} {least:g}"
    return f"{kind}{bound}{' or null' if null and field.default is not None else ''}"


def _refused(word: str) -> bool:
    """Whether a configuration with this `key=value` word is refused."""
    try:
        Config.load(None, [word])
    except ConfigError:
        return True
    return False


def _default(value: Any) -> str:
    """A default as you would type it."""
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{value}`"


if __name__ == "__main__":
    TARGET.write_text(reference())
