"""Which checkpoint a run continues from: what its disk shows, and what its records say that it must show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from laststep.checkpoint.patience import Patience
from laststep.checkpoint.store import CheckpointStore, Manifest
from laststep.config.errors import DiskError
from laststep.records.attempts import recorded_step
from laststep.rundir import RunDir

# How long an attempt that begins looks again at a disk that does not show its checkpoints. The ranks that wait for rank
# 0 have twice that.
START_S = 30.0
# The same for a batch shell or a launcher, which only counts lost steps. Slurm may be about to end it.
COUNT_S = 3.0


def recover(
    store: CheckpointStore, run: RunDir, warn: Callable[[str], None], patience: Patience | None = None
) -> Iterator[Manifest]:
    """Clean up the folder of an attempt that begins; returns the run's checkpoints that seem intact, newest first. The
    first of them is found before this returns.

    Never begins below the step that the records say is saved, unless that checkpoint is there and damaged. Raises
    DiskError if the disk does not show it while there is `patience`, by default START_S.
    """
    patience = patience or Patience(START_S, warn)
    kept = patience.insist(lambda: recorded_step(run))
    try:
        patience.insist(store.recover, store.look_anew)
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{store.folder}: cannot be cleaned up: {error}") from error
    candidates = store.candidates(warn, kept, patience)
    return itertools.chain(list(itertools.islice(candidates, 1)), candidates)


def newest_step(run: RunDir, warn: Callable[[str], None]) -> int:
    """The step that the next attempt begins at, as far as manifests and sizes show; 0 without a checkpoint. What the
    records say is saved, if the disk does not show it. Raises OSError if there are records that cannot be read."""
    kept = recorded_step(run)
    try:
        patience = Patience(COUNT_S, warn)
        newest = next(CheckpointStore(run.checkpoints).candidates(warn, kept, patience), None)
    except DiskError as error:
        warn(f"WARNING: {error}")
        return kept
    return newest.step if newest else 0
