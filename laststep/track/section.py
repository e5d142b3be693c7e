"""The section `track` of the configuration, and what its words mean; refused here by words alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laststep.config.errors import ConfigError, nearest
from laststep.config.setting import setting

HOW = "mode: online, or offline (`track RUN` sends); by: laststep, or script"


@dataclass
class Track:
    """Trackers that show the run, e.g. `track.wandb.project=mine`; without one, nothing is sent."""

    wandb: dict[str, Any] = setting({}, f"Weights & Biases. project; entity; tags; {HOW}")
    mlflow: dict[str, Any] = setting({}, f"MLflow. uri: http://HOST:PORT, or sqlite:////PATH; experiment; tags; {HOW}")
    trackio: dict[str, Any] = setting({}, "trackio, on this machine's disk (TRACKIO_DIR). project; mode; by")


# What each tracker takes: the first word must be there.
WORDS = {
    "wandb": ("project", "entity", "tags", "mode", "by"),
    "mlflow": ("experiment", "uri", "tags", "mode", "by"),
    "trackio": ("project", "mode", "by"),
}
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
CHOICES = {"mode": ("online", "offline"), "by": ("laststep", "script")}
NAME = re.compile(r"[^/\\#?%:]{1,128}")  # what W&B allows, and the others, too


@dataclass(frozen=True)
class Wish:
    """What a configuration says about one tracker."""

    tracker: str
    project: str  # MLflow: the experiment
    entity: str | None = None
    uri: str | None = None
    tags: tuple[str, ...] = ()
    offline: bool = False  # the sender beside the training waits; the verb `track` sends
    by_script: bool = False  # the user's script sends; we do not


def wishes(config: Any) -> list[Wish]:
    """What a configuration wants. Raises ConfigError for words that make no sense."""
    section = getattr(config, "track", None)
    if section is None:  # the configuration is older
        return []
    return [_wish(name, given) for name, given in vars(section).items() if given]


def wish_of(config: Any, tracker: str) -> Wish:
    """What a configuration wants of this tracker. Raises ConfigError."""
    found = {wish.tracker: wish for wish in wishes(config)}
    if tracker not in found:
        raise ConfigError(f"{tracker}: the run has no such tracker; {nearest(tracker, list(found))}")
    return found[tracker]


def _wish(tracker: str, given: Mapping[str, Any]) -> Wish:
    key, known = f"track.{tracker}", WORDS[tracker]
    for word, value in given.items():
        if word not in known:
            raise ConfigError(f"{key}.{word}: no such word; {nearest(str(word), known)}")
        if choices := CHOICES.get(str(word)):
            if value not in choices:
                raise ConfigError(f"{key}.{word}={value}: must be one of {', '.join(choices)}")
        elif word == "tags":
            if not isinstance(value, (list, str)):
                raise ConfigError(f"{key}.tags={value}: must be a list of words")
        elif not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
            raise ConfigError(f"{key}.{word}={value}: must be a name")
    name = given.get(known[0])
    if name is None:
        raise ConfigError(f"{key}: {known[0]} is missing; add {key}.{known[0]}=NAME")
    if not NAME.fullmatch(str(name)):
        raise ConfigError(f"{key}.{known[0]}={name}: at most 128 characters, and none of / \\ # ? % :")
    tags = given.get("tags") or []
    return Wish(
        tracker,
        str(name),
        entity=None if given.get("entity") is None else str(given["entity"]),
        uri=None if given.get("uri") is None else str(given["uri"]),
        tags=tuple(map(str, [tags] if isinstance(tags, str) else tags)),
        offline=given.get("mode") == "offline",
        by_script=given.get("by") == "script",
    )


def without_sender(wish: Wish) -> Wish:
    """The same, sent now."""
    return dataclasses.replace(wish, offline=False)
