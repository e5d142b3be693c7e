"""Trainings that take turns on one device: each is started and compiled once, then timed repeatedly.

The figures that are compared are thus measured seconds apart, and a start, which takes minutes on a GPU when much has
to be compiled, happens only once. A training that waits for its turn sleeps and keeps its state on the device.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch

from benchmarks._measure import PROJECT

PIPE = "LASTSTEP_TURNS_PIPE"
DEADLINE_S = 420.0  # for a start that compiles everything, or for a turn


class Turns:
    """The training's side: counts its steps and reports the time of each turn.

    The first `lead` steps of a turn are not timed: they use up the batches that the loader has prepared while the
    others had their turns. The first turn starts without being asked for.
    """

    def __init__(self, device: str, lead: int, steps: int) -> None:
        self._device, self._lead, self._steps = device, lead, steps
        self._others = Connection(int(os.environ[PIPE]))
        self._done = 0
        self._began = 0.0

    def begin_step(self) -> None:
        """Called where a step begins, in the training's own code: a hook of torch's would slow down small steps."""
        self._done += 1
        if self._done == self._lead:
            self._began = self._now()
        elif self._done == self._lead + self._steps:
            self._others.send(self._now() - self._began)
            self._others.recv()
            self._done = 0

    def _now(self) -> float:
        """The time in seconds, after the device has finished all queued work."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def take_turns(
    commands: Mapping[str, list[str]], env: Mapping[str, str], turns: int, folder: Path
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Run these trainings, each of which creates a `Turns`.

    Returns the seconds until each had finished its first turn, by name, and for each later turn the seconds that its
    timed steps took, by name. Raises RuntimeError, with the log, if one of them does not train.
    """
    trainings, pipes, logs = [], {}, {}
    try:
        began = time.perf_counter()
        for name, command in commands.items():
            pipes[name], theirs = Pipe()
            logs[name] = folder / f"{name}.log"
            with logs[name].open("wb") as log:
                full_env = {**os.environ, **env, PIPE: str(theirs.fileno())}
                training = subprocess.Popen(
                    command, cwd=PROJECT, env=full_env, pass_fds=[theirs.fileno()], stdout=log, stderr=subprocess.STDOUT
                )
            theirs.close()
            trainings.append(training)
        starts = {}
        for name, pipe in pipes.items():
            _answer(pipe, logs[name])
            starts[name] = time.perf_counter() - began
        taken = []
        for turn in range(turns):
            names = list(commands)
            seconds = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                pipes[name].send("your turn")
                seconds[name] = _answer(pipes[name], logs[name])
            taken.append(seconds)
        return starts, taken
    finally:
        for training in trainings:  # the end of a run is not part of this benchmark
            training.kill()
            training.wait()


def _answer(pipe: Connection, log: Path) -> float:
    try:
        if pipe.poll(DEADLINE_S):
            return float(pipe.recv())
    except EOFError:
        pass
    raise RuntimeError(f"{log.stem} did not train:\n{log.read_text()}")
