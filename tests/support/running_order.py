"""Which tests are slow, and the order in which `make test` runs them.

Tests on a real Slurm mostly wait, and other slow tests mostly compute: taken alternately they leave neither core idle.
Quick tests come last, so that all test processes finish at about the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

# Modules and tests that train on real ranks, start commands, or otherwise take seconds each ...
SLOW = (
    "attempt/test_attempt",
    "attempt/test_compiler",
    "attempt/test_deadlines.py::test_training_in_a_notebook",
    "attempt/test_deterministic",
    "attempt/test_finished",
    "attempt/test_network_disk",
    "attempt/test_node_faults",
    "attempt/test_rescue",
    "attempt/test_sharded_rescue",
    "attempt/test_restore",
    "attempt/test_silence",
    "attempt/test_silent_device",
    "attempt/test_stops",
    "checkpoint/test_interval.py::test_a_run",
    "checkpoint/test_sharded_ranks",
    "checkpoint/test_store.py::test_manifest_bit_flips",
    "checkpoint/test_writer.py::test_pack_round_trip",
    "submission/test_batch_shell.py::test_the_shell_sees",
    "submission/test_branch",
    "submission/test_local",
    "submission/test_silent_slurm",
    "submission/test_spawn",
    "job/test_supervisor",
    "submission/test_unanswered.py::test_two_resumes",
    "cli/test_command.py::test_debug_opens_the_debugger",
    "cli/test_command.py::test_refused_by_the_rank",
    "cli/test_completion",
    "cli/test_init.py::test_trains",
    "cli/test_logs.py::test_the_end_of_a_long_log",
    "cli/test_tensorboard.py::test_runs_have_their_names",
    "config/test_config.py::test_round_trip",
    "doctor/test_doctor.py::test_ranks_say_hello",
    "doctor/test_doctor.py::test_roll_call",
    "doctor/test_hello",
    "faults/test_faults",
    "frameworks/test_frameworks",
    "frameworks/test_missing.py::test_a_rank",
    "frameworks/test_missing.py::test_lightning_by",
    "frameworks/test_ray.py::test_a_killed_worker",
    "gpu/",
    "loops/test_behind_a_device",
    "loops/test_custom_loop",
    "loops/test_custom_sharding",
    "loops/test_custom_shares.py::test_any_number_of_ranks",
    "loops/test_custom_shares.py::test_own_batches",
    "loops/test_exact",
    "loops/test_extend",
    "loops/test_learner.py::test_activation_checkpointing_changes_nothing",
    "loops/test_opaque",
    "loops/test_script_loops",
    "loops/test_sharding",
    "loops/test_sharded_shares",
    "loops/test_shares",
    "loops/test_sizes",
    "loops/test_weights",
    "observe/test_report.py::test_a_million_steps",
    "observe/test_report.py::test_in_a_browser",
    "observe/test_tensorboard.py::test_a_run_of_a_second",
    "observe/test_tensorboard.py::test_an_attempt_that_begins_with_a_validation",
    "observe/test_tensorboard.py::test_any_damage",
    "observe/test_tensorboard.py::test_attempts_that_ended_in_different_ways",
    "observe/test_troubleshooting",
    "records/test_attempts.py::test_many_ranks_end_the_attempt_at_once",
    "records/test_metrics.py::test_each_step_once",
    "proof/test_prove",
    "slurm/",
    "tasks/test_language.py::test_exact_resume",
    "test_compat.py::test_compiled_modules",
    "test_compat.py::test_the_compiler_says_when_it_works",
    "test_docs",
    "test_forked",
    "test_gpu_check.py::test_a_machine_that_cannot",
    "test_gpu_check.py::test_a_part_that_hangs",
    "test_gpu_check.py::test_a_real_part",
    "test_gpu_check.py::test_ctrl_c",
    "test_packaging",
    "test_parts",
    "attempt/test_interpreter_watch",
    "ranks/test_meeting",
    "ranks/test_network",
    "ranks/test_seal.py::test_an_outsider",
    "worst_day/test_worst_day.py::test_nothing_is_lost",
)
# ... except for these, which are quick, or show in seconds that real ranks still work.
QUICK = (
    "attempt/test_rescue.py::test_killed[2-kill step 10 rank 1]",
    "loops/test_exact.py::test_stop_anywhere[mid-epoch]",
)


def is_slow(nodeid: str) -> bool:
    """Whether the test with this id is slow."""
    place = nodeid.removeprefix("tests/")
    return place.startswith(SLOW) and not place.startswith(QUICK)


def arrange(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Mark the slow tests, and return all tests in the order in which to run them."""
    waiting, computing, quick = list[pytest.Item](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
            (waiting if item.get_closest_marker("slurm") else computing).append(item)
        else:
            # One process runs all quick tests of a module: its fixtures are made once.
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
            quick.append(item)
    return [*alternate(waiting, computing), *quick]


def alternate(first: Sequence[T], second: Sequence[T]) -> Iterator[T]:
    """The items of both, each in its order, evenly mixed."""
    places = [(number / len(items), item) for items in (first, second) for number, item in enumerate(items)]
    yield from (item for _, item in sorted(places, key=lambda place: place[0]))
