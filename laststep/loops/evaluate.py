"""Evaluation: the validation of a checkpoint's weights, in this one process, by the code that validates in training."""

from __future__ import annotations

import torch

from laststep.checkpoint.export import Weights
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.initial_weights import fit, start_from
from laststep.loops.learner import Learner
from laststep.loops.validation import Validation, make_loading, named, open_datasets
from laststep.ranks.group import join
from laststep.ranks.world import World, hostname
from laststep.rundir import RunDir
from laststep.task import find_task

WARM_UP_SAMPLES = 2  # batch norm cannot train on one


def evaluate(config: Config, run: RunDir, weights: Weights) -> dict[str, float | None]:
    """The validation metrics of these weights.

    `config` is for one rank. A model that was trained by one rank, on such a machine, gets the very metrics that its
    own validation has recorded; with train.shares, one that was trained by any number of ranks. Without it, with more
    ranks, these are the same sums, added in another order. Raises ConfigError.
    """
    task_class = find_task(config)
    if not isinstance(task_class, type):
        raise ConfigError(
            f"task={config.task}: a custom training loop validates in its own code; load the weights there, by "
            f"laststep.load_weights({str(run.path)!r})"
        )
    world = World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        nodes=1,
        hosts=(hostname(),),
        job_id="evaluate",
        restart=0,
        attempt="evaluate",
        launcher="python",
        on_slurm=False,
    )
    group = join(config, world, run.meeting("evaluate"), config.launch.hang_timeout_s)
    if group.device.type == "cpu":
        torch.set_num_threads(int(weights.manifest.numerics.get("threads", torch.get_num_threads())))
    task = task_class(config)
    train_set, val_set, counts = open_datasets(config, task, group)
    learner = Learner(config, task, group, total_steps=1)
    loading = make_loading(config, task, group)
    learner.warm_up(loading.warm_up_batch(train_set, config.seed, WARM_UP_SAMPLES))
    fitted = fit(learner.model.state_dict(), weights.tensors, run.name)
    if fitted.classes is not None:
        there, here = fitted.classes
        what = "tokens in the vocabulary" if config.task == "language" else "classes"
        raise ConfigError(f"{named(config)}: {here} {what}, but {run.name} was trained on {there}")
    start_from(learner, fitted.tensors)
    validation = Validation(config, val_set, counts[1], loading, group)
    try:
        metrics = validation.measure(learner, weights.manifest.step, lambda: True)
    finally:
        validation.close()
    assert metrics is not None
    return {**metrics, **task.derived(metrics, 0, 1)}
