"""One run under faults, from its submission to the last check."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.config.keys import fields_of
from laststep.records.metrics import WRITE_EVERY_S, read_lines
from laststep.rundir import RunDir
from tests.faults import checks
from tests.faults.aim import aim, whereabouts
from tests.faults.checks import Attempt, Seen, Undisturbed
from tests.faults.damage import Unrefused
from tests.faults.faults import ALL
from tests.faults.plan import Fault, Loss, Moment, Return, RunPlan, Shape, Shot
from tests.faults.report import Hit
from tests.faults.site import SPARE, Site
from tests.faults.task import ASIDE
from tests.faults.victim import Missed, NeverCame, Process, Victim

CONFIG = Path(__file__).with_name("run.yaml")
DISK_MB = 64
FAST_MS, SLOW_MS = 10, 400  # ms per batch: on the way to a fault, and while the run waits for one
BACK_DEADLINE_S = 120.0  # for a run to train again, before a fault or after launch.py resume
SLOWEST_STEP_S = 0.2  # of a run that is left alone, on a busy machine
GONE_S = 2.0  # a run without a job for this long does not continue by itself
# After a node has failed, slurmctld repeats an order to end the ranks of an attempt, which hits the next attempt (seen
# on Slurm 22.05, see laststep.ranks.slurm). It costs no step, and the fault in progress is not to blame.
OF_SLURM = "though Slurm had not ended the job"
LAST_STEPS = 30  # a run with fewer steps left takes no more faults: a new run gets them
STRAY_S = 15.0  # a loader worker takes 5 s to notice that its rank has died
POLL_S = 0.1


class GaveUp(Exception):
    """The run cannot continue."""


def _outlives(process: Process, now: Attempt, is_supervisor: bool) -> bool:
    """Whether a process may be older than the attempt: a supervisor of its step, or what started the step."""
    attempt = process.attempt
    same_job = (attempt.job_id, attempt.restart) == (now.job_id, now.restart)
    return same_job and (attempt.step == now.step if is_supervisor else not process.trains)


class Run:
    """Submits a run, injects its planned faults, waits until it has recovered from each, and checks it."""

    def __init__(self, site: Site, plan: RunPlan, tell: Callable[[Hit], None], words: Sequence[str] = ()) -> None:
        self.site = site
        self.plan = plan
        self.tell = tell
        self.wrong: list[str] = []
        self.spoiled = False  # whether a fault led to a violation
        self.root = site.folder / (f"disk-{plan.name}" if plan.setting.disk else "runs")
        if plan.setting.disk:
            site.mount(self.root, DISK_MB)
        self.victim = Victim(site, RunDir(self.root / plan.name), site.folder / "aside" / plan.name, plan.setting)
        config = Config.load(CONFIG, list(words))
        self.log_every = config.train.log_every
        # Steps that metrics.jsonl may lack when all ranks are killed: those since the last log line, and of 0.1 s.
        self.unwritten_steps = self.log_every + round(1000 * WRITE_EVERY_S / FAST_MS)
        self.total = config.train.epochs * int(config.data.args["samples"]) // config.train.batch_size
        self.victim.total = self.total
        self.words = [*self._words(), *words]
        self.resumed = 0  # the step after which the current attempt began
        self.settled: set[Attempt] = set()  # attempts whose lost steps have been checked
        self.set_back: set[Attempt] = set()  # attempts whose last checkpoint the harness damaged
        self.unwritten: set[Attempt] = set()  # attempts whose disk was full

    def _words(self) -> list[str]:
        setting, victim = self.plan.setting, self.victim
        shapes = {
            # No node but these two may run it, and each of them is struck again and again.
            Shape.FIXED: (str(setting.nodes), f"launch.exclude={SPARE}", "launch.exclude_after=null"),
            Shape.SPARE: (str(setting.nodes), "launch.spare_nodes=1"),
            Shape.RANGE: (f"1-{setting.nodes}", f"launch.exclude={SPARE}", f"train.shares={setting.world_size}"),
        }
        nodes, *others = shapes[setting.shape]
        words = [
            *("--config", str(CONFIG), "--name", self.plan.name, "--partition", setting.partition),
            *("--nodes", nodes, "--tasks-per-node", str(setting.tasks_per_node), *others),
            f"launch.root={self.root}",
            f"launch.env.{ASIDE}={victim.aside}",
            f"data.workers={setting.workers}",
        ]
        if setting.clock:
            words += [f"launch.env.LASTSTEP_FAULTS_CLOCK={victim.clock}"]
        if setting.forks:
            words += [f"launch.env.LASTSTEP_FAULTS_FORKS={victim.forks}"]
        libraries = ((self.site.clock, setting.clock), (self.site.forks, setting.forks))
        if preloaded := ":".join(str(library) for library, has in libraries if has):
            words += [f"launch.env.LD_PRELOAD={preloaded}"]
        if "launch.max_failures" in {key for key, _, _ in fields_of(Config)}:
            words.append("launch.max_failures=20")  # repeated faults at its start are not the run's own failures
        return words

    # --- from submission to end

    def live(self, undisturbed: Undisturbed | None) -> list[Shot]:
        """Carry out the run's plan; returns the shots that were not fired. Violations are in `wrong`, and in the Hits
        that `tell` receives."""
        missed: list[Shot] = []
        shots = list(self.plan.shots)
        try:
            self.submit()
            while shots and self._is_ready(shots[0]):
                shot = shots.pop(0)
                if not self._take(shot):
                    missed.append(shot)
            self._end()
            if undisturbed is not None:
                self.check(undisturbed)
        except GaveUp as error:
            self.wrong += filter(None, [str(error)])
            self._clear_away()
        return missed + shots

    def submit(self) -> None:
        """Submit the run. Raises GaveUp."""
        self._types("submit", *self.words)

    def result(self) -> Undisturbed:
        """The result of the finished run."""
        return Undisturbed(self._verified()[-1]["weights_sha256"], read_lines(self.victim.run.metrics))

    def close(self, keep: Path) -> None:
        """Remove the run's folder, after copying it to `keep` if there was a violation."""
        if self.wrong or self.spoiled:
            keep.mkdir(exist_ok=True)
            shutil.copytree(self.victim.run.path, keep / self.plan.name)
            shutil.copytree(self.victim.aside, keep / self.plan.name / "aside")
        shutil.rmtree(self.victim.run.path)
        if self.plan.setting.disk:
            self.site.unmount(self.root)

    def _types(self, *words: str) -> None:
        # The batch shell has the environment of the command.
        env = {"LD_PRELOAD": str(self.site.forks), "LASTSTEP_FAULTS_FORKS": str(self.victim.forks)}
        done = self.site.launch(*words, env=env if self.plan.setting.forks else None)
        if done.returncode:
            said = (done.stdout + done.stderr).strip()
            raise GaveUp(f"`launch.py {words[0]}` exited with {done.returncode}: {said[-500:]}")

    def _is_ready(self, shot: Shot) -> bool:
        """Wait until the next fault can be aimed; False if the run has too few steps left."""
        victim = self.victim
        if victim.traces() or shot.moment not in (Moment.START, Moment.RESTORE):
            self._gets_to_work()
        last = victim.log.last("step")
        enough = shot.moment is Moment.END or last is None or last.number < self.total - LAST_STEPS
        return enough and not victim.finished

    def _gets_to_work(self) -> None:
        """Wait until the run trains, after a fault's own requeue or a fault that missed."""
        if self._come_back(self._at_work, BACK_DEADLINE_S) != "itself":
            self.wrong.append("its job left the queue without a fault")

    def _at_work(self) -> bool:
        attempt, where = whereabouts(self.victim)
        working = where in (Moment.STEP, Moment.VALIDATION, Moment.SAVE)
        return attempt is not None and working and self.victim.traces()[attempt] > 1

    def _take(self, shot: Shot) -> bool:
        """Inject a fault and wait until the run has recovered; False if it could not be aimed."""
        fault, victim = ALL[shot.fault], self.victim
        again = Moment.STEP if Moment.STEP in fault.moments else shot.moment
        for moment in (shot.moment, again, again):
            victim.set_pace(FAST_MS)
            try:
                aim(victim, moment, shot.delay_ms)
                self._strike(fault, shot)
            except Missed:
                self._gets_to_work()
            else:
                return True
            if victim.finished:
                break
        return False

    def _strike(self, fault: Fault, shot: Shot) -> None:
        """Inject the fault now. Raises Missed if its target is gone, and GaveUp if the run does not recover."""
        victim = self.victim
        victim.log.poll()
        attempt, where = whereabouts(victim)
        if victim.finished:
            raise Missed("the run has finished")
        known = set(victim.traces()) | ({attempt} if attempt else set())
        kept = victim.kept()
        if fault.slow:
            victim.set_pace(SLOW_MS)
        if again := shot.moment in (Moment.AGAIN, Moment.RESCUE):  # two faults: there may be no rank left to save
            fault = fault if fault.loses is Loss.NEWEST else replace(fault, loses=Loss.SINCE_SAVE)
        planned = again or shot.moment is Moment.END
        hit = Hit(self.plan.name, fault.name, shot.moment if planned else where, shot.delay_ms)
        ranks = victim.ranks().values()
        nodes = len({rank.env["SLURMD_NODENAME"] for rank in ranks}) or self.plan.setting.nodes
        size = len(ranks) or self.plan.setting.world_size
        struck = time.monotonic()
        try:
            if later := fault.inject(victim, shot):
                struck, kept = later, victim.kept()
        except (Unrefused, NeverCame) as error:
            if victim.finished:  # for example before the time limit, which Slurm checks every 30 s
                raise Missed("the run has finished") from None
            hit.wrong.append(str(error))
        if fault.saves_again and attempt is not None:
            self.unwritten.add(attempt)
        if fault.loses is Loss.NEWEST:
            kept = victim.kept()
            self.set_back |= set(map(Attempt.of, victim.records()[-1:]))
        try:
            hit.by = self._by_whom(fault, attempt, known)
            hit.back_s = time.monotonic() - struck
            victim.set_pace(FAST_MS)
            victim.settle()
            self._judge(hit, fault, attempt, kept, nodes, size)
        except GaveUp as error:
            hit.wrong.append(str(error))
            raise GaveUp() from None  # the violation is in the Hit
        finally:
            self.spoiled |= bool(hit.wrong)
            self.tell(hit)

    def _by_whom(self, fault: Fault, attempt: Attempt | None, known: set[Attempt]) -> str:
        """Wait until the run has recovered; returns what continued it."""
        victim = self.victim
        may_stay = fault.returns in (Return.STAYS, Return.PERHAPS)
        if may_stay:
            victim.settle()
        before = {attempt: count for attempt, count in victim.traces().items()}
        saved = victim.kept()

        def began_anew() -> bool:
            return any(count > 1 for found, count in victim.traces().items() if found not in known)

        def stayed() -> bool:
            goes_on = attempt is not None and victim.traces().get(attempt, 0) > before.get(attempt, 0) + 1
            return may_stay and goes_on and (victim.kept() > saved or not fault.saves_again)

        by = self._come_back(lambda: began_anew() or stayed(), fault.deadline_s)
        return by if victim.finished or began_anew() else "stayed"

    def _come_back(self, back: Callable[[], bool], deadline_s: float) -> str:
        """Wait for `back`, or for the end of the run. If its job is gone, resume it, as its user would.

        Returns what continued the run. Raises GaveUp at the deadline.
        """
        victim, by, gone_at = self.victim, "itself", float("inf")
        deadline = time.monotonic() + deadline_s
        while not back() and not victim.finished:
            now = time.monotonic()
            if victim.jobs or victim.ranks():
                gone_at = float("inf")
            gone_at = min(gone_at, now)
            if now > gone_at + GONE_S:
                if by != "itself":
                    raise GaveUp("its job left the queue again after launch.py resume")
                self._types("resume", victim.run.name, f"launch.root={self.root}")
                by, gone_at, deadline = "launch.py resume", float("inf"), now + BACK_DEADLINE_S
            if now > deadline:
                jobs = ", ".join(f"{job.job_id} {job.state}" for job in victim.jobs) or "none"
                raise GaveUp(
                    f"HANGS: not recovered within {deadline_s:.0f} s; jobs: {jobs}; ranks: {sorted(victim.ranks())}"
                )
            time.sleep(POLL_S)
            victim.log.poll()
        return by

    # --- checks

    def _judge(self, hit: Hit, fault: Fault, attempt: Attempt | None, kept: int, nodes: int, size: int) -> None:
        """Enter in `hit` what the fault cost, which struck a run of `size` ranks on that many nodes, and any
        violations."""
        victim, returns, itself = self.victim, fault.returns, hit.by == "itself"
        names = (attempt, attempt and attempt.never_began)
        record = next((r for r in victim.records() if Attempt.of(r) in names), None)
        hit.recorded = record["reason"] if record else ""
        if victim.finished:
            return  # too late to cost anything; the last checks cover the whole run
        if returns in (Return.ITSELF, Return.PERHAPS) and hit.by == "launch.py resume":
            hit.wrong.append("did not continue by itself")
        if returns is Return.USER and itself:
            hit.wrong.append("continued although it was cancelled")
        of_slurm = record is not None and OF_SLURM in (record["error"] or "")
        # `aim` has requeued it, or killed a rank.
        had_to_end = hit.moment in (Moment.STOP, Moment.HOLD, Moment.AGAIN, Moment.RESCUE)
        if returns is Return.STAYS and hit.by != "stayed" and not (had_to_end or of_slurm):
            hit.wrong.append("ended although it should have continued")
        if hit.by == "stayed":
            return
        victim.log.poll()
        if (resume := victim.log.last("resume")) is None:
            hit.wrong.append("its log has no line about resuming")
            return
        starts = {Attempt.of(record): int(record["start_step"]) for record in victim.records()}
        begun = {
            a: count for a, count in victim.traces().items() if a in starts and a not in self.settled and count > 0
        }
        hit.lost = max(
            self.resumed - resume.number,
            *(checks.lost_steps(starts[a], count, resume.number) for a, count in begun.items()),
            0,
        )
        hit.allowed = 0 if checks.spares(fault.loses, nodes, size) else hit.lost + resume.number - kept
        hit.wrong += checks.check_loss(fault.loses, nodes, size, resume.number, hit.lost, kept)
        if fault.loses is Loss.NEWEST:
            said = {event.number for event in victim.log.events if event.kind == "skip"}
            unsaid = [step for step in victim.spoiled() if step > resume.number and step not in said]
            hit.wrong += [f"the log does not say that the checkpoint of step {step} was skipped" for step in unsaid]
        self.resumed = resume.number
        self.settled |= set(starts)
        self._leaves_nothing()

    def _leaves_nothing(self) -> None:
        """Check that all processes of earlier attempts end."""
        victim = self.victim
        now, _ = whereabouts(victim)

        def strays() -> list[str]:
            lasting = {p.pid for p in victim.supervisors().values()}
            return [
                f"{p.pid} {' '.join(p.argv)[:80]}"
                for p in victim.processes()
                if p.attempt != now and not (now and _outlives(p, now, p.pid in lasting))
            ]

        self.victim.set_pace(SLOW_MS)
        try:
            victim.wait(lambda: not strays(), STRAY_S, "")
        except NeverCame:
            self.wrong.append(f"processes of earlier attempts are left: {'; '.join(strays())}")
        self.victim.set_pace(FAST_MS)

    def _end(self) -> None:
        """Let the run finish, and check that it leaves no job and no process."""
        victim = self.victim
        victim.set_pace(0)
        if self._come_back(lambda: False, max(BACK_DEADLINE_S, self.total * SLOWEST_STEP_S)) != "itself":
            self.wrong.append("its job left the queue before the run finished")
        try:
            victim.wait(lambda: not victim.jobs, BACK_DEADLINE_S, "finished, but has jobs in the queue")
            victim.wait(lambda: not victim.processes(), STRAY_S, "finished, but left processes")
        except NeverCame as error:
            left = [f"{p.pid} {' '.join(p.argv)[:80]}" for p in victim.processes()]
            self.wrong.append(f"{error}: {victim.jobs} {left}")
            self._clear_away()

    def check(self, undisturbed: Undisturbed) -> None:
        """Compare the finished run with the undisturbed one, and its records with what the harness saw."""
        victim = self.victim
        seen = Seen(
            begun=victim.traces(),
            resumed=[event.number for event in victim.log.events if event.kind == "resume"],
            damaged=victim.spoiled(),
            set_back=self.set_back,
            unwritten=self.unwritten,
        )
        self.wrong += checks.check_run(victim.run, self._verified(), undisturbed, seen, self.unwritten_steps)
        self.wrong += checks.check_curves(victim.run, self.log_every)

    def _verified(self) -> list[dict[str, Any]]:
        done = self.site.launch("verify", self.victim.run.name, "--json", f"launch.root={self.root}")
        try:
            found: list[dict[str, Any]] = json.loads(done.stdout)
        except ValueError:
            raise GaveUp(f"`launch.py verify` printed {(done.stdout + done.stderr)[-500:]}") from None
        return found

    def _clear_away(self) -> None:
        """End the run's jobs and processes, for the next run on these nodes."""
        for job in self.victim.jobs:
            self.site.cluster.run("scancel", job.job_id, check=False)
        for process in self.victim.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
