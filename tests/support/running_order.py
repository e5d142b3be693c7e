"""Which tests are slow, which of them `make test` leaves to `make test-long`, and the order in which it runs the rest.

Tests on a real Slurm mostly wait, and other slow tests mostly compute: taken alternately they leave neither core idle.
Quick tests come last, so that all test processes finish at about the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

# Modules and tests that train on real ranks, start commands, or otherwise take seconds each ...
SLOW = (
    "alert/test_alert_runs",
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
    "checkpoint/test_anchored",
    "checkpoint/test_full_disk.py::test_a_stop",
    "checkpoint/test_interval.py::test_a_run",
    "checkpoint/test_links",
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
    "cli/test_command_runs.py::test_a_stop",
    "cli/test_completion",
    "cli/test_hydra",
    "cli/test_init.py::test_trains",
    "cli/test_logs.py::test_the_end_of_a_long_log",
    "cli/test_script",
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
    "data/test_streams.py::test_any_number_of_ranks",
    "data/test_streams.py::test_hugging_face",
    "data/test_streams.py::test_torchdata",
    "data/test_streams.py::test_webdataset",
    "data/test_streams.py::test_workers",
    "loops/test_foreign_start.py::test_ranks",
    "loops/test_behind_a_device",
    "loops/test_custom_loop",
    "loops/test_custom_sharding",
    "loops/test_custom_shares.py::test_any_number_of_ranks",
    "loops/test_custom_shares.py::test_own_batches",
    "loops/test_digest.py::test_any_number",
    "loops/test_exact",
    "loops/test_extend",
    "loops/test_hooks",
    "loops/test_learner.py::test_activation_checkpointing_changes_nothing",
    "loops/test_loop_keys.py::test_on_two_ranks",
    "loops/test_opaque",
    "loops/test_own.py::test_resumed",
    "loops/test_script_loops",
    "loops/test_sharding",
    "loops/test_sharded_shares",
    "loops/test_shares",
    "loops/test_sizes",
    "loops/test_streamed",
    "loops/test_unused",
    "loops/test_weights",
    "report/test_report.py::test_a_long_curve",
    "report/test_report.py::test_in_a_browser",
    "records/test_tensorboard.py::test_a_run_of_a_second",
    "records/test_tensorboard.py::test_an_attempt_that_begins_with_a_validation",
    "records/test_tensorboard.py::test_any_damage",
    "records/test_tensorboard.py::test_attempts_that_ended_in_different_ways",
    "records/test_tensorboard.py::test_killed_once_the_end_is_recorded",
    "records/test_troubleshooting",
    "records/test_attempts.py::test_many_ranks_end_the_attempt_at_once",
    "records/test_metrics.py::test_each_step_once",
    "proof/test_ports.py::test_proved",
    "proof/test_ports.py::test_resumed",
    "proof/test_ports.py::test_the_best",
    "proof/test_ports.py::test_unaware",
    "proof/test_project_copy.py::test_nothing",
    "proof/test_prove",
    "slurm/",
    "cli/test_disk.py::test_what_may_go",
    "code/test_uv",
    "tasks/test_language.py::test_exact_resume",
    "tasks/test_traps",
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
    "test_rooms",
    "replay/test_replay",
    "track/test_once",
    "track/test_machines.py::test_wandb",
    "track/test_machines.py::test_databases",
    "track/test_untouched",
)
# ... except for these, which are quick, or show in seconds that real ranks still work.
QUICK = (
    "attempt/test_rescue.py::test_killed[2-kill step 10 rank 1]",
    "loops/test_exact.py::test_stop_anywhere[mid-epoch]",
)


# Slow modules of which one process runs all tests: what these share takes longer to make than a test takes.
SHARING = ("slurm/test_pending", "track/test_once", "frameworks/test_frameworks")

# Tests that prove again, at another place or with another program, what others prove in `make test`: some cases of a
# test, or all where none is named. `make test-long` runs these alone: before a release, or after a change to what they
# test.
LONG: dict[str, list[str]] = {
    "attempt/test_attempt.py::test_the_rank_that_slows_the_others_down_is_named": ["not one"],
    "attempt/test_compiler.py::test_compiled_code_where_locks_do_not_work": [],
    "attempt/test_deterministic.py::test_a_rank_imports_nothing_for_it": [],
    "attempt/test_network_disk.py::test_the_next_attempt_begins_at_the_rescued_step": [
        "kill step 6 rank 1",
        "halt step 6 rank 0",
    ],
    "attempt/test_rescue.py::test_killed": ["4-kill step 5 rank 0,2,3"],
    "attempt/test_rescue.py::test_killed_in_the_save_of_a_stop": ["2-1", "2-0"],
    "attempt/test_rescue.py::test_killed_while_metrics_are_being_read": ["1"],
    "attempt/test_rescue.py::test_reasons_stay_apart": [],
    "attempt/test_rescue.py::test_saved_together": ["small_stripes-dead0"],
    "attempt/test_rescue.py::test_stuck": ["halt step 10 rank 1"],
    "attempt/test_restore.py::test_a_disk_that_is_not_what_it_was": [
        "a_link_to_nothing-which is not there",
        "an_empty_mount_point-has no checkpoint, but the run's records say that step 5 is saved",
    ],
    "attempt/test_restore.py::test_a_listing_that_fails_for_a_moment": ["EACCES"],
    "attempt/test_sharded_rescue.py::test_full_without_copies": [],
    "attempt/test_sharded_rescue.py::test_no_step_is_lost": [
        "train.sharding-kill step 5 rank 0",
        "checkpoint.replicas-kill step 5 rank 3",
        "checkpoint.replicas-halt step 5 rank 2",
    ],
    "attempt/test_sharded_rescue.py::test_one_behind_in_a_hybrid_run": [],
    "attempt/test_silence.py::test_a_shard_survives": [],
    "attempt/test_silence.py::test_killed": ["2-kill step 10 rank 1", "2-kill step 1 rank 1"],
    "attempt/test_silence.py::test_stopped": ["SIGTERM validation 2 rank 0", "SIGUSR2 step 5 rank 1"],
    "attempt/test_silence.py::test_stuck_or_failed": ["sleep step 4 rank 1"],
    "checkpoint/test_full_disk.py::test_a_stop_on_a_disk_that_stays_full": ["24"],
    "checkpoint/test_store.py::test_manifest_bit_flips": ["1", "2", "3"],
    "cli/test_command_runs.py::test_a_stop": ["words0", "words3"],
    "cli/test_script.py::test_other_starts": ["words1"],
    "cli/test_script.py::test_prove": [],
    "data/test_streams.py::test_any_number_of_ranks": ["2-parts"],
    "doctor/test_hello.py::test_every_launcher": ["mpirun"],
    "faults/test_faults.py::test_runs_come_back_from_faults": ["8", "2"],
    "frameworks/test_frameworks.py::test_a_shard_is_lost": [
        "lightning_sharded-lightning-alone",
        "transformers_sharded-transformers-alone",
        "accelerate_sharded-accelerate-copied",
        "lightning_sharded-lightning-copied",
    ],
    "frameworks/test_frameworks.py::test_sharded": [
        "accelerate_sharded-accelerate",
        "transformers_sharded-transformers",
    ],
    "frameworks/test_frameworks.py::test_whole": ["lightning_manual-lightning-places5", "dpo_reference-trl-places2"],
    "frameworks/test_ray.py::test_a_killed_worker_and_a_drained_node": [],
    "gpu/test_parts.py::test_a_checkpoint_is_loaded_straight_into_the_device": ["cpu"],
    "gpu/test_parts.py::test_a_save_is_of_its_moment": ["cpu"],
    "gpu/test_parts.py::test_batches_arrive_whole": ["cpu-None", "cpu-0", "cpu-1"],
    "gpu/test_parts.py::test_images_in_memory": ["cpu"],
    "gpu/test_parts.py::test_jpegs_decoded_on_the_device": ["cpu"],
    "gpu/test_runs.py::test_everything_is_exact": ["cpu"],
    "gpu/test_runs.py::test_from_device_to_device": ["cpu-cpu"],
    "gpu/test_runs.py::test_out_of_memory": ["cpu"],
    "gpu/test_runs.py::test_saves_beside_the_training": ["cpu"],
    "job/test_supervisor.py::test_a_frozen_rank_is_killed": ["two hosts"],
    "job/test_supervisor.py::test_a_rank_that_waits_for_a_slow_disk": ["preempted"],
    "job/test_supervisor.py::test_a_signal_is_passed_on": ["15", "2"],
    "job/test_supervisor.py::test_after_a_hang_somebody_requeues": ["two hosts"],
    "loops/test_behind_a_device.py::test_the_step_before_is_saved": ["task-2", "custom-2", "custom-6"],
    "loops/test_custom_loop.py::test_an_awkward_loop": ["2-step 5 rank 1-5", "2-step 7 rank 0-7", "4-step 8 rank 3-8"],
    "loops/test_custom_loop.py::test_another_number_of_ranks": [],
    "loops/test_custom_loop.py::test_it_compiles_by_itself": [],
    "loops/test_custom_loop.py::test_killed": [
        "2-example-step 10 rank 1-9",
        "2-awkward-step 4 rank 0-3",
        "2-example-step 10 rank 0-9",
    ],
    "loops/test_custom_loop.py::test_killed_between_two_updates": ["2-step 5 rank 1-4"],
    "loops/test_custom_loop.py::test_killed_within_an_accumulation": ["2-step 14 rank 1-3"],
    "loops/test_custom_loop.py::test_own_batches_a_second_loader_and_validations_within_epochs": [
        "step 3 rank 1-3",
        "step 6 rank 0-6",
    ],
    "loops/test_custom_loop.py::test_parameters_from_a_set": ["1"],
    "loops/test_custom_loop.py::test_replaced_buffers": ["1-SIGTERM step 3 rank 0", "2-SIGTERM step 3 rank 1"],
    "loops/test_custom_loop.py::test_replaced_buffers_and_a_killed_rank": ["1"],
    "loops/test_custom_loop.py::test_stop_anywhere": [
        "2-step 1 rank 0-1",
        "2-step 7 rank 1-7",
        "2-step 8 rank 0,1-8",
        "4-step 3 rank 2-3",
        "4-validation 1 rank 0-7",
        "4-step 8 rank 1,2-8",
    ],
    "loops/test_custom_sharding.py::test_a_copy_survives": ["step 7 rank 1-6"],
    "loops/test_custom_sharding.py::test_a_replica_survives": ["SIGKILL step 12 rank 3"],
    "loops/test_custom_sharding.py::test_stop_anywhere": ["step 1 rank 0-1", "validation 11 rank 1-16"],
    "loops/test_exact.py::test_compiled": ["2"],
    "loops/test_exact.py::test_each_option": ["optim.schedule=constant optim.name=adamw optim.lr=0.001"],
    "loops/test_exact.py::test_four_ranks": [
        "step 3 rank 2",
        "step 7 rank 1",
        "step 8 rank 1,2",
        "validation 2 rank 0",
    ],
    "loops/test_exact.py::test_four_ranks_plain": [],
    "loops/test_exact.py::test_stop_anywhere": ["first-step", "last-step-of-an-epoch", "first-step-of-the-next-epoch"],
    "loops/test_hooks.py::test_exact": [
        "kill-second-set-env2-7",
        "kill-one-after-hook-env5-7",
        "kill-all-after-hook-env6-9",
    ],
    "loops/test_loop_keys.py::test_on_two_ranks": ["args.scale=2-report run-0", "model.name=mine-report run-0"],
    "loops/test_own.py::test_resumed": ["SIGKILL step 9 rank 1-8"],
    "loops/test_sharding.py::test_compiled": [],
    "loops/test_sharding.py::test_stop_anywhere": ["in-a-validation"],
    "loops/test_shares.py::test_one_and_two_ranks": ["compiled", "resnet"],
    "loops/test_shares.py::test_twelve_shares": ["batch-of-48"],
    "loops/test_sizes.py::test_one_four_three_two_ranks": ["2"],
    "loops/test_streamed.py::test_killed": ["9-1", "2-0"],
    "loops/test_streamed.py::test_killed_within_a_step_of_micro_batches": ["first 4 rank 1"],
    "loops/test_unused.py::test_exact": ["kill-1"],
    "proof/test_ports.py::test_proved": [
        "imagenet",
        "references",
        "diffusion",
        "webdataset",
        "ppo",
        "trl",
        "accelerate",
    ],
    "proof/test_ports.py::test_resumed": ["ppo", "lightning", "trl", "references", "nanogpt", "diffusion"],
    "proof/test_ports.py::test_unaware": [],
    "proof/test_project_copy.py::test_nothing_is_replaced": [],
    "proof/test_prove.py::test_accumulation_is_exact": [],
    "proof/test_prove.py::test_as_typed": [],
    "proof/test_prove.py::test_broken_rules": [
        "draws_in_shares-said5",
        "draws-said4",
        "accumulates-said1",
        "differs_by_rank-said3",
    ],
    "proof/test_prove.py::test_exact": ["example"],
    "proof/test_prove.py::test_interrupted": ["15"],
    "proof/test_prove.py::test_what_no_weights_depend_on": [],
    "ranks/test_network.py::test_ranks_meet_over_a_real_link": ["no names", "env", "tcp IPv6", "file"],
    "ranks/test_network.py::test_the_link_drops": ["a step apart"],
    "ranks/test_network.py::test_torchrun_over_two_hosts": [],
    "replay/test_replay.py::test_a_script": ["lightning"],
    "replay/test_replay.py::test_attempts_of_other_sizes": ["4"],
    "slurm/test_by_hand.py::test_a_users_script_restarts_the_ranks": ["torchrun.sbatch"],
    "slurm/test_by_hand.py::test_every_rank_and_srun_are_killed": [],
    "slurm/test_by_hand.py::test_one_run_under_three_launchers": [],
    "slurm/test_by_hand.py::test_ranks_that_have_no_scontrol": [],
    "slurm/test_by_hand.py::test_torchrun_starts_a_killed_rank_again": [],
    "slurm/test_by_hand.py::test_torchrun_starts_again_within_a_job": [],
    "slurm/test_chain.py::test_a_job_may_last_a_minute": [],
    "slurm/test_chain.py::test_as_deep_as_it_was": [],
    "slurm/test_chain.py::test_six_minutes_where_a_job_may_last_one": [],
    "slurm/test_hosts.py::test_the_link_between_two_nodes_drops": [],
    "slurm/test_journey.py::test_install": [],
    "slurm/test_launchers.py::test_a_script_on_accelerate": [
        "--local",
        "--spawn",
        "mpirun",
        "torch's own variables",
        "submitit, local",
    ],
    "slurm/test_launchers.py::test_contradiction": [
        "python",
        "torchrun, once per node by hand",
        "torchrun, once per node under srun",
        "srun in salloc",
        "mpirun in sbatch",
        "torch's own variables",
        "submitit, local",
        "submitit, debug",
        "a notebook",
    ],
    "slurm/test_launchers.py::test_it_starts_stops_and_goes_on": [
        "torchrun, once per node by hand",
        "srun in salloc",
        "mpirun in sbatch",
        "submitit, debug",
        "submitit, local",
        "a notebook",
        "submitit, Slurm",
    ],
    "slurm/test_network_disk.py::test_a_rank_dies_with_its_supervisor": [],
    "slurm/test_network_disk.py::test_a_requeue": [],
    "slurm/test_network_disk.py::test_a_spare_node_replaces_a_dead_one": [],
    "slurm/test_nodes.py::test_a_range_shrinks": [],
    "slurm/test_operate.py::test_cancel_keeps_every_step": [],
    "slurm/test_operate.py::test_later_edits_do_not_leak_in": [],
    "slurm/test_operate.py::test_logs_and_a_drill": [],
    "slurm/test_operate.py::test_thirty_runs": [],
    "slurm/test_own_repository.py::test_a_command": ["before1"],
    "slurm/test_own_repository.py::test_a_command_whose_rank_is_killed": [],
    "slurm/test_policy.py::test_a_node_is_soon_back": [],
    "slurm/test_policy.py::test_a_rank_fails_always_at_the_same_place": [],
    "slurm/test_policy.py::test_every_rank_is_killed": [],
    "slurm/test_policy.py::test_python_is_gone": [],
    "slurm/test_policy.py::test_srun_is_killed": [],
    "slurm/test_requeue.py::test_an_expedited_requeue": [],
    "slurm/test_requeue.py::test_preemption": ["main"],
    "slurm/test_requeue.py::test_suspended": [],
    "slurm/test_restart.py::test_a_signal_between_two_starts": ["term-signal1-end1"],
    "slurm/test_restart.py::test_a_signal_between_two_starts_in_a_step": ["usr2-signal0-ends0"],
    "slurm/test_restart.py::test_as_long_as_it_makes_progress": ["halt"],
    "slurm/test_silence.py::test_a_frozen_rank": [],
    "slurm/test_silence.py::test_a_killed_rank": ["1"],
    "slurm/test_sizes.py::test_one_four_two_nodes": [],
    "slurm/test_submit.py::test_gpus_that_torch_cannot_use": ["launch.slurm.gres=gpu:2"],
    "slurm/test_submit.py::test_submit_from_python_gives_the_result": [],
    "submission/test_local.py::test_a_deleted_run_stays_deleted": [],
    "submission/test_local.py::test_a_killed_supervisor_does_not_end_the_run": [],
    "submission/test_local.py::test_a_printed_step_is_counted": [],
    "submission/test_local.py::test_a_refused_resume_hides_no_attempt": [],
    "submission/test_local.py::test_image_folder": [],
    "submission/test_local.py::test_mnist_from_a_folder": [],
    "submission/test_local.py::test_nohup": [],
    "submission/test_local.py::test_smoke_of_a_custom_loop": [],
    "submission/test_local_job.py::test_interrupted": [],
    "submission/test_local_silence.py::test_a_killed_rank": ["1"],
    "submission/test_local_silence.py::test_killed_before_the_ranks_have_met": [],
    "tasks/test_traps.py::test_a_key_that_nothing_reads": [
        "model.args.foo=1-model.args.foo: task=own.Line does not read it",
        "optim.decay_share=0.3-optim.decay_share: task=own.Line does not read it",
        "data.name=mnits-data.name: task=own.Line does not read it, so it would change nothing",
    ],
    "test_docs.py::test_a_picture_shows_what_is_printed_today": ["local"],
    "test_gpu_check.py::test_a_real_part": [],
    "test_packaging.py::test_hints_name_what_is_there": [
        "generate first",
        "cancel first",
        "sweep --config mnist seed=1,2",
        "--follow --config mnist",
    ],
    "track/test_once.py::test_scripts_of_frameworks": [],
}


def is_slow(nodeid: str) -> bool:
    """Whether the test with this id is slow."""
    place = nodeid.removeprefix("tests/")
    return place.startswith(SLOW) and not place.startswith(QUICK)


def is_long(nodeid: str) -> bool:
    """Whether `make test` leaves the test with this id to `make test-long`."""
    test, _, case = nodeid.removeprefix("tests/").partition("[")
    return test in LONG and (not LONG[test] or case.removesuffix("]") in LONG[test])


def missing(nodeids: Iterable[str]) -> list[str]:
    """What LONG names in vain: what is not among all tests of its modules. A new name of a case, or of its test, would
    silently bring it back into `make test`."""
    there = {nodeid.removeprefix("tests/") for nodeid in nodeids}
    modules = {test.partition("::")[0] for test in there}
    named = [(test, cases) for test, cases in LONG.items() if test.partition("::")[0] in modules]
    there |= {test.partition("[")[0] for test in there}
    places = (place for test, cases in named for place in [f"{test}[{case}]" for case in cases] or [test])
    return [place for place in places if place not in there]


def arrange(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Mark the slow and the long tests, and return all tests in the order in which to run them."""
    waiting, computing, quick = list[pytest.Item](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
            if item.nodeid.removeprefix("tests/").startswith(SHARING):
                item.add_marker(in_one_process(item))
            (waiting if item.get_closest_marker("slurm") else computing).append(item)
        else:
            item.add_marker(in_one_process(item))  # with all quick tests of its module: its fixtures are made once
            quick.append(item)
    return [*alternate(waiting, computing), *quick]


def in_one_process(item: pytest.Item) -> pytest.MarkDecorator:
    """The mark by which one process runs what is marked in a module."""
    return pytest.mark.xdist_group(item.nodeid.partition("::")[0])


def alternate(first: Sequence[T], second: Sequence[T]) -> Iterator[T]:
    """The items of both, each in its order, evenly mixed."""
    places = [(number / len(items), item) for items in (first, second) for number, item in enumerate(items)]
    yield from (item for _, item in sorted(places, key=lambda place: place[0]))
