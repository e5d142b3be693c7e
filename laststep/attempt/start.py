"""The part of an attempt's start that needs torch: join the other ranks, prepare the agreed stop, create the loop.

attempt.py imports this module late, since it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from laststep import rooms
from laststep.attempt import user_error
from laststep.attempt.ending import AttemptState
from laststep.attempt.preflight import check_device
from laststep.attempt.rescue import exit_status
from laststep.checkpoint.restore import NewestCheckpoint, SharedCheckpoint
from laststep.checkpoint.store import START_S, Manifest
from laststep.compat import compile_each_shape
from laststep.loops.custom_loop import CustomLoop
from laststep.loops.engine import AttemptContext, Engine
from laststep.loops.run import make_custom_loop, make_script_loop
from laststep.loops.task_loop import TaskLoop
from laststep.ranks import nccl
from laststep.ranks.device import is_deterministic
from laststep.ranks.disk import FreshView, Patience, polling_round_s
from laststep.ranks.fault import Fault, RankEnded
from laststep.ranks.group import Group, join, lend_group
from laststep.ranks.launchers import WORKING_FOLDER, export_world, free_port
from laststep.ranks.stop import Stop
from laststep.ranks.watchdog import Watchdog
from laststep.ranks.world import World
from laststep.records.attempts import lower_start_step, raise_kept_step
from laststep.records.probes import ProbePlan
from laststep.records.progress import StartupTimer
from laststep.rundir import RunDir
from laststep.say import say
from laststep.task import find_task

# Before this a rank that waits for rank 0 need not ask why: most have met by then.
FIRST_LOOK_S = 2.0
NOT_DETERMINISTIC = (
    "train.deterministic=false: kernels and NCCL may add in another order each time, so after a resume the last bits "
    "of weights and metrics may differ from those of an undisturbed run"
)


def join_ranks(state: AttemptState, watchdog: Watchdog) -> Group:
    """Meet the other ranks and set up collectives; the watchdog runs meanwhile. Raises MeetingError, BadNode."""
    config, run_dir, world = state.config, state.run_dir, state.world
    nccl.set_defaults(run_dir.collectives(world.attempt))
    check = rank_0_check(run_dir.rescues / world.attempt, world)
    group = state.group = join(config, world, run_dir.meeting(world.attempt), config.launch.hang_timeout_s, check)
    if is_deterministic(config, group.device):
        nccl.pin_algorithms()
    elif group.device.type == "cuda" and world.rank == 0:
        say(NOT_DETERMINISTIC)
    if group.backend == "nccl" and world.rank == 0:
        for line in nccl.harmful_settings():
            say(line)
    # Before the collectives: the others would wait in C for a rank whose connections fail.
    watchdog.join(group.store, group.host, group.seal)
    if config.launch.preflight and group.device.type == "cuda":
        check_device(group.device, watchdog)
    group.connect(config.launch.hang_timeout_s)
    if config.launch.preflight:
        for skew in group.skewed_clocks:
            say(f"WARNING: {skew}")
    state.set_number(group.broadcast_int("attempt", world.number))
    return group


def rank_0_check(folder: Path, world: World) -> Callable[[], None]:
    """For a rank that waits for rank 0: raises RankEnded once that rank's supervisor says in `folder` that it has
    ended. The nodes of a job would wait a minute for it."""
    view, next_look = FreshView(world.size, folder), time.monotonic() + FIRST_LOOK_S

    def check() -> None:
        nonlocal next_look
        if time.monotonic() < next_look:
            return
        next_look = time.monotonic() + polling_round_s(world.size)
        view.refresh()
        if (status := exit_status(folder, 0)) is not None:
            host = world.host_of(0)
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            raise RankEnded(f"{world}: rank 0 on {host} ended as it started ({how})", host if status < 0 else "")

    return check


def prepare_stop(state: AttemptState, group: Group, watchdog: Watchdog) -> Stop:
    """Have the ranks agree on a last step once one of them is signalled."""

    def on_failure(why: str) -> None:
        # No failure: a rank that does not answer may be reading a file in C, with the interpreter's lock held.
        watchdog.report(Fault("signal" if state.signal else "failed", why, cause=False))

    state.stop = Stop(group.world, group.store, state.signals, on_failure)
    return state.stop


def begin_reading(
    state: AttemptState, group: Group, candidates: Iterator[Manifest], watchdog: Watchdog
) -> NewestCheckpoint:
    """Begin to read the newest checkpoint, in threads. Rank 0's `candidates` count."""
    reading = NewestCheckpoint(state.store, group, candidates, say, watchdog.advance)
    state.start_step = reading.step
    return reading


def finish_reading(state: AttemptState, reading: NewestCheckpoint, watchdog: Watchdog) -> SharedCheckpoint | None:
    """The newest intact checkpoint, which all ranks have begun to read."""
    watchdog.enter("reading checkpoint")
    checkpoint = reading.finish()
    step = checkpoint.manifest.step if checkpoint else 0
    if state.world.rank == 0:
        patience = Patience(START_S, say)
        if step < state.start_step:  # a candidate was damaged
            patience.insist(lambda: lower_start_step(state.run_dir, state.world, step))
        else:
            patience.insist(lambda: raise_kept_step(state.run_dir, step))
    state.start_step = step
    watchdog.enter("starting")
    return checkpoint


def create_engine(
    state: AttemptState,
    group: Group,
    stop: Stop,
    watchdog: Watchdog,
    phases: StartupTimer,
    closing: contextlib.ExitStack,
) -> Engine:
    """The engine of the loop around the configured Task or function."""
    compile_each_shape(say)
    context = AttemptContext(
        state.config, state.run_dir, state.store, group, stop, watchdog, phases, closing, ProbePlan.of(os.environ)
    )
    # Before the user's module is imported: it may read the variables, or import the functions, at its top.
    port = group.broadcast_int("free port", free_port() if group.world.rank == 0 else None)
    closing.callback(export_world(group.world, group.host, port or 0))
    closing.callback(rooms.export(state.config, state.run_dir, group.world))
    closing.callback(lend_group(group))
    if state.config.script:
        loop: TaskLoop | CustomLoop = make_script_loop(context)
        state.engine = loop.engine
        return loop.engine
    if user_error.main_is_ours or not group.world.in_users_program:
        del sys.argv[1:]  # which are Laststep's: a task that parses arguments is to get none
    task = find_task(state.config)
    if group.world.rank == 0 and group.world.launcher == "submitit-slurm":
        check_origin(state.config.task, state.config.task.rpartition(".")[0] or task.__module__, state.run_dir)
    loop = TaskLoop(task, context) if isinstance(task, type) else make_custom_loop(task, context)
    state.engine = loop.engine
    return loop.engine


def check_origin(task: str, module: str, run: RunDir) -> None:
    """Warn if a job does not import its task's module from the copy of the code."""
    file = getattr(sys.modules.get(module), "__file__", None) or module
    if WORKING_FOLDER in os.environ and not Path(file).resolve().is_relative_to(run.code.resolve()):
        say(
            f"WARNING: task={task} is imported from {file}, which is not in the copy of the code: this run will follow "
            "later edits of it"
        )
