"""Writes docs/configuration.md, which lists every key of the configuration, from the schema.

Run `python -m tools.reference` after changing the schema in laststep/config; tests/test_docs.py fails until you do.
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.keys import fields_of, kind_of

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

Each layer overrides the one before: the defaults below, a site profile (`--site`: a name in `configs/site/`, or a
path), a YAML file (`--config`: a name in `configs/`, or a path), and the `key=value` words of the command.
`--dry-run` prints the result. The run folder keeps it as `config.yaml`, which a resumed run reads.

`=` shows the default; the type, the limits or the other values follow. `null` means "none".
"""


def reference() -> str:
    """The whole page."""
    config = Config()
    sections: dict[str, list[str]] = {}
    for key, field, default in fields_of(config):
        entry = f"* `{key}` = {_value(key, field, default)}: {field.metadata['help']}"
        sections.setdefault(key.rpartition(".")[0], []).append(entry)
    page = [HEAD]
    for section, entries in sections.items():
        title = type(getattr(config, section)).__doc__ if section else "The whole run."
        page += [f"## {section or 'Top level'}\n", f"{title}\n"]
        page += [textwrap.fill(each, 120, subsequent_indent="  ", break_on_hyphens=False) for each in entries]
        page.append("")
    return "\n".join(page)


def _value(key: str, field: dataclasses.Field[Any], default: Any) -> str:
    """The default, and what it leaves open: the limits, the type of what is null, or the other values."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    given = _default(default)
    if choices:
        return f"{given} (or {', '.join(f'`{choice}`' for choice in choices if choice != default)})"
    type_ = kind_of(field).removesuffix(" | None")
    shown = type_ if default is None or " or " in type_ else ""
    if least is not None:
        zero = "[0]" if "list" in type_ else "0"
        shown += f" {'>' if least == 0 and _refused(f'{key}={zero}') else '>='} {least:g}"
    if default is not None and str(field.type).endswith("None"):
        shown += " or null"
    return f"{given} ({shown.strip()})" if shown else given


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
