"""Branching off: a new run that begins with another run's newest checkpoint, configuration and metrics.

The new run has copies, so the two are independent from then on, and its first attempt resumes like any other.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Sequence

from laststep import script
from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointGone, CheckpointStore
from laststep.config.checks import validate
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir, fsync
from laststep.runs import run_config, run_folders
from laststep.runs.run_config import check_later_end
from laststep.runs.run_status import is_finished, records_of
from laststep.say import command

# What a branch may change. The rest decides what the state consists of, or which samples its steps have used.
CHANGEABLE = (
    *("device", "data.workers", "optim.lr", "optim.schedule", "optim.decay_share", "optim.warmup_steps"),
    "optim.clip_norm",
    *("train.epochs", "train.max_steps", "train.accumulate", "train.compile", "train.cuda_graphs"),
    *("train.channels_last", "train.activation_checkpointing", "train.deterministic", "train.nonfinite"),
    *("train.log_every", "train.digest_every", "train.skip_steps", "train.skip_samples"),
)
TRIES = 5  # a run that is training may delete the checkpoint that is being copied


def find_source(name: str, overrides: Sequence[str]) -> tuple[RunDir, int | None]:
    """The run to branch off, by its name or folder, and the step behind an `@`, if any. Raises ConfigError."""
    root = run_folders.root_among(overrides)
    of, _, step = name.rpartition("@")
    if of and step.isdecimal():
        return run_folders.find_run(of, root), int(step)
    return run_folders.find_run(name, root), None


def configure(source: RunDir, overrides: Sequence[str], step: int | None = None) -> Config:
    """The configuration of a run that branches off `source`, after `step` if one is given. Raises ConfigError for a key
    that cannot change."""
    for word in overrides:
        key = word.partition("=")[0]
        if key not in CHANGEABLE and not key.startswith("checkpoint.") and not run_config.may_change(key):
            raise ConfigError(
                f"{word}: --from {source.name} takes over its state, which depends on this key; to begin with its "
                f"weights alone: {command(f'submit model.weights={source.path} {word}')}"
            )
    place = ["launch.name=null", f"launch.root={source.path.parent}"]
    # The checkpoint has the weights.
    config = run_config.as_submitted(source, [*place, "model.weights=null", "checkpoint.start_from=null", *overrides])
    script.check_knows_us(config, f"--from {source.name}")
    validate(config)
    if step is None and is_finished(read_submissions(source.submissions), records_of(source)):
        check_later_end(source, run_config.as_submitted(source).train, config.train)
    if step is None and not CheckpointStore(source.checkpoints).steps():
        raise ConfigError(f"--from {source.name}: this run has no checkpoint yet")
    return config


def copy_state(source: RunDir, run: RunDir, step: int | None = None, of: RunDir | None = None) -> int:
    """Copy the newest intact checkpoint of `source`, and its metrics, into the folder of a new run; returns the step.
    With `step` the checkpoint of that step, from the run `of`, by default the same run.

    Raises ConfigError when there is none.
    """
    store, copies = CheckpointStore((of or source).checkpoints), CheckpointStore(run.checkpoints)
    name = source.name if step is None else f"{source.name}@{step}"
    for _ in range(TRIES):
        if (begin := step) is None:
            found = store.newest(warn=lambda text: print(f"WARNING: {source.name}: {text}", file=sys.stderr))
            if found is None:
                break
            begin = found.step
        try:
            with store.reading(begin):
                shutil.copytree(store.path(begin), copies.path(begin))
            copies.verify(begin)
            for path in (*copies.path(begin).rglob("*"), copies.path(begin), copies.folder):
                fsync(path)
        except CheckpointGone:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
            continue
        except (OSError, CheckpointError) as error:
            raise ConfigError(f"--from {name}: its checkpoint cannot be copied: {error}") from None
        _copy_metrics(source, run, begin)
        if source.secrets.exists() and not run.secrets.exists():
            with contextlib.suppress(OSError):
                shutil.copy2(source.secrets, run.secrets)
        print(f"from   {source.name}, step {begin}")
        return begin
    raise ConfigError(f"--from {name}: no intact checkpoint could be read")


def _copy_metrics(source: RunDir, run: RunDir, step: int) -> None:
    """Copy the lines up to this step. The first attempt cuts off those that the checkpoint does not include."""
    with contextlib.suppress(FileNotFoundError), source.metrics.open("rb") as file, run.metrics.open("wb") as copy:
        for line in file:
            with contextlib.suppress(ValueError):  # a damaged line counts, too
                if json.loads(line)["step"] > step:
                    break
            copy.write(line)
