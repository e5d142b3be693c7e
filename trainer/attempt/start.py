"""The part of an attempt's start that needs torch: join the other ranks, prepare the agreed stop, create the loop.

attempt.py imports this module late, since it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from trainer.attempt.state import AttemptState
from trainer.loops.loop import AttemptContext, Loop
from trainer.loops.run import make_custom_loop
from trainer.loops.task_loop import TaskLoop
from trainer.observe.startup import StartupTimer
from trainer.rundir import RunDir
from trainer.say import say
from trainer.task import find_task
from trainer.world import nccl
from trainer.world.group import Group
from trainer.world.join import join
from trainer.world.launchers import WORKING_FOLDER
from trainer.world.stop import Stop
from trainer.world.watchdog import Fault, Watchdog


def join_ranks(state: AttemptState, watchdog: Watchdog) -> Group:
    """Meet the other ranks and set up collectives; the watchdog runs meanwhile. Raises MeetingError."""
    config, run_dir, world = state.config, state.run_dir, state.world
    timeout_s = config.launch.hang_timeout_s
    nccl.set_defaults(run_dir.collectives(world.attempt), timeout_s)
    if config.train.deterministic:
        nccl.pin_algorithms()
    group = state.group = join(config, world, run_dir.meeting(world.attempt), timeout_s)
    if group.backend == "nccl" and world.rank == 0:
        for line in nccl.harmful_settings():
            say(line)
    # Before the collectives: the others would wait in C for a rank whose connections fail.
    watchdog.join(group.store)
    group.connect(timeout_s)
    state.set_number(group.broadcast_int("attempt", world.number))
    return group


def prepare_stop(state: AttemptState, group: Group, watchdog: Watchdog) -> Stop:
    """Have the ranks agree on a last step once one of them is signalled."""

    def on_failure(why: str) -> None:
        watchdog.report(Fault("failed", why, cause=False))

    state.stop = Stop(group.world, group.store, state.signals, on_failure)
    return state.stop


def create_loop(
    state: AttemptState,
    group: Group,
    stop: Stop,
    watchdog: Watchdog,
    phases: StartupTimer,
    closing: contextlib.ExitStack,
) -> Loop:
    """The loop around the configured Task or function."""
    context = AttemptContext(state.config, state.run_dir, group, stop, watchdog, phases, closing)
    task = find_task(state.config)
    if group.world.rank == 0 and group.world.launcher == "submitit-slurm":
        check_origin(state.config.task, state.config.task.rpartition(".")[0] or task.__module__, state.run_dir)
    state.loop = TaskLoop(task, context) if isinstance(task, type) else make_custom_loop(task, context)
    return state.loop


def check_origin(task: str, module: str, run: RunDir) -> None:
    """Warn if a job does not import its task's module from the copy of the code."""
    file = getattr(sys.modules.get(module), "__file__", None) or module
    if WORKING_FOLDER in os.environ and not Path(file).resolve().is_relative_to(run.code.resolve()):
        say(
            f"WARNING: task={task} is imported from {file}, which is not in the copy of the code: this run will follow "
            "later edits of it"
        )
