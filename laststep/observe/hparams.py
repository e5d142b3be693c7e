"""The entry of a sweep's run in TensorBoard's tab HPARAMS: the keys that the sweep varies, and whether it has finished.

The tab takes the metrics from the run's curves by itself. Importing this module imports tensorboard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from laststep.compat import hparams_parts
from laststep.observe.events import framed
from laststep.records.append_only import append
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir

# It comes before all other event files of the run: TensorBoard's own reader never returns to an earlier file.
FILE = "events.out.tfevents.000000.hparams"


def write_hparams(run: RunDir, finished: bool) -> None:
    """Write the file, or add what it lacks; nothing for a run that is not part of a sweep. Raises OSError."""
    varied = _varied(run)
    with run.metrics.open("rb") as file:
        first = file.readline()
    if not varied or not first.endswith(b"\n"):
        return
    at = json.loads(first)["time"]
    wanted = _start(varied, at) + (_end(at) if finished else b"")
    path = run.tensorboard / FILE
    found = path.read_bytes() if path.exists() else b""
    if not wanted.startswith(found):  # damaged, or the run has been extended
        path.unlink()
        found = b""
    if lacking := wanted[len(found) :]:
        append(path, lacking)


def _varied(run: RunDir) -> dict[str, Any]:
    """The keys that the run's sweep varies, with this run's values; empty without a sweep."""
    if (sweep := run.sweep_folder) is None:
        return {}
    lines = (line for line in read_lines(sweep.sweep) if line["run"] == run.name)
    return {key: value for key, value in next(lines, {}).items() if key != "run"}


def _start(varied: Mapping[str, Any], at: float) -> bytes:
    parts = hparams_parts()
    session = parts.SessionStartInfo(start_time_secs=at)
    for key, value in varied.items():
        if isinstance(value, bool):
            session.hparams[key].bool_value = value
        elif isinstance(value, (int, float)):
            session.hparams[key].number_value = value
        else:
            session.hparams[key].string_value = str(value)
    return _record(parts.START_TAG, parts.PluginData(session_start_info=session), at)


def _end(at: float) -> bytes:
    parts = hparams_parts()
    return _record(parts.END_TAG, parts.PluginData(session_end_info=parts.SessionEndInfo(status=parts.SUCCESS)), at)


def _record(tag: str, data: Any, at: float) -> bytes:
    parts = hparams_parts()
    value = parts.Summary.Value(tag=tag, metadata=parts.metadata(data), tensor=parts.nothing)
    return framed(parts.Event(wall_time=at, summary=parts.Summary(value=[value])))
