"""What nobody may read who can read a run, or what leaves it: webhooks, keys, passwords, values of launch.env.

Keys that `setting(..., secret=True)` declares: before anything is shown or written, `set_apart` puts masks in their
place: `slack://***`. Only `write` writes them, to a file of the run folder that its owner alone may read. A
configuration that is read again has the masks. All else that is sent elsewhere passes through `Secrets`, which hides
them wherever they are quoted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from laststep.config.keys import fields_of, known_fields, replaced
from laststep.rundir import aside

T = TypeVar("T")
MASK = "***"
_apart: dict[str, list[str]] = {}  # the values that this process has set apart last, by key


def masked(value: str) -> str:
    """What may be shown of a value: of a URL its scheme. A mask stays as it is."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value)
    return f"{scheme[0] if scheme else ''}{MASK}"


def is_mask(value: str) -> bool:
    """Whether this stands for a value that is kept elsewhere."""
    return value == masked(value)


def masked_words(words: Sequence[str]) -> list[str]:
    """What was typed, as it may be shown."""
    keys = [key for key, field in known_fields().items() if field.metadata.get("secret")]
    return [f"{key}={MASK}" if (key := word.partition("=")[0]) in keys else word for word in words]


def set_apart(config: T) -> T:
    """The configuration with masks for its secrets, which the next `write` writes."""
    _apart.clear()
    for key, field, value in fields_of(config):
        if field.metadata.get("secret") and value and not all(map(is_mask, value)):
            _apart[key] = list(value)
            config = replaced(config, key.split("."), [masked(each) for each in value])
    return config


def forget() -> None:
    """What follows is no run of the user's: write nothing."""
    _apart.clear()


def write(path: Path) -> None:
    """Write what was set apart, if anything was, readable by its owner alone. Raises OSError."""
    if not _apart:
        return
    temporary = aside(path)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as opened:
        json.dump(_apart, opened)
    temporary.replace(path)


def read(path: Path, key: str) -> list[str]:
    """The values of a key; none where nothing was set apart, or may be read."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [str(value) for value in kept.get(key, [])]


HIDDEN = "(hidden)"
LEAST = 6  # a shorter value, such as 1 or INFO, would also hide what has nothing to do with it
# Names of keys, options and variables whose values are secrets.
NAMES = re.compile(
    r"(?i)(^|[_.\-])(api_?-?key|key|token|secret|passw(or)?d|passwd|pwd|credentials?|webhooks?|auth|dsn|private)([_.\-]|$)"
)
# Sections and keys all of whose values are: environment variables, and where alerts go.
WHOLE = re.compile(r"launch\.env\.|alert\.to(\.|$)")
# Secrets by their looks, of which nothing else says that they are some.
LOOKS = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_\-]{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abpr]-[A-Za-z0-9\-]{10,}|wandb_v1_\w{20,}|https://hooks\.slack\.com/\S+"
    r"|https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\S+|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]{5,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
IN_URL = re.compile(r"(?<=://)[^/\s:@]+(?::[^/\s@]*)?@")  # user:password@
# `token = "..."`, `--api-key ...`, in code and in command lines.
_WORD = r"(?:api_?-?key|token|secret|passw(?:or)?d|webhook)"
ASSIGNED = re.compile(
    rf"(?i)(--[\w\-]*{_WORD}[\w\-]*\s+|[\w.\-]*{_WORD}[\w.\-]*[\"']?\s*[:=]\s*)([\"']?)([^\s\"',;]{{6,}})"
)
NO_SECRETS = ("PWD", "OLDPWD", "SSH_AUTH_SOCK")  # variables whose names look as if


class Secrets:
    """The secrets of one run."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the nested mapping of a configuration."""
        found = {value for key, value in _leaves(config) if is_secret(key) and len(value) >= LEAST}
        found |= {
            value
            for name, value in os.environ.items()
            if NAMES.search(name) and name not in NO_SECRETS and len(value) >= 2 * LEAST
        }
        self._known = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """A text without any secret."""
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        text = LOOKS.sub(HIDDEN, text)
        text = IN_URL.sub(f"{HIDDEN}@", text)
        return ASSIGNED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}" if _is_value(found[3]) else found[0], text)

    def without(self, config: Any, key: str = "") -> Any:
        """A configuration, or a part of it at `key`, in which the secrets are hidden."""
        if isinstance(config, Mapping):
            return {name: self.without(value, f"{key}.{name}" if key else str(name)) for name, value in config.items()}
        if isinstance(config, (list, tuple)):
            if key in ("script", "launch.setup", "launch.srun"):  # words of commands
                return [self.hide(str(word)) for word in _words(config)]
            return [self.without(value, key) for value in config]
        if config is not None and not isinstance(config, bool) and is_secret(key):
            return HIDDEN
        return self.hide(config) if isinstance(config, str) else config


def is_secret(key: str) -> bool:
    """Whether the value of a key of the configuration is a secret."""
    return bool(WHOLE.match(key) or NAMES.search(key))


def _is_value(word: str) -> bool:
    """Whether a word after `token =` may be a secret, and is no call, no number, no name in code."""
    return not re.fullmatch(r"[\d.]+|[\w.]+\(.*|None|True|False|self\..*|args\..*|os\..*|config\..*", word)


def _words(words: Any) -> Iterator[str]:
    """Words of a command, in which what follows an option for a secret is hidden."""
    hides = False
    for word in map(str, words):
        yield HIDDEN if hides else word
        option, equals, _ = word.partition("=")
        hides = word.startswith("-") and not equals and bool(NAMES.search(option.lstrip("-")))


def _leaves(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _leaves(value, key)
    elif config is not None and not isinstance(config, bool):
        yield key, str(config)
