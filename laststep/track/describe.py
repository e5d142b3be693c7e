"""What a tracker is told about a run besides its steps: configuration, code, machines, attempts, checkpoints. Without
secrets: everything here has passed through `Secrets`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shlex
import time
from pathlib import Path
from typing import Any

from laststep.checkpoint.store import CheckpointStore
from laststep.config.errors import ConfigError
from laststep.config.secret import Secrets
from laststep.records.attempt_record import AttemptRecord, reason_in
from laststep.records.metrics import newest_epoch, newest_step
from laststep.records.plan import read_plan
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.runs.run_status import goodput_of, is_finished, records_of, split_time
from laststep.say import counted
from laststep.track.trackers import Facts

MOST = 1 << 20  # bytes of a file that is sent


def has_finished(run: RunDir) -> bool:
    """Whether the run has reached its last step."""
    return is_finished(read_submissions(run.submissions), records_of(run))


def is_resting(run: RunDir) -> bool:
    """Whether no attempt is under way, nor follows by itself: the newest step gets no further line for now."""
    records = records_of(run)
    return not records or bool(records[-1]["reason"] and not records[-1]["requeue"])


@functools.lru_cache(maxsize=4)
def _configuration(path: Path, changed_at: float) -> dict[str, Any]:
    try:
        return dataclasses.asdict(run_config.as_submitted(RunDir(path)))
    except (ConfigError, OSError):
        return {}


def configuration(run: RunDir) -> dict[str, Any]:
    """The run's configuration, with its secrets."""
    with contextlib.suppress(OSError):
        return _configuration(run.path, run.config.stat().st_mtime)
    return {}


def secrets_of(run: RunDir) -> Secrets:
    """What must not be sent."""
    return Secrets(configuration(run))


def facts(run: RunDir) -> Facts:
    """All that is known now."""
    secrets, sweep = secrets_of(run), run.sweep_folder
    config = {name: value for name, value in secrets.without(configuration(run)).items() if name != "alert"}
    about = {name: secrets.hide(value) if isinstance(value, str) else value for name, value in _about(run).items()}
    files = {"code.diff": run.diff, "packages.txt": run.packages}
    texts = {name: secrets.hide(text) for name, path in files.items() if (text := _text(path))}
    if config:
        texts["config.yaml"] = _yaml(config)
    return Facts(run.name, sweep.name if sweep is not None else None, config, about, texts)


def fingerprint(facts: Facts) -> str:
    """Names the configuration and the files, so that they are sent again only if they have changed."""
    text = json.dumps([facts.config, facts.files], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _about(run: RunDir) -> dict[str, Any]:
    submissions, records = read_submissions(run.submissions), records_of(run)
    about: dict[str, Any] = {"folder": str(run.path)}
    if submissions:
        first, newest = submissions[0], submissions[-1]
        about["command"] = shlex.join(map(str, first.get("command", [])))
        about["commit"] = newest.get("commit") or ""
        about["laststep"] = newest.get("version", "")
        if parent := _parent(first.get("command", [])):
            about["parent"] = parent
    if plan := read_plan(run.plan):
        about["total_steps"] = plan["total_steps"]
    if records:
        about["hosts"] = ", ".join(dict.fromkeys(host for record in records for host in record["hosts"] if host))
        about["attempts"] = len(records)
        about["lost_steps"] = sum(record["lost_steps"] for record in records)
        about["sizes"] = _sizes(records)
        for record in records:
            about[f"attempt_{record['attempt']:03d}"] = _event(record)
        ended = [record for record in records if record["reason"]]
        if ended:
            goodput = goodput_of(ended, None, None, time.time())
            about["goodput"] = None if goodput is None else round(goodput, 4)
            split = split_time(ended, submissions, run.metrics, ended[-1]["end"] or 0.0)
            about["time"] = str(split)
    with contextlib.suppress(OSError):
        store = CheckpointStore(run.checkpoints)
        if steps := store.steps():
            about["checkpoint"] = str(store.path(steps[-1]))
            about["checkpoint_step"] = steps[-1]
    if has_finished(run):
        about["state"] = "finished"
        step = newest_step(run.metrics)
        final = dict(newest_epoch(run.metrics) or {}) | ({"loss": step.get("loss")} if step else {})
        about |= {f"final/{name}": value for name, value in final.items() if isinstance(value, (int, float))}
    return {name: value for name, value in about.items() if value not in (None, "")}


def _event(record: AttemptRecord) -> str:
    """An attempt in a line: `steps 10 to 57 on 4 ranks, job 12: preempted, 0 steps lost (rank 1 on n2: ...)`."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["start"]))
    ranks, job = counted(record["world_size"], "rank"), record["job_id"]
    if not record["reason"]:
        return f"{began}: from step {record['start_step']} on {ranks}, job {job}"
    why = f" ({reason})" if (reason := reason_in(record["error"])) else ""
    steps, lost = f"steps {record['start_step']} to {record['end_step']}", counted(record["lost_steps"], "step")
    return f"{began}: {steps} on {ranks}, job {job}: {record['reason']}, {lost} lost{why}"


def _sizes(records: list[AttemptRecord]) -> str:
    """From which step on which number of ranks trained."""
    found: list[tuple[int, int]] = []
    for record in records:
        if not found or found[-1][1] != record["world_size"]:
            found.append((record["start_step"], record["world_size"]))
    return ", ".join(f"from step {step}: {counted(size, 'rank')}" for step, size in found)


def _parent(command: list[str]) -> str:
    """The run that this one was branched off, as its command says."""
    for word, following in zip(command, [*command[1:], ""]):
        if word == "--from":
            return following
        if word.startswith("--from="):
            return word.partition("=")[2]
    return ""


def _text(path: Path) -> str:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        return file.read(MOST)
    return ""


def _yaml(config: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
