"""What a survivor does in a rescue: it freezes its state, writes parts of it, and may commit and record the end."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.attempt.ending import (
    EndReason,
    end_srun,
    ending_by_signal,
    print_hint,
    record_end,
    requeue,
    shell_is_gone,
)
from laststep.attempt.rescue import Rescue, Superseded
from laststep.attempt.rescue_cause import blamed_hosts, explain, lost_shards, silent_devices
from laststep.attempt.rescue_files import silent_file
from laststep.attempt.rescue_records import Holding, Part, Plan
from laststep.attempt.signal_cause import SHELL_KILLED
from laststep.attempt.state import AttemptState
from laststep.checkpoint.files import CheckpointError, Patience, StateChanged
from laststep.ranks import run_lock
from laststep.ranks.device_thread import DeviceSilent
from laststep.ranks.shard_place import Gathered
from laststep.ranks.watchdog import Fault
from laststep.records.retry import least_hopeful
from laststep.say import counted, say

if TYPE_CHECKING:
    from laststep.loops.loop import Loop

# How long a main thread in the middle of an update may take to complete it.
FREEZE_S = 10.0
# How long a save that all ranks write together may still take to be committed.
COMMIT_S = 2.0
# How long a disk may refuse before this rank leaves the save to another one.
INSIST_S = 5.0


class Rescuer:
    """This rank in a rescue. `main_thread_failed` says whether an update that it had begun will not be completed."""

    def __init__(
        self, state: AttemptState, fault: Fault, rescue: Rescue, main_thread_failed: Callable[[], bool]
    ) -> None:
        self._state, self._fault, self._rescue = state, fault, rescue
        self._main_thread_failed = main_thread_failed
        self.silence = ""  # why this rank's device cannot be read, if so

    def announce(self) -> None:
        """Freeze the state of the last finished step, and say what this rank can write."""
        holdings, loop, gathered = self._freeze(), self._state.loop, None
        if loop is not None and not self.silence:
            with contextlib.suppress(DeviceSilent):
                gathered = loop.gathered
        # Also where the device is silent: the other survivors, which may hold the same state, must not wait.
        self._rescue.announce(*holdings, gathered=gathered, silence=self.silence)

    def _freeze(self) -> list[Holding]:
        """Returns what this rank can write: nothing if no state is whole."""
        # A main thread that has failed will not complete its update, so waiting for that would be in vain.
        timeout_s = 0.0 if self._main_thread_failed() else FREEZE_S
        loop = self._state.loop
        if loop is None:
            return []
        self.silence, held = "", {}
        for freeze in (self._freeze_live, self._freeze_copies):  # of what both hold, the copy is used
            try:
                held.update({(one.place, one.shard): one for one in freeze(loop, timeout_s)})
            except DeviceSilent as silence:
                self.silence = str(silence)
                say(f"WARNING: this rank cannot save its state: {silence}")
            except Exception:  # such as a CUDA error, which every later call repeats
                say(f"WARNING: this rank cannot save its state:\n{traceback.format_exc()}")
        return list(held.values())

    def _freeze_live(self, loop: Loop, timeout_s: float) -> list[Holding]:
        """The shard that this rank trains with, if it is whole."""
        if not loop.freeze(timeout_s):
            return []
        step, shard, shards = loop.position.step, loop.place.shard, loop.place.shards
        if loop.saves.saving is not None and (loop.saves.saving.step == step or not loop.rescuable):
            with contextlib.suppress(RuntimeError):
                loop.saves.wait(COMMIT_S)  # all ranks may be alive, and about to commit it
        with loop.frozen() as frozen:
            saved = loop.saves.saved.step == step
            held = (loop.position.place, frozen.bytes, saved, loop.rescuable, shard, shards)
            return [Holding(*held, advances=loop.late_update is not None and not loop.late_update.tried)]

    def _freeze_copies(self, loop: Loop, timeout_s: float) -> list[Holding]:
        """The copies in this rank's host memory."""
        saved, shards = loop.saves.saved.step, loop.place.shards
        return [
            Holding(copy.place, copy.bytes, saved == copy.place[0], shard=copy.shard, shards=shards, commits=copy.own)
            for copy in loop.freeze_copies(timeout_s)
        ]

    def do(self, duty: Part | Plan | Gathered) -> None:
        """Do what the rescue asks of this rank."""
        if isinstance(duty, Part):
            self._write(duty)
        elif isinstance(duty, Gathered):
            self._advance(duty)
        else:
            self._act(duty)

    def _advance(self, gathered: Gathered) -> None:
        """Do the update of a step in which this rank's main thread is stuck."""
        loop = self._state.loop
        assert loop is not None
        try:
            if loop.advance(gathered):
                say(f"this rank was one step behind others: it has now done the update of step {gathered.step}")
        except Exception:
            say(f"WARNING: this rank cannot do the update of step {gathered.step}:\n{traceback.format_exc()}")
        self.announce()

    def _write(self, part: Part) -> None:
        """Write a part of the frozen state."""
        loop, plan = self._state.loop, self._rescue.plan
        assert loop is not None and plan is not None
        if why := self._why_not_ours():
            return self._rescue.report_unable(why)
        try:
            with loop.frozen(plan.place) as frozen:
                write = (plan.generation, part.shard, part.stripe, part.file, lambda: self._rescue.check(part))
                entry = Patience(INSIST_S, say).insist(lambda: frozen.write_part(*write))
        except Superseded:
            return
        except StateChanged:  # the rank that this one's device waited for was only slow: now it holds the next step
            return self.announce()
        except DeviceSilent:  # what is left are copies in host memory
            return self.announce()
        except Exception as error:  # of the disk or of the device; another rank may do better
            say(f"WARNING: this rank cannot save its part of the state: {error}")
            return self._rescue.report_unable(str(error))
        self._rescue.report_written(plan, part, entry)

    def _why_not_ours(self) -> str:
        """Why this rank must not change the run's checkpoints; empty if the run is this attempt's."""
        state = self._state
        try:
            ours = run_lock.still_ours(state.run_dir.lock, state.world)
        except OSError as error:  # another rank may do better
            return str(error)
        return "" if ours else "another attempt is working on this run"

    def _act(self, plan: Plan) -> None:
        """Commit what is written, record the end and requeue the job, for all ranks."""
        state, loop = self._state, self._state.loop
        if loop is not None and plan.place is None and loop.saves.saving is not None:
            with contextlib.suppress(RuntimeError):
                loop.saves.wait(COMMIT_S)  # it may be committed already: then the run is back at that step
        end_step = saved_step = max(state.start_step, loop.saves.saved.step if loop else 0)
        if loop is not None and plan.parts and not self._commit(plan, loop):
            return  # another rank may do better
        if (
            loop is not None and plan.silences and plan.done_step < 0
        ):  # no survivor can tell how far its device has come
            end_step = max(end_step, loop.readback.first_step)  # the steps before this one have their lines
        if plan.place is not None and loop is not None:
            if loop.rescuable:
                saved_step = plan.place[0]
            elif plan.place[0] > saved_step:
                say(f"only all ranks together can save this run's state: step {saved_step} is the last saved")
        self._record(plan, max(plan.done_step, end_step), saved_step)
        self._rescue.report_acted(plan)

    def _commit(self, plan: Plan, loop: Loop) -> bool:
        """Commit the step that the plan saves, which is written completely."""
        state = self._state
        assert plan.place is not None
        step = plan.place[0]
        if why := self._why_not_ours():
            say(f"WARNING: this rank cannot save step {step}: {why}")
            self._rescue.report_unable(why)
            return False
        try:
            with loop.frozen(plan.place) as frozen:
                frozen.commit(plan.generation, plan.written, Patience(INSIST_S, say))
        except StateChanged:  # this rank's device has continued, and it has announced the next step
            return False
        except DeviceSilent:
            self.announce()
            return False
        except (CheckpointError, OSError) as error:
            say(f"WARNING: {error}")
            self._rescue.report_unable(str(error))
            return False
        writers = sorted({part.rank for part in plan.parts})
        if writers == [state.world.rank]:
            say(f"rank {state.world.rank} saved step {step} alone")
        else:
            say(f"{counted(len(writers), 'rank')} saved step {step} together")
        return True

    def _record(self, plan: Plan, end_step: int, saved_step: int) -> None:
        """Record the end, and requeue the job where nobody else does."""
        state, fault = self._state, self._fault
        missing = self._rescue.missing(plan)
        reason: EndReason
        cause = ending_by_signal(state) if fault.reason == "signal" or state.signal is not None else None
        if fault.reason == "signal":
            assert cause is not None
            reason, wants_requeue, error, by_srun, _ = cause
            fault = replace(fault, cause=not (by_srun and (missing or plan.failures)))
        else:
            reason, wants_requeue, error = fault.reason, True, None
        if fault.reason != "signal" or not fault.cause:
            error = "\n".join(filter(None, [explain(fault, plan, missing, state.world), error]))
        blamed = blamed_hosts(fault, plan, missing, state.world)
        if plan.lost_shards and end_step > saved_step:
            say(lost := lost_shards(plan, end_step, saved_step))
            error = "\n".join(filter(None, [error, lost]))
        shell_killed = cause is not None and cause.error == SHELL_KILLED
        if shell_killed and SHELL_KILLED not in (error or ""):
            error = "\n".join(filter(None, [error, SHELL_KILLED]))
        if silent := silent_devices(plan, state.world):
            error = "\n".join(filter(None, [error, silent]))
        retry = least_hopeful([fault.retry, *(failure.retry for failure in plan.failures)])
        if fault.silent:  # for the supervisors
            silent_file(state.run_dir.rescues / state.world.attempt).touch()
        record = record_end(state, reason, end_step, saved_step, error=error, retry=retry, blamed=blamed)
        if record is not None:
            lost = f"{counted(record['lost_steps'], 'step')} lost" if record["lost_steps"] else "no step lost"
            say(f"attempt ended ({reason}) after step {end_step}, {lost}")
            print_hint(state, error or "")
            # A supervisor restarts or requeues. Else the batch shell does once srun has ended. But where a rank is
            # silent, srun may never end: it waits forever for a rank that ended on a node which it could not reach at
            # that moment. After a signal torchrun does not restart anything.
            srun_ends = bool(blamed) and end_srun(state)
            shell_lives = (state.world.by_submitit or state.world.supervised) and (srun_ends or not fault.silent)
            by_shell = state.world.step_restarts is not None or shell_lives
            by_torchrun = state.world.launcher_restarts and fault.reason != "signal"
            by_nobody = shell_killed or not (by_shell or by_torchrun) or (srun_ends and shell_is_gone(blamed))
            if wants_requeue and record["requeue"] and by_nobody:
                requeue(state, record)
