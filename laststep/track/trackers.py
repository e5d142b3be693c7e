"""What a tracker is to the sender: opened, given rows in order, and asked what it has. One class per tracker.

`open` continues the run of this id, or begins it, and says which steps the tracker has for certain: after a sender was
killed nobody else knows. Each method raises what its package raises; the sender tries again later.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.track.machines import Measure, curve, means
from laststep.track.wanted import Wish

BATCH = 500  # metrics of one request to MLflow, whose limit is 1,000


class Row(NamedTuple):
    """What the lines of one step hold, by the names of the curves."""

    step: int
    time: float  # Unix seconds
    values: dict[str, float]
    media: tuple[Path, ...] = ()


class Facts(NamedTuple):
    """What is known of a run besides its steps; no secrets."""

    name: str
    group: str | None  # its sweep
    config: dict[str, Any]
    about: dict[str, Any]  # flat: commit, hosts, command, attempts, goodput ...
    files: dict[str, str]  # texts by name: config.yaml, code.diff, packages.txt


class Tracker:
    """A run of a tracker."""

    measures_with_rows: ClassVar[bool] = False  # what the machines did must be given before the rows

    def __init__(self, wish: Wish, run: RunDir, mark: str, run_id: str | None) -> None:
        """`mark` names the run for good; `run_id` is None before the tracker has made one of its own."""
        self.wish, self.run, self.mark, self.id = wish, run, mark, run_id
        self.url: str | None = None

    def open(self, facts: Facts) -> int | None:
        """Begin or continue. Returns the last step that the tracker has, None if only the sender's own record says."""
        raise NotImplementedError

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """Send these rows, which rise in steps. Those up to the step `doubtful` may have been sent before."""
        raise NotImplementedError

    def measured(self) -> dict[str, float] | None:
        """After `open`: the time of the last line of each node that the tracker has; None if only the sender's own
        record says."""
        return None

    def measure(self, measures: Sequence[Measure]) -> None:
        """Send what the machines did. The sender may have been killed since it sent the same."""

    def describe(self, facts: Facts, files: bool) -> None:
        """Send the facts, and the files if they have changed."""
        raise NotImplementedError

    def weights(self, file: Path) -> None:
        """Send the exported weights."""
        raise ConfigError(f"--weights: {self.wish.tracker} takes no files")

    def close(self, finished: bool) -> None:
        """Send what is left; `finished`: the run is over."""


class Wandb(Tracker):
    """Weights & Biases. Steps must rise; lower ones are dropped. So what the machines did stands in the row of the next
    step, as the mean of the lines since the step before, with a time axis of its own."""

    measures_with_rows = True

    def open(self, facts: Facts) -> int | None:
        """See Tracker."""
        import wandb

        folder = self.run.track("wandb")
        quiet = {"console": "off", "disable_git": True, "save_code": False, "silent": True, "x_disable_stats": True}
        self._run: Any = wandb.init(
            project=self.wish.project,
            entity=self.wish.entity,
            id=self.id,
            name=facts.name,
            group=facts.group,
            tags=list(self.wish.tags) or None,
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(**quiet, x_disable_meta=True, x_disable_machine_info=True, init_timeout=60),
        )
        offline = self._run.offline
        self.url = None if offline else self._run.url
        # Known to the server is what an earlier sender has got through, which may be less than it was given.
        self._has = newest_in_files(folder) if offline else max(0, self._run.step - 1)
        self._late: dict[str, Any] = {}
        self._waiting: list[Measure] = []  # for a row of their step, or of a later one
        self._in_row: list[Measure] = []  # what stands in the newest row, which can still be added to
        self._logged = -1  # the step of that row
        self._axes: set[str] = set()  # of nodes
        self._times = times_in_files(folder) if offline else times_in(dict(self._run.summary)) or None
        return self._has

    def measured(self) -> dict[str, float] | None:
        """See Tracker."""
        return self._times

    def measure(self, measures: Sequence[Measure]) -> None:
        """See Tracker."""
        for node in dict.fromkeys(measure.node for measure in measures):
            if node not in self._axes:
                self._axes.add(node)
                self._run.define_metric(curve(node, "*"), step_metric=curve(node, "time"))
        self._waiting = sorted([*self._waiting, *measures], key=lambda measure: measure.time)

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        for row in rows:
            values: dict[str, Any] = {name: value for path in row.media for name, value in self._media(path)}
            values |= row.values
            if row.step <= self._has:  # a validation that came after its step was sent: it stands at the next
                self._late |= values
                continue
            later = next((at for at, one in enumerate(self._waiting) if one.step > row.step), len(self._waiting))
            self._in_row, self._waiting = self._waiting[:later], self._waiting[later:]
            values |= means(self._in_row)
            # `_timestamp`: when the step was done, not when it was sent.
            self._run.log({**self._late, **values, "time": row.time, "_timestamp": row.time}, step=row.step)
            self._logged = row.step
            self._late, self._has = {}, row.step

    def _media(self, path: Path) -> Iterator[tuple[str, Any]]:
        import wandb

        name = path.stem
        if path.suffix == ".png":
            yield name, wandb.Image(str(path))
        elif path.suffix == ".txt":
            yield name, wandb.Html(f"<pre>{path.read_text()}</pre>")
        else:
            held = json.loads(path.read_text())
            if held["kind"] == "table":
                yield name, wandb.Table(columns=held["columns"], data=held["rows"])
            else:
                yield name, wandb.Histogram(np_histogram=(held["counts"], held["edges"]))

    def describe(self, facts: Facts, files: bool) -> None:
        """See Tracker."""
        self._run.config.update(facts.config, allow_val_change=True)
        for name, value in facts.about.items():
            self._run.summary[f"laststep/{name}"] = value
        if files:
            for name, text in facts.files.items():
                path = Path(self._run.dir) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                self._run.save(str(path), base_path=self._run.dir, policy="now")

    def weights(self, file: Path) -> None:
        """See Tracker."""
        import wandb

        artifact = wandb.Artifact(f"{self.run.name}-weights", type="model")
        artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self, finished: bool) -> None:
        """See Tracker."""
        for name, value in self._late.items():  # there is no next step
            self._run.summary[name] = value
        if self._waiting and self._logged == self._has:  # W&B still holds this row, and adds to it
            self._run.log(means([*self._in_row, *self._waiting]), step=self._logged)
        self._run.finish(exit_code=0)


class Mlflow(Tracker):
    """MLflow, by its client; over HTTP, or into a database that this machine reaches."""

    def open(self, facts: Facts) -> int | None:
        """See Tracker."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is that of `track --json`
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.wish.uri)
        experiment = self._client.get_experiment_by_name(self.wish.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(self.wish.project)
        # A sender that was killed may have made it without having learnt its id.
        if self.id is None and (made := self._client.search_runs([place], f"tags.`laststep.id` = '{self.mark}'")):
            self.id = made[0].info.run_id
        if self.id is None:
            tags = dict.fromkeys(self.wish.tags, "") | {"mlflow.source.name": "laststep"}
            tags |= {"laststep.id": self.mark, "laststep.run": facts.name} | (
                {"laststep.sweep": facts.group} if facts.group else {}
            )
            self.id = self._client.create_run(place, run_name=facts.name, tags=tags).info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")
        base = os.environ.get("MLFLOW_TRACKING_URI", "") if self.wish.uri is None else self.wish.uri
        if base.startswith("http"):
            self.url = f"{base.rstrip('/')}/#/experiments/{place}/runs/{self.id}"
        return None

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        from mlflow.entities import Metric

        has = self._has(rows, doubtful)
        metrics = [
            Metric(_allowed(name), value, int(1000 * row.time), row.step)
            for row in rows
            for name, value in row.values.items()
            if (_allowed(name), row.step) not in has
        ]
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + BATCH])
        for row in rows:
            for path in row.media:
                self._client.log_artifact(self.id, str(path), f"media/{path.parent.name}")

    def measure(self, measures: Sequence[Measure]) -> None:
        """See Tracker. A database has the same value of the same moment once, however often it is sent."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(curve(one.node, name)), value, int(1000 * one.time), one.step)
            for one in measures
            for name, value in one.values.items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + BATCH])

    def _has(self, rows: Sequence[Row], doubtful: int) -> set[tuple[str, int]]:
        """Which values of the doubtful rows the server has."""
        steps = {row.step for row in rows if row.step <= doubtful}
        names = {_allowed(name) for row in rows if row.step in steps for name in row.values}
        found = set()
        for name in names:
            history = self._client.get_metric_history(self.id, name)
            found |= {(name, one.step) for one in history if one.step in steps}
        return found

    def describe(self, facts: Facts, files: bool) -> None:
        """See Tracker."""
        from mlflow.entities import Param, RunTag

        tags = [RunTag(f"laststep.{name}", str(value)[:5000]) for name, value in facts.about.items()]
        self._client.log_batch(self.id, tags=tags)
        if files:
            flat = dict(_flat(facts.config))
            known = self._client.get_run(self.id).data.params  # a parameter cannot change
            new = [Param(name, value[:5000]) for name, value in flat.items() if name not in known]
            for begin in range(0, len(new), 100):
                self._client.log_batch(self.id, params=new[begin : begin + 100])
            for name, text in facts.files.items():
                self._client.log_text(self.id, text, name)

    def weights(self, file: Path) -> None:
        """See Tracker."""
        self._client.log_artifact(self.id, str(file), "weights")

    def close(self, finished: bool) -> None:
        """See Tracker."""
        if finished:
            self._client.set_terminated(self.id, "FINISHED")


class Trackio(Tracker):
    """trackio's database on this machine's disk. A row has an id of its own there, so that none stands twice."""

    def open(self, facts: Facts) -> int | None:
        """See Tracker."""
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._name = SQLiteStorage, facts.name
        self._config: dict[str, Any] | None = None
        self._newest: Row | None = None
        SQLiteStorage.validate_project_name(self.wish.project)
        return None

    def send(self, rows: Sequence[Row], doubtful: int) -> None:
        """See Tracker."""
        self._newest = rows[-1]
        self._write(rows)

    def measure(self, measures: Sequence[Measure]) -> None:
        """See Tracker. It has a table for them, without steps."""
        self._storage.bulk_log_system(
            self.wish.project,
            self._name,
            [{curve(one.node, name): value for name, value in one.values.items()} for one in measures],
            timestamps=[_iso(one.time) for one in measures],
            log_ids=[f"{self.id}-{one.node}-{one.time}" for one in measures],
            run_id=self.id,
        )

    def describe(self, facts: Facts, files: bool) -> None:
        """See Tracker."""
        config = {"_Group": facts.group, "_Created": _iso(os.stat(self.run.config).st_mtime), **facts.config}
        self._config = {**config, "laststep": facts.about}
        if self._newest is not None:  # it is there already, and stays as it is
            self._write([self._newest])

    def _write(self, rows: Sequence[Row]) -> None:
        """A configuration can only be written with a row."""
        config, self._config = self._config, None
        self._storage.bulk_log(
            self.wish.project,
            self._name,
            [dict(row.values) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[_iso(row.time) for row in rows],
            # Two rows of one step have other names: what a validation adds later.
            log_ids=[f"{self.id}-{row.step}-{min(row.values, default='')}" for row in rows],
            run_id=self.id,
            config=config,
        )


CLASSES: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def _allowed(name: str) -> str:
    """A curve's name with the characters that MLflow takes."""
    return "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in name)[:250]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _allowed(f"{prefix}{name}"), str(value)


def _iso(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).isoformat()


# W&B's files: blocks of 32 kB of records, as LevelDB's log has them, each a protobuf message.
BLOCK, HEAD, FILE_HEAD = 32768, 7, 7


def newest_in_files(folder: Path) -> int:
    """The last step in W&B's own files of offline runs in a folder; 0 without any."""
    return max((step for path in folder.glob("wandb/*run-*/*.wandb") for step, _ in history_in(path)), default=0)


def times_in_files(folder: Path) -> dict[str, float]:
    """The time of the last line of each node in W&B's own files of offline runs in a folder."""
    found: dict[str, float] = {}
    for path in folder.glob("wandb/*run-*/*.wandb"):
        for _, values in history_in(path):
            found |= {node: max(at, found.get(node, 0.0)) for node, at in times_in(values).items()}
    return found


def times_in(values: Mapping[str, Any]) -> dict[str, float]:
    """The time of the last line of each node in a row."""
    parts = {name: name.split("/") for name in values if name.startswith("system/") and name.endswith("/time")}
    return {found[1]: float(values[name]) for name, found in parts.items() if len(found) == 3}


def history_in(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of history in one of W&B's files, up to where it was cut off."""
    from wandb.proto import wandb_internal_pb2

    for data in records_in(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        with contextlib.suppress(Exception):  # half a record
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                values = {name: json.loads(text) for name, text in row.items()}
                yield int(values.get("_step", record.history.step.num)), values


def records_in(data: bytes) -> Iterator[bytes]:
    """The records in the bytes of one of W&B's files."""
    at, held = FILE_HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEAD])
        piece = data[at + HEAD : at + HEAD + length]
        if kind == 0 or len(piece) < length:
            return
        at += HEAD + length
        held = piece if kind in (1, 2) else held + piece  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            yield held


def number(value: Any) -> float | None:
    """A value of metrics.jsonl as a number: null there is one that is not finite. None: it is no number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value
