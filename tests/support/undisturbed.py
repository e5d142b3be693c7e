"""Undisturbed runs, which interrupted ones are compared with. Each is trained once for all tests and test processes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.rundir import RunDir
from tests.support.ranks import fingerprint, train
from tests.support.shared import shared_folder, shared_lock


def undisturbed_run(config: Config) -> dict[str, Any]:
    """The fingerprint of an undisturbed run with this configuration except for `launch`: only the number of ranks
    matters. All tests that ask for the same run share it.

    The tasks of tests/support/tasks and tests/gpu/tasks change nothing about an undisturbed run, so it is trained with
    the task that they derive from.
    """
    return _trained(_undisturbed(config))


def undisturbed_folder(config: Config) -> RunDir:
    """The folder of that run, which is to be read only."""
    plain = _undisturbed(config)
    _trained(plain)
    return RunDir(shared_folder() / str(plain.launch.name))


def _undisturbed(config: Config) -> Config:
    """The configuration of the undisturbed run, which is named for everything that matters."""
    derived = config.task.startswith(("tests.support.tasks.", "tests.gpu.tasks."))
    task = "classification" if derived else config.task
    launch = Launch(name="", root=str(shared_folder()), tasks_per_node=config.launch.world_size)
    plain = dataclasses.replace(config, task=task, launch=launch)
    name = hashlib.sha256(plain.to_yaml().encode()).hexdigest()[:16]
    return dataclasses.replace(plain, launch=dataclasses.replace(launch, name=name))


def _trained(config: Config) -> dict[str, Any]:
    name = str(config.launch.name)
    found = shared_folder() / f"{name}.json"
    with shared_lock(name):
        if not found.exists():
            found.write_text(json.dumps(fingerprint(train(config))))
        known: dict[str, Any] = json.loads(found.read_text())
    return known
