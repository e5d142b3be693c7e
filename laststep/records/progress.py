"""The lines that rank 0 prints during training: plain text, for a terminal and for a log file."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from laststep.config.config import Config
from laststep.ranks.process import stat_of
from laststep.ranks.world import World
from laststep.say import command, say

# After this many seconds of steps, print a hint if more than this share of them was spent waiting for data.
WINDOW_S = 60.0
SLOW_SHARE = 0.3
TERMINAL_S = 0.25  # between two lines of steps on a terminal


class Progress:
    """Measures the speed of training, and prints progress lines on rank 0. The other ranks only measure."""

    def __init__(self, prints: bool) -> None:
        self.prints = prints
        self.total_steps = 0
        # Since the clock was last restarted.
        self._steps, self._samples = 0, 0
        self._since = self._last_step_at = time.perf_counter()
        # Of this attempt, before that.
        self._earlier_steps, self._earlier_s = 0, 0.0
        # Of the window for the hint about slow data.
        self._window_s = self._data_wait_s = 0.0
        self._hint_given = False
        # Of the lines of steps.
        self._on_terminal = sys.stdout.isatty()
        self._next_line_at = 0.0

    def restart_clock(self) -> None:
        """Start a new measurement, e.g. after a validation or a save. The time since the last step is not counted."""
        self._earlier_steps += self._steps
        self._earlier_s += self._last_step_at - self._since
        self._steps, self._samples = 0, 0
        self._since = self._last_step_at = time.perf_counter()

    def count(self, samples: int) -> None:
        """Count a finished step and its samples, those of all ranks."""
        now = time.perf_counter()
        self._window_s += now - self._last_step_at
        self._samples += samples
        self._steps += 1
        self._last_step_at = now

    def add_data_wait(self, seconds: float) -> None:
        """Count the time that the current step has spent waiting for its data."""
        self._data_wait_s += seconds

    def since_restart(self) -> tuple[int, float]:
        """Steps finished since the clock was last restarted, and the seconds since then."""
        return self._steps, time.perf_counter() - self._since

    @property
    def steps(self) -> int:
        """Steps that this attempt has finished."""
        return self._earlier_steps + self._steps

    def step_s(self) -> float:
        """Mean seconds per step of this attempt, without validations and saves."""
        seconds = self._earlier_s + self._last_step_at - self._since
        return max(1e-9, seconds) / max(1, self.steps)

    def throughput(self) -> float:
        """Samples per second over all ranks, since the clock was last restarted."""
        return self._samples / max(time.perf_counter() - self._since, 1e-9)

    def of_step(self, line: Mapping[str, Any]) -> Callable[[], None] | None:
        """What prints a step's line of metrics.jsonl, in which a loss that is not finite is None. On a terminal, at
        most a few a second: nobody reads more."""
        if not self.prints or time.perf_counter() < self._next_line_at:
            return None
        if self._on_terminal:
            self._next_line_at = time.perf_counter() + TERMINAL_S
        seconds = time.perf_counter() - self._since
        left_s = (self.total_steps - line["step"]) * seconds / max(1, self._steps)
        parts = [f"step {line['step']}/{self.total_steps}", f"epoch {line['epoch']}"]
        if "loss" in line:
            parts.append("loss not finite" if line["loss"] is None else f"loss {line['loss']:.4f}")
        if "lr" in line:
            parts.append(f"lr {line['lr']:.4g}")
        if line.get("grad_norm") is not None:
            parts.append(f"grad norm {line['grad_norm']:.4g}")
        if "tokens_per_s" in line:
            counted = f"{line['tokens_per_s']:,.0f} tokens/s" + (f"  mfu {line['mfu']:.1%}" if "mfu" in line else "")
        else:
            counted = f"{self.throughput():,.0f} samples/s" if self._samples or not self._steps else ""
        rate = counted or f"{self._steps / max(seconds, 1e-9):,.3g} steps/s"
        if self._window_s > WINDOW_S:
            self._check_data_wait()
        return partial(self.say, "  ".join([*parts, rate, f"{duration(left_s)} left"]))

    def of_epoch(self, line: Mapping[str, Any]) -> Callable[[], None]:
        """What prints an epoch's line of metrics.jsonl."""
        return partial(self.say, _text(line))

    def print_result(self, metrics: Mapping[str, Any]) -> None:
        """Print the final metrics of the run."""
        self.say(f"finished: {_text(metrics)}")

    def say(self, text: str) -> None:
        """Print a line with Laststep's mark and the time, on rank 0 only."""
        if self.prints:
            say(text)

    def _check_data_wait(self) -> None:
        """End the window. Print the hint, once per attempt, if steps waited too long for data."""
        share = self._data_wait_s / self._window_s
        if share > SLOW_SHARE and not self._hint_given:
            self._hint_given = True
            self.say(slow_data(share))
        self._window_s = self._data_wait_s = 0.0


def _text(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def duration(seconds: float) -> str:
    """An elapsed time, such as 35s, 12m 30s, 1h 02m or 3d 04h."""
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if round(seconds) >= size:
            return f"{round(seconds) // size}{unit} {round(seconds) % size // smaller_size:02}{smaller}"
    return f"{round(seconds)}s"


SHOWN_BYTES = 100e6  # of a node's memory; less is not worth a word


def likely_cause(error: str, config: Config, world: World, buffer_bytes: int = 0) -> str | None:
    """A line for the log of an attempt that ended with this error; None for an error that no rule matches.

    `buffer_bytes`: how much host memory each rank keeps for its saves.
    """
    less = _use_less_memory(config)
    advice = _ask_for_memory(config, world, buffer_bytes) + less
    shows = f"sacct -j {world.job_id} --format=JobID,State" if world.on_slurm else "dmesg"
    killed = f"a process was killed, most likely because the node ran out of memory (`{shows}` shows it): {advice}"
    full = f"the shared memory of the loader processes is full: make /dev/shm larger, or lower {_workers(config)}"
    missing = (
        "that rank did not start, or the network blocks it: a firewall, or a MASTER_ADDR or an interface "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) that its node cannot reach; the quickest test is "
        "`python -m laststep hello --env`, started the same way"
    )
    stuck = (
        f"the stacks in that rank's log show where (`{command('logs RUN --rank R')}`); if a step may take that long, "
        f"raise launch.hang_timeout_s={config.launch.hang_timeout_s}"
    )
    rules = (  # the first pattern that is found decides
        (r"DataLoader worker .* Bus error", full),
        (r"DataLoader worker .* (killed by signal|exited unexpectedly)|in rebuild_storage_fd|: gone \(killed", killed),
        (r"OutOfMemoryError|CUDA error: out of memory", f"the GPU is out of memory: {less}"),
        (
            r"can't allocate memory|MemoryError|Cannot allocate memory|bad_alloc",
            f"this node is out of memory: {advice}",
        ),
        (r"did not join within|cannot be reached within|did not publish its address", missing),
        (r"is stuck in|gives no sign of life|has not answered for", stuck),
    )
    return next((f"hint: {advice}" for pattern, advice in rules if re.search(pattern, error)), None)


def slow_data(share: float) -> str:
    """A line for the log of a rank that spends this share of its steps waiting for data."""
    return (
        f"hint: {share:.0%} of each step is spent waiting for data: load it in more processes (data.workers, with one "
        "core of launch.cpus_per_task for each), or keep it on a faster disk"
    )


def _workers(config: Config) -> str:
    return f"data.workers={config.data.workers}"


def _ask_for_memory(config: Config, world: World, buffer_bytes: int) -> str:
    """Settings that give the ranks of a node more memory, each followed by a comma."""
    settings = []
    if world.on_slurm:
        mem_gb, of_node = config.launch.mem_gb, world.local_size * buffer_bytes
        ask = f"raise launch.mem_gb={mem_gb:g}" if mem_gb else "set launch.mem_gb"
        kept = f"the ranks of a node keep {of_node / 1e9:.1f} GB in buffers for their saves"
        settings.append(f"{ask} ({kept})" if of_node >= SHOWN_BYTES else ask)
    if config.data.workers:
        settings.append(f"lower {_workers(config)}")
    return "".join(f"{setting}, " for setting in settings)


def _use_less_memory(config: Config) -> str:
    """Settings with which a rank needs less memory for the same model; those already in use are left out."""
    train = config.train
    settings = [f"train.accumulate={2 * train.accumulate} (the same global batch in smaller parts)"]
    if not train.activation_checkpointing:
        settings.append("train.activation_checkpointing=true")
    if train.cuda_graphs:  # which go with neither of these, and whose memory nothing else can use
        settings = ["train.cuda_graphs=false"]
    if train.precision in ("fp32", "tf32"):
        settings.append("train.precision=bf16")
    return f"start a new run with {', '.join(settings)} or a smaller train.batch_size, or resume on more ranks"


class StartupTimer:
    """A stopwatch that started with the process. That of a rank that its supervisor has forked for the first time
    started with the supervisor, which has imported torch for it: those seconds are the user's, too."""

    of_supervisor: ClassVar[StartupTimer | None] = None  # in a rank forked for the first time
    _began: float
    _phase_began: float

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}  # seconds by name
        if (before := StartupTimer.of_supervisor) is not None:
            self._phases.update(before._phases)
            self._began, self._phase_began = before._began, before._phase_began
            return
        self._phase_began = self._began = time.monotonic() - _process_age_s()
        self.done("python")

    def done(self, phase: str) -> None:
        """End a phase: it lasted from the previous call until now."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._phase_began
        self._phase_began = now

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._phases.items())
        return f"{self._phase_began - self._began:.2f} s: {phases}"


def _process_age_s() -> float:
    """Seconds since this process was started; 0 on a system without /proc (man 5 proc)."""
    stat = stat_of("self")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK") if stat else 0.0
