"""What a tracker shows of a run, read back by its own package: `python -m tests.track.shown TRACKER PLACE NAME` prints
`{curve: [[step, value], ...]}` of the one run of this name, and what else it has."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any


def wandb(place: str, name: str) -> dict[str, Any]:
    """From W&B's own files: a folder of each sender's."""
    from laststep.track.trackers import records_in

    curves: dict[str, list[Any]] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    ids = set()
    for path in sorted(Path(place).glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        from wandb.proto import wandb_internal_pb2

        for data in records_in(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "config":
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            elif kind == "summary":
                items = record.summary.update
                summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            elif kind == "history":
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                for key, value in row.items():
                    if not key.startswith("_"):
                        curves.setdefault(key, []).append([row["_step"], value])
    assert len(ids) == 1, ids
    return {"curves": curves, "config": config, "about": summary}


def mlflow(place: str, name: str) -> dict[str, Any]:
    """From a server."""
    from mlflow import MlflowClient

    client = MlflowClient(place)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    curves = {key: [[one.step, one.value] for one in found] for key, found in history.items()}
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    return {"curves": curves, "config": run.data.params, "about": run.data.tags, "files": sorted(files)}


def trackio(place: str, name: str) -> dict[str, Any]:
    """From the database of TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    curves: dict[str, list[Any]] = {}
    for row in SQLiteStorage.get_logs(place, name, max_points=None):
        for key, value in row.items():
            if key not in ("step", "timestamp"):
                curves.setdefault(key, []).append([row["step"], value])
    config = SQLiteStorage.get_run_config(place, name) or {}
    return {"curves": curves, "config": config, "about": config.get("laststep", {})}


def read(tracker: str, place: str, name: str) -> dict[str, Any]:
    """What this tracker shows, its points in order."""
    found = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[tracker](place, name)
    for points in found["curves"].values():
        points.sort(key=lambda point: point[0])
        points[:] = [[step, None if isinstance(v, float) and math.isnan(v) else v] for step, v in points]
    return found


if __name__ == "__main__":
    print(json.dumps(read(*sys.argv[1:]), default=str))
