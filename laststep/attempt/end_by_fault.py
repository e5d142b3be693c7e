"""The end by fault: a rank died or is stuck, or the grace period after a signal is running out.

Each surviving rank takes part in a separate thread, since its main thread may be waiting for a dead rank, in C. The
thread freezes the state of the last finished step and saves it together with the other survivors (`Rescuer`, as
laststep/attempt/rescue.py asks); one of them records how the attempt ended. Then the process exits, whatever its main
thread is doing, and also when the thread itself gets nothing done any more (`EndByFault`).
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.attempt import user_error
from laststep.attempt.ending import (
    CONTINUE_BY_HAND,
    AttemptState,
    EndReason,
    end_srun,
    ending_by_signal,
    exit_now,
    print_hint,
    print_stacks,
    record_end,
    requeue,
    run_for,
    shell_is_gone,
)
from laststep.attempt.grace import LAST_MOMENT_S, GracePeriod
from laststep.attempt.rescue import Rescue, Superseded, exit_status, has_begun, silent_file
from laststep.attempt.rescue_plan import Assignment, Holding, Plan
from laststep.attempt.restart import SHELL_KILLED, Actor, who_acts
from laststep.checkpoint.files import CheckpointError, Patience, StateChanged
from laststep.ranks import disk
from laststep.ranks.disk import FreshView
from laststep.ranks.fault import DeviceSilent, Fault, FaultReason
from laststep.ranks.process import start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.watchdog import Neighbour
from laststep.ranks.world import Gathered, World
from laststep.records.attempt_record import in_one_line
from laststep.records.attempts import find_record
from laststep.records.retry import least_hopeful
from laststep.say import command, counted, say

if TYPE_CHECKING:
    from laststep.loops.engine import Engine


# How long this rank stays in a rescue in which no survivor gets anything done, for example because the disk hangs.
STALLED_S = 60.0
# How long the main thread may take to fail by itself before the process exits, where collectives fail.
MAIN_THREAD_S = 2.0
POLL_S = 0.5
# How long a main thread in the middle of an update may take to complete it.
FREEZE_S = 10.0
# How long a save that all ranks write together may still take to be committed.
COMMIT_S = 2.0
# How long a disk may refuse before this rank leaves the save to another one.
INSIST_S = 5.0
# Rank 0 looks every this many checks of the watchdog, so every 5 s, whether the run's folder is still there.
CHECKS_PER_LOOK = 10


class EndByFault:
    """This rank's part in the end by fault."""

    def __init__(self, state: AttemptState, grace: GracePeriod) -> None:
        self._state = state
        self._grace = grace
        self._fault: Fault | None = None
        self._own_failure: Fault | None = None
        self._says_own = True
        self._main_thread_failed = threading.Event()
        self._done = threading.Event()
        self._rescue: Rescue | None = None
        self._rescuer: Rescuer | None = None
        self._checks = 0
        self._neighbour: Neighbour | None = None
        self._has_met = False
        world = state.world
        self._folder = state.run_dir.rescues / world.attempt
        self._view = FreshView(world.size, self._folder)

    def main_thread_failed(self, own: Fault | None, to_say: bool) -> None:
        """The main thread has left its step for good: an update that it had begun will not be completed. `own`: because
        of this fault, of which the record of the attempt names the cause, and so does the log if it is `to_say`; None
        if it has only lost its peers. Call before the fault is reported."""
        if own is not None:
            self._own_failure, self._says_own = own, to_say
        self._main_thread_failed.set()

    def is_about(self, fault: Fault) -> bool:
        """Whether this fault, not an earlier one, ends the attempt; then it is in the log. Call after `wait`."""
        return self._fault is fault

    def wait(self) -> None:
        """Wait until this rank's part is done."""
        self._done.wait()

    def run(self, fault: Fault) -> None:
        """Save and record what can be, then exit unless the main thread fails by itself. Runs in a separate thread."""
        self._fault = fault
        worker = start_thread("rescuer", lambda: self._try_to_take_part(fault))
        stalled_s, progress = 0.0, -1
        while worker.is_alive() and stalled_s < STALLED_S:  # counted in rounds, so not while the process is suspended
            worker.join(POLL_S)
            before, progress = progress, self._rescue.progress if self._rescue else -1
            stalled_s = stalled_s + POLL_S if progress == before else 0.0
        if worker.is_alive():
            say(f"no rank has got anything done for {STALLED_S:.0f} s: exiting; the newest checkpoint stands")
            print_stacks()
        self._done.set()
        self._state.beside.close()
        group = self._state.group
        waits_in_vain = group is not None and group.world.size > 1 and not group.fails_with_peers
        if not self._main_thread_failed.wait(0.0 if waits_in_vain else MAIN_THREAD_S):
            exit_now()

    def _try_to_take_part(self, fault: Fault) -> None:
        try:
            if self._state.run_dir.is_gone():
                say(self._gone())  # there is nowhere to save anything
            else:
                self.take_part(fault)
        except BaseException:
            say(traceback.format_exc())

    def check(self) -> Fault | None:
        """What ends the attempt although no rank has failed; the watchdog calls this twice a second. Exits when the
        grace period after a signal is over."""
        try:
            return self._check_grace() or self._check_folder() or self._check_gone() or self._check_neighbour()
        except OSError:  # of the file system that the ranks share: it may answer half a second later
            return None

    def others_gave_up(self) -> bool:
        """Whether another rank has begun its end by fault, and so given up on the others."""
        self._view.refresh()
        return has_begun(self._folder)

    def close(self) -> None:
        """The attempt is over."""
        self._grace.close()
        if self._neighbour is not None:
            self._neighbour.close()

    def _check_folder(self) -> Fault | None:
        """Whether the user has deleted or moved the run. No verb would find it, yet it would hold its nodes."""
        self._checks += 1
        if self._state.world.rank == 0 and self._checks % CHECKS_PER_LOOK == 0 and self._state.run_dir.is_gone():
            return Fault("failed", self._gone(), retry="no")
        return None

    def of_death(self, rank: int) -> Fault:
        """What the death of a rank is to the others. A stop signal may have killed it."""
        reason: FaultReason = "signal" if self._state.signal else "failed"
        return Fault(reason, has_ended(rank, self._state.world), cause=False)

    def _check_gone(self) -> Fault | None:
        """On rank 0: whether a supervisor says that its rank was killed. Before the ranks have met nothing else shows
        that, or that one has failed there: it has recorded the end alone. Not before the attempt's beginning is
        recorded: its end could not be."""
        state, world = self._state, self._state.world
        if world.rank or world.number is None:
            return None
        saves_last = state.engine is not None and state.engine.saves.last
        if not self._has_met or state.signal or saves_last:  # SIGKILL may come soon; else a lifeline shows it
            self._view.refresh()
        if not self._folder.exists():
            return None
        for rank in range(1, world.size):
            status = exit_status(self._folder, rank)
            if status is not None and (status < 0 or state.engine is None):
                return self.of_death(rank)
        return None

    def _check_neighbour(self) -> Fault | None:
        """Whether the host of another node is dead. From the first tick on, when the ranks have met."""
        state = self._state
        if not self._has_met and state.ticks:
            self._has_met = True
            self._neighbour = Neighbour.of(state.world, lambda: state.ticks)
        if self._neighbour is not None and self._neighbour.is_dead:
            host = self._neighbour.host
            return Fault("hung", f"{host} does not answer: it has lost power or its network", silent=True, blames=host)
        return None

    def _gone(self) -> str:
        return f"{self._state.run_dir.path} was deleted or moved while the run trained: the attempt ends"

    def _check_grace(self) -> Fault | None:
        """Whether the grace period leaves no time to wait for the agreed last step."""
        signalled_at = self._state.signalled_at
        if self._state.signal is None or signalled_at is None:
            return None
        self._grace.follow()
        passed_s = time.monotonic() - signalled_at
        if self._grace.is_over():
            self._exit_at_last_moment()
        engine = self._state.engine
        in_last_save = engine is not None and engine.saves.last
        saves = engine is None or engine.rescuable
        if self._grace.gives_up_step(saves) and not in_last_save:
            return Fault("signal", f"the step has not finished {passed_s:.0f} s after the signal; giving it up")
        return None

    def take_part(self, fault: Fault) -> None:
        """Save the last finished step if any rank has it, and record the end."""
        state = self._state
        own = fault is self._own_failure
        # Rank 0's log, which is on the terminal, has every error in full; the others have their own.
        if self._says_own or not own:
            if own or not state.world.rank:
                user_error.say_error(fault.text)
            else:
                say(in_one_line(fault.text))
        if fault.reason in ("hung", "signal"):
            print_stacks()
        world = state.world
        seal = state.group.seal if state.group is not None else Seal()

        def is_recorded() -> bool:
            return find_record(state.run_dir, world) is not None

        rescue = Rescue(self._folder, world.rank, world.size, is_recorded, seal)
        rescue.sign_in(self._own_failure, began_step=state.ticks > 0)
        self._rescue = rescue
        rescue.start()
        try:
            rescuer = self._rescuer = Rescuer(state, fault, rescue, self._main_thread_failed.is_set)
            rescuer.announce()
            while (duty := rescue.next_duty()) is not None:
                rescuer.do(duty)
        finally:
            rescue.close()

    def _exit_at_last_moment(self) -> None:
        """Record the end and exit. Whatever is still being written would not be complete before SIGKILL."""

        state = self._state
        fault, cause, launch = self._fault, self._grace.cause, state.config.launch
        reason: EndReason = fault.reason if fault and fault.reason != "signal" else cause.reason
        advice = ""
        if reason == "timeout":
            advice = (
                f": raise launch.signal_delay_s (now {launch.signal_delay_s}), the time that a time limit leaves for "
                "the last save"
            )

        def record() -> None:
            engine = state.engine
            end_step, saved_step = (
                (engine.position.step, engine.saves.saved.step) if engine else (state.start_step, state.start_step)
            )
            silence = self._rescuer.silence if self._rescuer else ""
            unsaved = f"no time was left to save step {end_step}{advice}" if end_step > saved_step else ""
            error = "\n".join(filter(None, [cause.error, silence, unsaved]))
            ended = record_end(state, reason, end_step, saved_step, error=error or None)
            if ended is not None and cause.requeue and state.world.on_slurm:
                requeue(state, ended)  # SIGKILL may come before the batch shell gets to it

        say(f"no time left to save{advice}; the run will resume from its newest checkpoint")
        run_for(LAST_MOMENT_S / 2, record)  # in a thread: the disk may be what everything waits for
        exit_now()


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
        holdings, engine, gathered = self._freeze(), self._state.engine, None
        if engine is not None and not self.silence:
            with contextlib.suppress(DeviceSilent):
                gathered = engine.gathered
        # Also where the device is silent: the other survivors, which may hold the same state, must not wait.
        self._rescue.announce(*holdings, gathered=gathered, silence=self.silence)

    def _freeze(self) -> list[Holding]:
        """Returns what this rank can write: nothing if no state is whole."""
        # A main thread that has failed will not complete its update, so waiting for that would be in vain.
        timeout_s = 0.0 if self._main_thread_failed() else FREEZE_S
        engine = self._state.engine
        if engine is None:
            return []
        self.silence, held = "", {}
        for freeze in (self._freeze_live, self._freeze_copies):  # of what both hold, the copy is used
            try:
                held.update({(one.moment, one.shard): one for one in freeze(engine, timeout_s)})
            except DeviceSilent as silence:
                self.silence = str(silence)
                say(f"WARNING: this rank cannot save its state: {silence}")
            except Exception:  # such as a CUDA error, which every later call repeats
                say(f"WARNING: this rank cannot save its state:\n{traceback.format_exc()}")
        return list(held.values())

    def _freeze_live(self, engine: Engine, timeout_s: float) -> list[Holding]:
        """The shard that this rank trains with, if it is whole."""
        if not engine.freeze(timeout_s):
            return []
        step, shard, shards = engine.position.step, engine.place.shard, engine.place.shards
        if engine.saves.saving is not None and (engine.saves.saving.step == step or not engine.rescuable):
            with contextlib.suppress(RuntimeError):
                engine.saves.wait(COMMIT_S)  # all ranks may be alive, and about to commit it
        with engine.frozen() as frozen:
            saved = engine.saves.saved.step == step
            held = (engine.position.moment, frozen.bytes, saved, engine.rescuable, shard, shards)
            return [Holding(*held, advances=engine.can_advance)]

    def _freeze_copies(self, engine: Engine, timeout_s: float) -> list[Holding]:
        """The copies in this rank's host memory."""
        saved, shards = engine.saves.saved.step, engine.place.shards
        return [
            Holding(copy.moment, copy.bytes, saved == copy.moment[0], shard=copy.shard, shards=shards, commits=copy.own)
            for copy in engine.freeze_copies(timeout_s)
        ]

    def do(self, duty: Assignment | Plan | Gathered) -> None:
        """Do what the rescue asks of this rank."""
        if isinstance(duty, Assignment):
            self._write(duty)
        elif isinstance(duty, Gathered):
            self._advance(duty)
        else:
            self._act(duty)

    def _advance(self, gathered: Gathered) -> None:
        """Do the update of a step in which this rank's main thread is stuck."""
        engine = self._state.engine
        assert engine is not None
        try:
            if engine.advance(gathered):
                say(f"this rank was one step behind others: it has now done the update of step {gathered.step}")
        except Exception:
            say(f"WARNING: this rank cannot do the update of step {gathered.step}:\n{traceback.format_exc()}")
        self.announce()

    def _write(self, assignment: Assignment) -> None:
        """Write a stripe of the frozen state."""
        engine, plan = self._state.engine, self._rescue.plan
        assert engine is not None and plan is not None
        if why := self._why_not_ours():
            return self._rescue.report_unable(why)
        try:
            with engine.frozen(plan.moment) as frozen:
                write = (
                    plan.generation,
                    assignment.shard,
                    assignment.stripe,
                    assignment.file,
                    lambda: self._rescue.check(assignment),
                )
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
        self._rescue.report_written(plan, assignment, entry)

    def _why_not_ours(self) -> str:
        """Why this rank must not change the run's checkpoints; empty if the run is this attempt's."""
        state = self._state
        try:
            ours = disk.lock_is_ours(state.run_dir.lock, state.world)
        except OSError as error:  # another rank may do better
            return str(error)
        return "" if ours else "another attempt is working on this run"

    def _act(self, plan: Plan) -> None:
        """Commit what is written, record the end and requeue the job, for all ranks."""
        state, engine = self._state, self._state.engine
        if engine is not None and plan.moment is None and engine.saves.saving is not None:
            with contextlib.suppress(RuntimeError):
                engine.saves.wait(COMMIT_S)  # it may be committed already: then the run is back at that step
        end_step = saved_step = max(state.start_step, engine.saves.saved.step if engine else 0)
        if engine is not None and plan.assignments and not self._commit(plan, engine):
            return  # another rank may do better
        if (
            engine is not None and plan.silences and plan.done_step < 0
        ):  # no survivor can tell how far its device has come
            end_step = max(end_step, engine.readback.first_step)  # the steps before this one have their lines
        if engine is not None and engine.has_lost_state:  # what is saved is older than what was done
            end_step = max(end_step, engine.steps_done)
        if plan.moment is not None and engine is not None:
            if engine.rescuable:
                saved_step = plan.moment[0]
            elif plan.moment[0] > saved_step:
                say(f"only all ranks together can save this run's state: step {saved_step} is the last saved")
        self._record(plan, max(plan.done_step, end_step), saved_step)
        self._rescue.report_acted(plan)

    def _commit(self, plan: Plan, engine: Engine) -> bool:
        """Commit the step that the plan saves, which is written completely."""
        state = self._state
        assert plan.moment is not None
        step = plan.moment[0]
        if why := self._why_not_ours():
            say(f"WARNING: this rank cannot save step {step}: {why}")
            self._rescue.report_unable(why)
            return False
        try:
            with engine.frozen(plan.moment) as frozen:
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
        writers = sorted({assignment.rank for assignment in plan.assignments})
        if writers == [state.world.rank]:
            say(f"rank {state.world.rank} saved step {step} alone")
        else:
            say(f"{counted(len(writers), 'rank')} saved step {step} together")
        return True

    def _record(self, plan: Plan, end_step: int, saved_step: int) -> None:
        """Record the end, and requeue the job where nobody else does."""
        state, fault = self._state, self._fault
        missing = self._rescue.missing(plan)
        cause = ending_by_signal(state) if fault.reason == "signal" or state.signal is not None else None
        shell_killed = cause is not None and cause.error == SHELL_KILLED
        reason: EndReason
        lines: list[str | None] = []
        if fault.reason == "signal":
            assert cause is not None
            reason, wants_requeue = cause.reason, cause.requeue
            fault = replace(fault, cause=not (cause.by_srun and (missing or plan.failures)))
        else:
            reason, wants_requeue = fault.reason, True
        if fault.reason != "signal" or not fault.cause:
            lines.append(explain(fault, plan, missing, state.world))
        if fault.reason == "signal" or shell_killed:
            assert cause is not None
            lines.append(cause.error)
        blamed = blamed_hosts(fault, plan, missing, state.world)
        if plan.lost_shards and end_step > saved_step:
            say(lost := lost_shards(plan, end_step, saved_step))
            lines.append(lost)
        for rank, why in plan.silences:  # a line for each survivor whose device does not answer
            lines.append(f"rank {rank} on {state.world.host_of(rank)} saves nothing: {why}")
        error = "\n".join(filter(None, lines)) or None
        retry = least_hopeful([fault.retry, *(failure.retry for failure in plan.failures)])
        if fault.silent:  # for the supervisors
            silent_file(state.run_dir.rescues / state.world.attempt).touch()
        record = record_end(state, reason, end_step, saved_step, error=error, retry=retry, blamed=blamed)
        if record is not None:
            lost = f"{counted(record['lost_steps'], 'step')} lost" if record["lost_steps"] else "no step lost"
            # One line has been said already, and is not repeated; a command that waits ends with it.
            waits = state.world.supervised or user_error.is_debugged
            summary = f": {in_one_line(error)}" if "\nTraceback" in (error or "") and not waits else ""
            say(f"attempt ended ({reason}) after step {end_step}, {lost}{summary}")
            if not (state.world.on_slurm or waits):
                debug = command(f"resume {shlex.quote(state.run_dir.name)} --debug")
                say(f"{CONTINUE_BY_HAND}; to debug: {debug}")
            print_hint(state, error or "")
            srun_ends = bool(blamed) and end_srun(state)
            actor = who_acts(state.world, fault, shell_killed, srun_ends)
            if actor is not Actor.RANK and srun_ends and shell_is_gone(blamed):
                actor = Actor.RANK
            if actor is Actor.RANK and wants_requeue and record["requeue"]:
                requeue(state, record)


def blamed_hosts(fault: Fault, plan: Plan, missing: list[int], world: World) -> list[str]:
    """The hosts of ranks that are stuck, that are gone without an error of their own, or whose GPU has failed. Any
    other error may be a bug, and blames no host."""
    known = [fault] if fault.blames or fault.cause else plan.failures
    hosts = ",".join(one.blames for one in known).split(",") if known else [world.hosts[rank] for rank in missing]
    return list(dict.fromkeys(filter(None, hosts)))


def explain(fault: Fault, plan: Plan, missing: list[int], world: World) -> str:
    """The root cause: the error of a rank that failed by itself; else the ranks that are gone, which are printed."""
    if fault.cause:
        return fault.text
    if plan.failures:
        return plan.failures[0].text
    if not missing:
        return fault.text
    names = "; ".join(f"rank {rank} on {world.host_of(rank)}" for rank in missing)
    lost = f"{names}: gone (killed, out of memory, or its node died)"
    say(lost)
    says_as_much = fault.text in [has_ended(rank, world) for rank in missing]
    return lost if says_as_much else f"{lost}\n{fault.text}"


def has_ended(rank: int, world: World) -> str:
    """What is reported of a rank whose process has ended."""
    return f"rank {rank} on {world.host_of(rank)} has ended"


def lost_shards(plan: Plan, end_step: int, saved_step: int) -> str:
    """Why the survivors cannot save the last step."""
    names = ", ".join(map(str, plan.lost_shards))
    shards = f"shard {names} is" if len(plan.lost_shards) == 1 else f"shards {names} are"
    return f"step {end_step} cannot be saved: {shards} held by no surviving rank; the run is back at step {saved_step}"
