"""Dotted keys of a configuration, such as optim.lr: listing them, setting one, parsing `key=value`.

YAML reads 1.10 as a number, yes as true and 4:00:00 as 14,400; a name is none of them. So each text is read twice: by
OmegaConf, for the keys that hold numbers, and with every scalar kept as text (`as_written`), for those that hold
strings.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from laststep.config.errors import ConfigError, first_line, nearest
from laststep.config.schema import Settings

INT_OR_RANGE, FLOAT_OR_AUTO, INT_OR_SIZE = "int or MIN-MAX", "float or auto", "int or SIZE"
UNITS = {"s": "seconds", "min": "minutes", "minutes": "minutes", "gb": "GB"}  # by the end of a key
TEXT = ("str", "str | None", "dict[str, str]")
TIME_KEYS, SBATCH_OPTIONS = ("launch.time_min", "launch.least_time_min"), "launch.slurm"
PARTITION = "launch.partition"
TIME_FORMATS = "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as in sbatch"


def parse_override(word: str) -> dict[str, Any]:
    """The value for each dotted key that a `key=value` word sets (several for `optim={...}`). Raises ConfigError."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word}: not a verb, an option or key=value; see --help")
    try:
        tree, written = OmegaConf.to_container(OmegaConf.from_dotlist([word])), as_written(text)
    except Exception as error:  # YAML and OmegaConf raise many types; the word is wrong in each case
        raise ConfigError(f"{shown(key, text)}: cannot be read as key=value: {first_line(error)}") from None
    return values_of(tree, {key: written})


def values_of(tree: Any, written: Any) -> dict[str, Any]:
    """The value for each dotted key of a tree that OmegaConf has read; `written` is the same with every scalar as text.

    Raises ConfigError for a time limit that cannot be read.
    """
    texts = dict(leaves(written)) if isinstance(written, dict) else {}  # `just words` is a key without a value
    return {key: value_of(key, _type_of(key), value, texts.get(key)) for key, value in leaves(tree)}


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each key of a Config as (dotted key, field, value), in the schema's order; of its class, with the defaults."""
    value_of = schema() if isinstance(schema, type) else schema
    for f in dataclasses.fields(value_of):
        value = getattr(value_of, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def kind_of(f: dataclasses.Field[Any]) -> str:
    """The type of a key as messages and the documentation show it, such as `int or MIN-MAX`."""
    return (
        str(f.type)
        .replace("float | int | str", FLOAT_OR_AUTO)
        .replace("int | str", INT_OR_RANGE)
        .replace("str | int", INT_OR_SIZE)
    )


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested dictionaries into dotted keys and values. An empty dictionary counts as a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@functools.cache
def known_fields() -> dict[str, dataclasses.Field[Any]]:
    """The field of each key, by its dotted name."""
    return {key: field for key, field, _ in fields_of(Settings)}


def assign(tree: Any, key: str, value: Any) -> None:
    """Set a dotted key of an OmegaConf tree. Raises ConfigError for a key or a value that does not fit the schema."""
    known = known_fields()
    given = shown(key, value)
    open_key = next((k for k, f in known.items() if f.type.startswith("dict") and key.startswith(k + ".")), None)
    if key not in known and open_key is None:
        sections = [k for k in known if k.startswith(key + ".")]
        if len(key) > 100:
            raise ConfigError(f"{key[:60]!r}...: no such key")  # from a file that is not a configuration
        if sections:
            raise ConfigError(f"{given}: {key} is a section; set one of {', '.join(sections)}")
        raise ConfigError(
            f"{key}: no such key; {nearest(key, list(known)) if '.' in key else _nearest_leaf(key, known)}"
        )
    if value == {} and key in known:
        return  # an empty dictionary in a file changes nothing
    try:
        OmegaConf.update(tree, key, value)
    except OmegaConfBaseException:
        kind = kind_of(known[open_key or key]).replace(" | None", " or null")
        unit = UNITS.get(key.rpartition("_")[2])
        hint = f", in {unit}" if unit else ""
        if kind.startswith("list") and isinstance(value, (str, int)):
            hint = f"; write {given.replace('=', '=[', 1)}]"
        elif kind.startswith("dict") and key == (open_key or key):
            hint = f"; write {key}.NAME=VALUE"
        raise ConfigError(f"{given}: must be of type {kind}{hint}") from None


def shown(key: str, value: Any) -> str:
    """`key=value` as a message may show it."""
    secret = key in known_fields() and known_fields()[key].metadata["secret"]
    return f"{key}={'***' if secret else 'null' if value is None else value}"


def replaced(tree: Any, names: Sequence[str], value: Any) -> Any:
    """A copy of nested dataclasses and dictionaries in which the value at the path `names` is replaced."""
    if not names:
        return value
    name, *rest = names
    if isinstance(tree, dict):
        return {**tree, name: replaced(tree.get(name, {}), rest, value)}
    return dataclasses.replace(tree, **{name: replaced(getattr(tree, name), rest, value)})


def escaped(value: Any) -> Any:
    """Escape each `${`, so that OmegaConf writes and reads the value as it is and does not interpolate it again."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list) else value


def _type_of(key: str) -> str | None:
    """The type of a key, or of the dictionary that it is in; None for a key that does not exist."""
    fields = known_fields()
    return next((str(fields[name].type) for name in fields if key == name or key.startswith(f"{name}.")), None)


def _nearest_leaf(name: str, known: dict[str, Any]) -> str:
    """A hint for a key without its section (`lr=1`): the full keys that end in it, else the most similar key."""
    full = [k for k in known if k.rpartition(".")[2] == name]
    return f"did you mean {' or '.join(full)}?" if full else nearest(name, list(known))


def as_written(text: str) -> Any:
    """A YAML text, with each of its scalars as a string."""
    return yaml.load(text, Loader=yaml.BaseLoader)


def value_of(key: str, kind: str | None, value: Any, written: Any) -> Any:
    """The value of a key of this type (None: not a key), read by OmegaConf as `value`, from the text `written`.

    Raises ConfigError for a time limit that sbatch would not take.
    """
    if key in TIME_KEYS and isinstance(written, str) and not isinstance(value, (bool, float, type(None))):
        return minutes(written, key)
    if key == PARTITION and isinstance(value, list) and all(isinstance(name, str) for name in written):
        return ",".join(written) or None  # as sbatch has several
    if key == "script" and isinstance(value, str):  # as one types it: "train.py --lr 3e-4"
        return shlex.split(value)
    if kind == "list[str]" and isinstance(value, list):
        return [_text(*pair) for pair in zip(value, written)]
    if kind in TEXT or (key.startswith(f"{SBATCH_OPTIONS}.") and not isinstance(value, bool)):
        return _text(value, written)
    if key.startswith("args.") and isinstance(value, bool) and str(written).lower() not in ("true", "false"):
        return written  # mixed_precision=no: a field that is bool takes the text as well
    return value


def minutes(text: str, key: str = TIME_KEYS[0]) -> int:
    """A time limit in minutes, rounded up, from any of Slurm's formats (man sbatch, --time). Raises ConfigError."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    days = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text)
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)", text)
    if days:
        d, h, m, s = (int(part or 0) for part in days.groups())
    elif clock:
        d, (h, m, s) = 0, (int(part or 0) for part in clock.groups())
    else:
        raise ConfigError(f"{key}={text}: must be {TIME_FORMATS}")
    return 24 * 60 * d + 60 * h + m + -(-s // 60)


def _text(value: Any, written: Any) -> Any:
    """Replace what YAML took for a number, a date or a truth value by its text. Quoted text and null stay."""
    return written if isinstance(written, str) and not isinstance(value, (str, list, dict, type(None))) else value
