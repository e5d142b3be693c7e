"""The parts of the check, in order of worth: what only a GPU can show, and would cost users the most, comes first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Some tests, or a benchmark. It runs in a process of its own: one that breaks its CUDA context breaks no other."""

    name: str
    shows: str
    tests: tuple[str, ...] = ()  # FILE::TEST of tests/gpu, without the .py
    benchmark: str = ""  # a part of benchmarks.gpu
    gpus: int = 1  # it needs this many
    gib: float = 0.0  # it needs a GPU with this much memory
    compiles: bool = False  # it needs torch.compile
    on_cpus: bool = False  # whether one of its tests also runs on CPUs, which stand in for GPUs
    limit_s: float = 900.0  # it hangs if it takes longer

    @property
    def files(self) -> list[str]:
        """The tests as pytest wants them."""
        return [f"tests/gpu/{file}.py::{test}" for file, test in (name.split("::") for name in self.tests)]


PARTS = (
    Part(
        "full-queue",
        "a rank that is stuck behind a full launch queue saves its last step",
        ("test_rescue::test_a_full_queue", "test_deaths::test_stuck_behind_a_full_queue"),
    ),
    Part(
        "full-queue-nccl",
        "the survivor of a dead rank does, over NCCL",
        ("test_deaths::test_a_death_behind_a_full_queue",),
    ),
    Part(
        "queued-steps",
        "a rank that is stuck with queued steps saves the last whole one",
        ("test_deaths::test_stuck_with_the_next_steps_queued", "test_deaths::test_stuck_in_a_kernel"),
    ),
    Part("death-nccl", "one of two ranks is killed, over NCCL", ("test_deaths::test_one_of_two_over_nccl",)),
    Part(
        "death-gloo",
        "one of two ranks is killed, over gloo, on one GPU",
        ("test_deaths::test_two_ranks_on_one_gpu",),
        on_cpus=True,
    ),
    Part(
        "restart",
        "ranks start again under their supervisors after a SIGKILL",
        ("test_deaths::test_ranks_start_again_under_their_supervisors",),
        on_cpus=True,
    ),
    Part(
        "many",
        "four ranks, or eight on as many GPUs: the order of the ring, sharding, hybrid, restart",
        ("test_many::test_stop_and_resume", "test_many::test_a_node_dies", "test_many::test_the_ranks_start_again"),
        on_cpus=True,
        limit_s=1800.0,
    ),
    Part(
        "exact",
        "a resumed run has the bits of an undisturbed one",
        ("test_runs::test_everything_is_exact", "test_runs::test_each_arithmetic_is_exact"),
        on_cpus=True,
    ),
    Part("exact-nccl", "so has a run of two ranks over NCCL", ("test_runs::test_over_nccl",)),
    Part(
        "rescue",
        "a rescue reads the state beside a stream that hangs, without the driver's allocator",
        (
            "test_rescue::test_the_step_before_is_saved",
            "test_rescue::test_a_device_that_comes_back_during_the_save",
            "test_rescue::test_a_capture_in_torchs_default_mode",
            "test_rescue::test_no_step_allocates",
            "test_rescue::test_the_memory_is_read_beside_the_queue",
            "test_parts::test_scalars_are_read_while_the_device_is_busy",
        ),
        on_cpus=True,
    ),
    Part(
        "replay",
        "a replay has the bits of the run, and a changed line is named",
        ("test_rooms::test_a_replay_has_the_same_bits", "test_rooms::test_a_changed_line_is_named"),
        on_cpus=True,
    ),
    Part("telemetry", "a busy GPU is seen to be busy", ("test_rooms::test_telemetry_of_a_busy_gpu",)),
    Part("shares", "two ranks have the bits of one", ("test_runs::test_shares",), on_cpus=True),
    Part("shares-nccl", "over NCCL, too", ("test_runs::test_shares_over_nccl",)),
    Part(
        "saves",
        "a save is of its moment, and a checkpoint is loaded straight into the device",
        (
            "test_runs::test_saves_beside_the_training",
            "test_parts::test_a_save_is_of_its_moment",
            "test_parts::test_the_buffer_of_a_save_is_exact_and_pinned",
            "test_parts::test_a_checkpoint_is_loaded_straight_into_the_device",
        ),
        on_cpus=True,
    ),
    Part(
        "arithmetic",
        "collectives, precision and what doctor says",
        (
            "test_parts::test_over_the_collectives",
            "test_parts::test_fp32_rounds_nothing",
            "test_parts::test_hello",
            "test_parts::test_doctor",
        ),
        on_cpus=True,
    ),
    Part(
        "loading",
        "batches arrive whole, and images are the same on every device",
        (
            "test_parts::test_batches_arrive_whole",
            "test_parts::test_images_in_memory",
            "test_parts::test_the_warm_up_copies_no_data_set",
            "test_parts::test_jpegs_decoded_on_the_device",
            "test_runs::test_jpegs_decoded_on_the_gpu_are_exact",
        ),
        on_cpus=True,
    ),
    Part(
        "cuda-graphs",
        "CUDA graphs keep the bits, and are exact",
        ("test_runs::test_cuda_graphs_are_exact", "test_runs::test_cuda_graphs_keep_the_bits"),
    ),
    Part("cuda-graphs-nccl", "over NCCL, too", ("test_runs::test_cuda_graphs_over_nccl",)),
    Part(
        "ends",
        "memory runs out, the device changes, no step waits, and a straggler is told from those that wait for it",
        (
            "test_runs::test_out_of_memory",
            "test_runs::test_from_device_to_device",
            "test_runs::test_no_step_waits_for_the_gpu",
            "test_runs::test_recomputed_dropout_is_exact",
            "test_rescue::test_own_work_is_told_from_waiting",
        ),
        on_cpus=True,
    ),
    Part(
        "more-queued-steps",
        "a gradient scaler, skipped updates and CUDA graphs behind a stream that hangs",
        ("test_deaths::test_stuck_with_more_state_queued",),
    ),
    Part("bench-beside", "how fast a rescue reads beside a stream that hangs", benchmark="beside"),
    Part("bench-saves", "what a save costs the training", benchmark="saves"),
    Part("bench-digest", "what the digest of the state costs", benchmark="digest", gib=60.0),
    Part("bench-resnet50", "images per second beside a bare loop", benchmark="resnet50", gib=60.0, compiles=True),
    Part("bench-small", "steps of a small model beside a bare loop", benchmark="small", compiles=True),
    Part("bench-vit_b_16", "images per second of a transformer", benchmark="vit_b_16", gib=60.0, compiles=True),
    Part("bench-starts", "how long a compiled run takes to start", benchmark="starts", compiles=True),
    Part("bench-jpegs", "images per second from JPEGs", benchmark="jpegs", gib=60.0, compiles=True),
)
