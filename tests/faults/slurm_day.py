"""The worst day of Slurm: each call of a Slurm command that a run makes fails once, in each way, on real runs.

The run is a short one, which is submitted, looked at, requeued by a signal, started again after the death of a rank and
of a supervisor, stopped before its time limit, cancelled, and resumed to its end. A first run traces which calls this
takes, and who makes them: a command, the batch shell, the ranks. Then the same run is done again and again, and in each
of its phases another call misbehaves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.say import counted
from tests.faults import checks
from tests.faults.checks import Attempt
from tests.faults.report import commit, machine_lines, minutes
from tests.faults.task import ASIDE, TRAINED
from tests.slurm.cluster import Cluster
from tests.slurm.processes import parent, processes
from tests.slurm.user import User
from tests.support.forked import forked_python, process_of
from tests.support.project import make_shared_folder, remove_shared_folder
from tools.sections import put

T = TypeVar("T")
PROGRAMS = ("squeue", "scontrol", "sacct", "sbatch", "srun", "scancel")
WRAPPER = Path(__file__).with_name("slurm_wrapper.py")
CONFIG = Path(__file__).with_name("run.yaml")
NODES = ("w1", "w2")
PHASES = ("submit", "start", "status", "stop", "restart", "shell", "limit", "cancel", "resume", "end")
# How a call misbehaves. "lie" and "mute" are for calls that change something, "part" for those that show something.
HOW = {
    "fail": "fails at once, with the message of a controller that is away",
    "hang": "never answers, and does nothing",
    "late": "answers after 4 s",
    "part": "shows only the first tenth of its answer",
    "lie": "does what it should, and reports an error",
    "mute": "does what it should, and never answers",
    "down": "fails, and so does every call for two minutes: the controller is away",
}
SHOWS = ("squeue", "scontrol show", "scontrol ping", "sbatch --version", "sacct")
PACE_MS = 400
EPOCHS = 20  # of 25 steps
# How the attempt is recorded that a phase ends. If Slurm does not say why it sent a signal, the usual reason is taken.
REASONS = {
    "stop": ("preempted",),
    "restart": ("failed",),
    "shell": ("failed", "lost", "preempted"),  # srun sends a signal
    "limit": ("timeout", "preempted"),
    "cancel": ("cancelled",),
}
AT_MOST = 2  # of one kind of call in a phase, how many misbehave
DEADLINE_S = 300.0  # for a run to train again; the controller may be away for two minutes of them
COMMAND_S = 200.0  # for a command: sbatch is given two minutes
GONE_S = 4.0
RETRY_S = 5.0
OPTIONAL = ("status", "stop", "restart", "shell", "limit")  # left out where no call of them misbehaves
TYPES_AGAIN = re.compile(r"\bresume\b|\bstart the run again\b|\btry again\b|\btype\b")


@dataclass(frozen=True)
class Target:
    """One call, and how it misbehaves."""

    phase: str
    role: str
    kind: str
    count: int
    how: str

    def __str__(self) -> str:
        return "|".join((self.phase, self.role, self.kind, str(self.count), self.how))


@dataclass
class Outcome:
    """What came of a fault."""

    target: Target
    run: str
    hit: bool = False
    came: str = ""  # what continued the run: nothing, a command typed again, a resume
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Stuck(Exception):
    """The run cannot go through its next phase."""


class TooLate(Exception):
    """The run has finished before its last phase."""


class Day:
    """One run through all phases, with at most one fault in each."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        name: str,
        faults: dict[str, Target],
        phases: Sequence[str] = PHASES,
        epochs: int = EPOCHS,
    ) -> None:
        self.cluster, self.name, self.faults, self.phases, self.epochs = cluster, name, faults, phases, epochs
        self.user = User(cluster, folder / "runs")
        self.run = RunDir(self.user.root / name)
        self.aside, self.bin = folder / "aside" / name, folder / "bin" / name
        (self.bin / "calls").mkdir(parents=True)
        (self.bin / "hits").mkdir()
        self.aside.mkdir(parents=True)
        for program in PROGRAMS:
            (self.bin / program).write_text(f"#!{sys.executable} -SE\n" + WRAPPER.read_text())
            (self.bin / program).chmod(0o755)
        self.user.env["PATH"] = f"{self.bin}:{os.environ['PATH']}"
        self.user.env["PYTHONDONTWRITEBYTECODE"] = "1"
        self.outcomes: list[Outcome] = []
        self.wrong: list[str] = []  # violations that no single fault explains
        self.said: list[str] = []  # what commands said in this phase
        self._sink = self.wrong
        self._ended = 0  # attempts, when this phase began
        self.cancels = 0
        self._typed = "nothing"
        self._over = threading.Event()

    # --- the whole run

    def live(self) -> None:
        """Go through the phases. What goes wrong is in `outcomes` and `wrong`."""
        self.pace(PACE_MS)
        self._write("faults", "\n".join(map(str, self.faults.values())))
        watcher = threading.Thread(target=self._watch_the_queue, daemon=True)
        watcher.start()
        try:
            for phase in self.phases:
                if phase in OPTIONAL and phase not in self.faults and self.faults:
                    continue
                if phase != "end" and self.finished():
                    raise TooLate
                self._phase(phase)
        except Stuck:
            pass
        except TooLate:
            with contextlib.suppress(Stuck):
                self.wait(lambda: not self.jobs(), "finished, but its job is still in the queue")
        finally:
            self._over.set()
            watcher.join()
            self._clear_away()

    def _phase(self, phase: str) -> None:
        target = self.faults.get(phase)
        outcome = Outcome(target, self.name) if target else None
        self.said, self._typed = [], "nothing"
        sink = self._sink = outcome.wrong if outcome else self.wrong
        self._ended = len(self.records())
        self._write("phase", phase)
        began = time.monotonic()
        try:
            getattr(self, f"_{phase}")()
        except Stuck as error:
            sink.append(f"in phase {phase}: {error}")
            raise
        finally:
            self._check_reason(phase)
            if outcome:
                outcome.hit = (self.bin / "hits" / str(target)).exists()
                outcome.took_s, outcome.came = time.monotonic() - began, self._typed
                self.outcomes.append(outcome)
            # What comes next is not to meet a controller that is still away.
            (self.bin / "down").unlink(missing_ok=True)

    # --- phases

    def _submit(self) -> None:
        words = ["submit", "--config", str(CONFIG), "--name", self.name, "--nodes", "2", "--tasks-per-node", "1"]
        words += [f"launch.env.{ASIDE}={self.aside}", "launch.hang_timeout_s=15", "launch.exclude_after=null"]
        words += [f"train.epochs={self.epochs}", "data.args.samples=400", "launch.max_failures=9"]
        deadline = time.monotonic() + DEADLINE_S
        while self.command(*words) != 0:
            if self.run.config.exists():
                self._typed = "`resume` typed"
                return self._resumes(deadline)
            self._again(deadline, "submit")

    def _start(self) -> None:
        self._trains_after({})

    def _status(self) -> None:
        if self.command("status", self.name, "--json") == 0:
            states = re.findall(r'"state": "(\w+)"', self.said[-1])
            if set(states) - {"running", "unknown", "starting", "restarting", "requeued", "queued", "stopping"}:
                self._blame(f"status says {states}, but the run trains")

    def _stop(self) -> None:
        before = self.traces()
        self.cluster.run("scancel", "--signal=USR2", self.job())
        self._trains_after(before)

    def _restart(self) -> None:
        before = self.traces()
        self._kill(1, supervisor=False)
        self._trains_after(before)

    def _shell(self) -> None:
        before = self.traces()
        self._kill(1, supervisor=True)
        self._trains_after(before)

    def _limit(self) -> None:
        before, ended = self.traces(), len(self.records())
        job = self.job()
        self.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        self.wait(lambda: len(self.records()) > ended or not self.jobs(), "the time limit did not end the attempt")
        self.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60", check=False)
        self._trains_after(before)

    def _cancel(self) -> None:
        self.cancels += 1
        deadline = time.monotonic() + DEADLINE_S
        while self.command("cancel", self.name) != 0:
            self._again(deadline, "cancel")
        self.wait(lambda: not self.jobs(), "cancelled, but its job is still in the queue")

    def _resume(self) -> None:
        before = self.traces()
        self._resumes(time.monotonic() + DEADLINE_S)
        self._trains_after(before)

    def _end(self) -> None:
        self.pace(0)
        self._comes_to(self.finished, "did not finish")
        self.wait(lambda: not self.jobs(), "finished, but its job is still in the queue")

    # --- what a user does

    def command(self, *words: str) -> int:
        """Type a command; returns its exit status. A hang, a traceback or more than a line on an error is wrong."""
        typed = [self.user.python, self.user.program, *words, f"launch.root={self.user.root}"]
        try:
            done = subprocess.run(
                typed,
                cwd=self.user.folder,
                env=self.user.env,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise Stuck(f"`{words[0]}` hangs: it has not ended within {COMMAND_S:.0f} s") from None
        said = done.stdout + done.stderr
        self.said.append(said)
        if "Traceback" in said or done.returncode not in (0, 1, 2):
            self._blame(f"`{words[0]}` exited with {done.returncode}: {said[-600:]}")
        elif done.returncode and not done.stderr.strip():
            self._blame(f"`{words[0]}` exited with {done.returncode} and said nothing")
        return done.returncode

    def _resumes(self, deadline: float) -> None:
        """Type resume until it has submitted a job, or says that one is in the queue already."""
        while self.command("resume", self.name) != 0:
            if "of this run is in the queue" in self.said[-1] and any(state != "COMPLETING" for state in self.jobs()):
                return
            self._again(deadline, "resume")

    def _again(self, deadline: float, verb: str) -> None:
        self._typed = f"`{verb}` typed again"
        if time.monotonic() > deadline:
            raise Stuck(f"`{verb}` still refuses after {DEADLINE_S:.0f} s: {self.said[-1][-300:].strip()}")
        time.sleep(RETRY_S)

    def _trains_after(self, before: dict[Attempt, int]) -> None:
        """Wait until an attempt that is not among those before has done two steps."""
        self._comes_to(
            lambda: any(count > 1 for attempt, count in self.traces().items() if attempt not in before),
            "does not train again",
        )

    def _comes_to(self, goal: Callable[[], bool], failure: str) -> None:
        """Wait for the goal. If the job is gone, there must be a line that says what to type, and it is typed."""
        deadline, gone_at = time.monotonic() + DEADLINE_S, float("inf")
        while not goal():
            if self.finished():
                raise TooLate
            now = time.monotonic()
            gone_at = min(gone_at, now) if not self.jobs() else float("inf")
            if now > gone_at + GONE_S:
                if not TYPES_AGAIN.search(self._log_of_newest() + "".join(self.said)):
                    self._blame("the run has ended without a line that says what to type")
                self._typed = "`resume` typed"
                self._resumes(deadline)
                gone_at = float("inf")
            if now > deadline:
                raise Stuck(f"{failure} within {DEADLINE_S:.0f} s; jobs: {self.jobs() or 'none'}")
            time.sleep(0.1)

    # --- what there is to see

    def pace(self, milliseconds: int) -> None:
        """Set the least time per batch."""
        (self.aside / "pace.tmp").write_text(str(milliseconds))
        (self.aside / "pace.tmp").replace(self.aside / "pace")

    def traces(self) -> dict[Attempt, int]:
        """The training steps that each attempt has begun."""
        found: dict[Attempt, int] = {}
        for path in self.aside.glob("*.trace"):
            attempt = Attempt.named(path.name.split(".")[0])
            found[attempt] = max(found.get(attempt, 0), path.read_bytes().count(TRAINED) - 1)
        return found

    def records(self) -> list[dict[str, Any]]:
        """The records of the attempts that have ended."""
        return read_lines(self.run.attempts)

    def finished(self) -> bool:
        """Whether the run has."""
        return any(record["reason"] == "finished" for record in self.records())

    def jobs(self) -> list[str]:
        """The states of the run's jobs in the queue, by the real squeue."""
        return self._queue().split()

    def _queue(self, what: str = "%T") -> str:
        return self.cluster.run("squeue", "-h", "-n", self.name, "-o", what, check=False)

    def job(self) -> str:
        """The id of the run's job."""
        return self.wait(lambda: self._queue("%i").split(), "it has no job")[0]

    def calls(self) -> Counter[tuple[str, str, str]]:
        """How often each kind of call was made, by phase and caller."""
        found = (path.name.split("|") for path in (self.bin / "calls").iterdir())
        return Counter((phase, role, kind) for phase, role, kind, _ in found if phase in PHASES)

    def wait(self, condition: Callable[[], T], failure: str) -> T:
        """Poll until the condition is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise Stuck(f"{failure} (waited {DEADLINE_S:.0f} s)")
            time.sleep(0.1)
        return value

    def _log_of_newest(self) -> str:
        logs = sorted(self.run.logs.glob("*_0_log.out"), key=lambda path: path.stat().st_mtime)
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs[-1:])

    def _kill(self, rank: int, supervisor: bool) -> None:
        """Kill a rank, or its supervisor, with which it dies. The client of a forked Python stands for the latter."""

        def clients() -> dict[int, int]:
            return {
                int(environ.get("SLURM_PROCID", -1)): pid
                for pid, command, environ in processes()
                if "submitit.core._submit" in command and str(self.run.logs) in command and command[0] != "srun"
            }

        client = self.wait(lambda: clients().get(rank), f"rank {rank} is not there")
        assert client is not None
        chief = process_of(client, self.user.python)
        children = []
        for pid, _, _ in processes():
            with contextlib.suppress(OSError):
                if parent(pid) == chief:
                    children.append(pid)
        for pid in [chief] if supervisor else children[:1]:
            os.kill(pid, signal.SIGKILL)

    # --- what must never be

    def _blame(self, what: str) -> None:
        """A violation, by the fault of this phase if it has one."""
        self._sink.append(what)

    def _check_reason(self, phase: str) -> None:
        """The attempt that this phase has ended is recorded as what it was."""
        ended, true = self.records()[self._ended : self._ended + 1], REASONS.get(phase)
        if true and ended and ended[0]["reason"] not in (*true, "finished"):
            self._blame(f"recorded as {ended[0]['reason']}, but it was {true[0]}")

    def _watch_the_queue(self) -> None:
        """Two jobs of one run at once would compete for it."""
        while not self._over.wait(0.3):
            with contextlib.suppress(subprocess.TimeoutExpired):
                alive = [line for line in self._queue("%i %T").splitlines() if "COMPLETING" not in line]
                if len(alive) > 1:
                    self._blame(f"two jobs of the run at once: {', '.join(alive)}")
                    self._over.wait(5)

    def check(self, undisturbed: checks.Undisturbed | None) -> None:
        """Compare the finished run with the undisturbed one, if that is given, and its records with what happened."""
        records = self.records()
        if any(outcome.wrong for outcome in self.outcomes) and not self.finished():
            return  # it did not get there, and that is counted
        if undisturbed is not None:
            self.wrong += checks.check_metrics(read_lines(self.run.metrics), undisturbed.metrics)
            self.wrong += checks.check_checkpoints(self.verified(), set(), undisturbed.weights)
        if lost := sum(record["lost_steps"] for record in records):
            self.wrong.append(f"{lost} steps lost")
        for one, after in itertools.pairwise(records):
            if after["start_step"] != one["end_step"] - one["lost_steps"]:
                self.wrong.append(f"attempt {one['attempt']} kept step {one['end_step'] - one['lost_steps']} by its "
                                  f"record, but the next started at {after['start_step']}")  # fmt: skip
        reasons = [record["reason"] for record in records]
        if reasons.count("cancelled") > self.cancels or reasons.count("finished") != 1 or reasons[-1] != "finished":
            self.wrong.append(f"the records say {reasons}")

    def verified(self) -> list[dict[str, Any]]:
        """What `verify` finds."""
        return self.user.verify(self.name)

    def _clear_away(self) -> None:
        for job in self._queue("%i").split():
            self.cluster.run("scancel", job, check=False)
        with contextlib.suppress(Stuck):
            self.wait(lambda: not self.jobs(), "")

    def _write(self, name: str, text: str) -> None:
        (self.bin / f"{name}.new").write_text(text)
        (self.bin / f"{name}.new").replace(self.bin / name)


def targets(calls: Counter[tuple[str, str, str]], hows: Sequence[str] = tuple(HOW)) -> list[Target]:
    """Each call of the trace, in each way in which it can misbehave."""
    found, away = [], set[tuple[str, str]]()
    for (phase, role, kind), count in sorted(calls.items(), key=lambda call: (PHASES.index(call[0][0]), call)):
        shows = kind.startswith(SHOWS)
        for number in range(min(count, AT_MOST)):
            for how in hows:
                if how in (("lie", "mute") if shows else ("part",)):
                    continue
                if how == "down" and (role, kind) in away:
                    continue  # two minutes each: once for each kind of call
                if how == "down":
                    away.add((role, kind))
                if kind.startswith("srun") and how in ("hang", "mute"):
                    continue  # nothing but the job's time limit ends an srun that starts no rank
                found.append(Target(phase, role, kind, number, how))
    return found


def plan(found: Sequence[Target], count: int, seed: int) -> list[dict[str, Target]]:
    """Runs with a fault in each phase, until `count` faults are planned. Pure, but for the trace."""
    chosen = random.Random(seed).sample(list(found), min(count, len(found)))
    by_phase = {phase: deque(target for target in chosen if target.phase == phase) for phase in PHASES}
    runs = []
    while any(by_phase.values()):
        runs.append({phase: left.popleft() for phase, left in by_phase.items() if left})
    return runs


@dataclass
class Result:
    """Everything that was found."""

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    runs: int = 0
    planned: int = 0
    seed: int = 0
    began: float = field(default_factory=time.monotonic)
    commit: str = field(default_factory=commit)  # of the code under faults

    @property
    def violations(self) -> list[str]:
        """All violations, one line each."""
        return [f"{one.run}, {one.target}: {what}" for one in self.outcomes for what in one.wrong] + self.wrong

    def markdown(self) -> str:
        """A section of docs/reports.md."""
        hit = [one for one in self.outcomes if one.hit]
        typed = Counter(one.came for one in hit)
        lines = [
            f"{sum(self.calls.values())} calls of {len({k for _, _, k in self.calls})} kinds traced in one run; "
            f"{len(hit)} faults in {self.runs} runs, seed {self.seed}; {len(self.violations)} violations",
            f"{counted(len(self.outcomes) - len(hit), 'planned fault')} not met: the call was not made in that run",
            f"what the user typed: {', '.join(f'{one} {count}' for one, count in typed.most_common())}",
            *machine_lines([self.commit]),
            f"{minutes(time.monotonic() - self.began)} (min:s)",
        ]
        rows: list[tuple[str, ...]] = [("how a call misbehaves", "faults", "longest phase")]
        rows += [self._row(HOW[how], [one for one in hit if one.target.how == how]) for how in HOW]
        text = [HEAD, *(f"* {line}" for line in lines), *(f"* VIOLATION: {what}" for what in self.violations), ""]
        return "\n".join([*text, *table(rows), "", FOOT])

    @staticmethod
    def _row(does: str, found: Sequence[Outcome]) -> tuple[str, ...]:
        return does, str(len(found)), f"{max((one.took_s for one in found), default=0.0):.0f} s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    first, *rest = rows
    return [f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rest)]


HEAD = """\
## The worst day of Slurm

`make chaos SLURM=1 N=200`: a short run is submitted, looked at, requeued, restarted, stopped before its time limit,
cancelled, and resumed to its end. Each call of squeue, scontrol, sbatch, srun and scancel fails once in each way. A
command may say in one line that it does not know. Never may two jobs of the run be there at once, or an end come
without a line that says what to type.
"""
FOOT = """\
*What the user typed*: a command again that had refused in one line, or `resume` after the job had ended with a line
that says so. *Longest phase*: until the run trains again.

Where Slurm cannot be asked, the death of a supervisor may be recorded as a preemption. Not played: an srun that hangs
before it has started a rank; only the job's time limit ends it.
"""


def run_slurm_day(
    count: int,
    seed: int,
    at_once: int,
    report: Path | None,
    hows: Sequence[str] | None = None,
    phases: Sequence[str] | None = None,
) -> int:
    """Trace a run, and let `count` of its calls misbehave; returns 1 if there was a violation. `hows`, `phases`: only
    in these ways, in these phases."""
    make_shared_folder()
    folder = Path(tempfile.mkdtemp(prefix="laststep-slurm-day-"))
    result = Result(seed=seed)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_shared_folder)
        forked_python()
        sites = [stack.enter_context(site(folder / f"site-{number}")) for number in range(at_once)]
        undisturbed, trace = _first_runs(sites[0], folder / "site-0")
        result.calls = trace
        found = [one for one in targets(trace, hows or tuple(HOW)) if not phases or one.phase in phases]
        runs = deque(enumerate(plan(found, count, seed), 1))
        result.planned = sum(len(faults) for _, faults in runs)
        print(f"{sum(trace.values())} calls traced; {result.planned} faults in {len(runs)} runs", flush=True)
        lock = threading.Lock()

        def work(cluster: Cluster, own: Path) -> None:
            while runs:
                with contextlib.suppress(IndexError):
                    number, faults = runs.popleft()
                    day = Day(cluster, own, f"day-{number:03}", faults)
                    try:
                        day.live()
                        day.check(undisturbed)
                    except Exception as error:
                        day.wrong.append(f"the harness failed: {error!r}")
                    with lock:
                        _note(result, day, folder)

        threads = [
            threading.Thread(target=work, args=(cluster, folder / f"site-{number}"), daemon=True)
            for number, cluster in enumerate(sites)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if report:
        put(result.markdown(), report)
    hit = sum(one.hit for one in result.outcomes)
    print(f"{hit} faults of {result.planned} planned, {len(result.violations)} violations")
    for what in result.violations:
        print(f"VIOLATION  {what}")
    if result.violations:
        print(f"the folders of runs with violations are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(result.violations))


def _note(result: Result, day: Day, folder: Path) -> None:
    result.runs += 1
    result.outcomes += day.outcomes
    result.wrong += [f"{day.name}: {what}" for what in day.wrong]
    for one in day.outcomes:
        met = f"{one.took_s:5.0f} s  {one.came}" if one.hit else "not met"
        print(f"{minutes(time.monotonic() - result.began)}  {day.name}  {one.target!s:<56}{met}", flush=True)
        for what in one.wrong:
            print(f"         WRONG  {what}", flush=True)
    for what in day.wrong:
        print(f"         WRONG  {day.name}: {what}", flush=True)
    if not day.wrong and not any(one.wrong for one in day.outcomes):
        shutil.rmtree(day.run.path, ignore_errors=True)


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Cluster]:
    """A Slurm in this folder, for one run at a time."""
    folder.mkdir()
    cluster = Cluster.start(folder / "slurm", kill_wait_s=15, accounting=False, nodes=NODES)
    try:
        yield cluster
    finally:
        cluster.stop()


def _first_runs(cluster: Cluster, folder: Path) -> tuple[checks.Undisturbed, Counter[tuple[str, str, str]]]:
    """The result of a run that is left alone, and the calls of one that goes through all phases without a fault."""
    alone = Day(cluster, folder, "undisturbed", {})
    alone.pace(0)
    alone._write("phase", "undisturbed")
    alone._submit()
    alone._end()
    undisturbed = checks.Undisturbed(alone.verified()[-1]["weights_sha256"], read_lines(alone.run.metrics))
    traced = Day(cluster, folder, "traced", {})
    traced.live()
    traced.check(undisturbed)
    if traced.wrong:
        raise RuntimeError(f"without a fault: {traced.wrong}")
    return undisturbed, traced.calls()
