"""The upper rooms: one line of `ROOMS` for each, and all that the core does for them.

A room is a folder of laststep/ without which the rest trains and resumes. The core knows none of them: it asks this
file, which names modules by strings and imports them when they are needed. A room may have

    sections    of the configuration, each a dataclass whose fields are made by `setting`; they stand before `launch`
    verbs       each in laststep/cli/VERB.py, and in the table of laststep/cli/verbs.py
    hooks       a module with any of these functions, which must be quick, and import neither torch nor a tracker:

        check(config, machine)              before a submission; raises ConfigError
        environment(config, run, world)     variables to set in a rank before the user's code is imported; None removes
        programs(config, run)               the programs that run beside the training: laststep.ranks.beside.Beside
        outside(run)                        an attempt has ended, and what started its ranks, or watches, looks on
        cells(run)                          cells for the table of `status`: texts by title
        facts(run)                          what `status RUN` and the report say, by name
        fields(run)                         what `status --json` has besides, by name
        figures(run)                        the report's curves by step, by title: laststep.report.curves.Curve
        links(run)                          where else a run can be looked at, by name; for `status` and the report

An error of `check` is the user's; any other error of a hook is said, and changes nothing about the run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from laststep.rundir import RunDir
from laststep.say import say


class Room(NamedTuple):
    """One upper room."""

    name: str  # its folder: laststep/NAME
    sections: Mapping[str, str] = {}  # module:Class, by the section's name
    hooks: str = ""
    verbs: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether the folder exists."""
        return (Path(__file__).parent / self.name / "__init__.py").exists()


PROBED = "LASTSTEP_PROBE"  # set in ranks of `prove`, --smoke and `replay`, see laststep.records.probes
ROOMS = (
    Room("telemetry", {"telemetry": "laststep.telemetry:Telemetry"}, "laststep.telemetry.readings"),
    Room("alert", {"alert": "laststep.alert:Alert"}, "laststep.alert.looker"),
    Room("frameworks"),
    Room("doctor", verbs=("doctor",)),
    Room("proof", verbs=("prove",)),
    Room("report", verbs=("report",)),
    Room("replay", verbs=("replay", "samples", "diff")),
    Room("track", {"track": "laststep.track:Track"}, "laststep.track.wanted", verbs=("track",)),
)


@functools.cache
def rooms_here() -> tuple[Room, ...]:
    """The rooms whose folders exist."""
    return tuple(room for room in ROOMS if room.is_here)


def lacks_verb(verb: str) -> bool:
    """Whether this verb is of a room that is not here."""
    return any(verb in room.verbs for room in ROOMS if not room.is_here)


def section_names() -> list[str]:
    """The names of the sections of all rooms that are here."""
    return [name for room in rooms_here() for name in room.sections]


def with_sections(core: type) -> type:
    """The dataclass of all keys, with the sections of the rooms before its last field."""
    if not section_names():
        return core
    *fields, last = dataclasses.fields(core)
    more = [(name, of, dataclasses.field(default_factory=of)) for name, of in _section_classes()]
    own = [(field.name, field.type, field) for field in fields]
    space = {"__doc__": core.__doc__}
    whole = dataclasses.make_dataclass(core.__name__, [*own, *more, (last.name, last.type, last)], namespace=space)
    whole.__module__ = core.__module__  # where its annotations are looked up; from Python 3.12 on, not in `space`
    return whole


def _section_classes() -> Iterator[tuple[str, type]]:
    for room in rooms_here():
        for name, place in room.sections.items():
            module, _, inner = place.partition(":")
            yield name, getattr(importlib.import_module(module), inner)


def check(config: Any, machine: Any) -> None:
    """Every room's check before a submission. Raises ConfigError."""
    for hook in _hooks("check"):
        hook(config, machine)


def export(config: Any, run: RunDir, world: Any) -> Callable[[], None]:
    """Set the variables that rooms want in this rank, or remove them. Call what this returns to put back what was there
    before."""
    wanted: dict[str, str | None] = {}
    for hook in _hooks("environment"):
        wanted |= _safely(hook, config, run, world) or {}
    before = {name: os.environ.get(name) for name in wanted}

    def put(variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(wanted)
    return lambda: put(before)


def programs(config: Any, run: RunDir) -> list[Any]:
    """What runs beside the training: a list of laststep.ranks.beside.Beside. Nothing where a run is only tried out."""
    if PROBED in os.environ:
        return []
    return [program for hook in _hooks("programs") for program in _safely(hook, config, run) or ()]


def look_on(run: RunDir) -> None:
    """An attempt has ended: for what has started its ranks, or watches the run. Takes seconds at most."""
    for hook in _hooks("outside"):
        _safely(hook, run)


def told(what: Literal["cells", "facts", "fields", "figures", "links"], run: RunDir) -> dict[str, Any]:
    """What the rooms tell about the run, by name."""
    return {name: value for hook in _hooks(what) for name, value in (_safely(hook, run) or {}).items()}


def _hooks(name: str) -> Iterator[Callable[..., Any]]:
    for room in rooms_here():
        if room.hooks and (hook := getattr(importlib.import_module(room.hooks), name, None)) is not None:
            yield hook


def _safely(hook: Callable[..., Any], *args: Any) -> Any:
    """What a hook returns; None if it fails, which is said."""
    try:
        return hook(*args)
    except Exception as error:
        say(f"WARNING: {hook.__module__}.{hook.__name__}: {type(error).__name__}: {error}; the run continues without")
        return None
