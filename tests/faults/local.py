"""The worst day of processes under --local: each run is struck once, at one moment, and resumed until it finishes."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from laststep.config.config import Config
from laststep.records.metrics import WRITE_EVERY_S, read_lines
from laststep.rundir import RunDir
from tests.faults import checks
from tests.faults.aim import END_STEPS, QUICK_POLL_S
from tests.faults.checks import Attempt, Seen, Undisturbed
from tests.faults.plan import Fault, Loss, Moment, Return, Setting, Shot
from tests.faults.processes import NO_FORKS_S
from tests.faults.report import Hit
from tests.faults.site import BATCH, Site
from tests.faults.task import ASIDE
from tests.faults.victim import Missed, NeverCame, Process, Victim
from tests.support.project import PROJECT

CONFIG = Path(__file__).with_name("run.yaml")
WORDS = ("train.epochs=3", "launch.max_failures=20", "data.workers=1", "--tasks-per-node", "2")
SETTING = Setting(1, 2, BATCH, workers=1, disk=False, clock=False, forks=True)
PACE_MS, SLOW_MS = 10, 100  # ms per batch: the undisturbed pace, and while a fault is aimed
COMES_S = 60.0  # within which a moment comes
ENDS_S = 120.0  # within which a start of a run ends after a fault
AT_ONCE = 2  # runs at a time
RESUMES = 2  # a fault may end the run once, and a fault that lasts the next start, too


class LocalVictim(Victim):
    """A run under --local."""

    launcher: subprocess.Popen[str]

    def processes(self) -> list[Process]:
        """The supervisors, the ranks and their workers."""
        return [p for p in super().processes() if "SUBMITIT_LOCAL_GLOBALID" in p.env and "--supervised" in p.argv]

    def _by_rank(self, depth: int) -> dict[int, Process]:
        found = {p.pid: p for p in self.processes()}

        def level(process: Process) -> int:
            return 1 + level(found[process.parent]) if process.parent in found else 0

        return {int(p.env["SUBMITIT_LOCAL_GLOBALID"]): p for p in found.values() if level(p) == depth}

    def supervisors(self) -> dict[int, Process]:
        return self._by_rank(0)

    def ranks(self) -> dict[int, Process]:
        return self._by_rank(1)

    def workers(self) -> list[Process]:
        return list(self._by_rank(2).values())


def kill_parent(victim: Victim, shot: Shot) -> None:
    """The OOM killer takes the command that started the ranks."""
    cast(LocalVictim, victim).launcher.kill()


def no_forks(victim: Victim, shot: Shot) -> None:
    """The kernel has no process for a moment."""
    least, most = NO_FORKS_S
    victim.stop_forks(least + shot.aim * (most - least))


def kill_supervisor(victim: Victim, shot: Shot) -> None:
    """The OOM killer takes the parent of a rank, and with it the rank."""
    supervisors = victim.supervisors()
    if (number := victim.pick(shot.aim)) not in supervisors:
        raise Missed(f"rank {number} has no supervisor")
    victim.signal(signal.SIGKILL, supervisors[number].pid)


def kill_rank(victim: Victim, shot: Shot) -> None:
    """The OOM killer takes a rank."""
    victim.signal(signal.SIGKILL, victim.rank(victim.pick(shot.aim)).pid)


def kill_worker(victim: Victim, shot: Shot) -> None:
    """The OOM killer takes a loader worker."""
    if not (workers := victim.workers()):
        raise Missed("no loader worker is running")
    victim.signal(signal.SIGKILL, workers[int(shot.aim * len(workers))].pid)


PHASES = (Moment.START, Moment.RESTORE, Moment.SAVE, Moment.STOP, Moment.RESCUE, Moment.AGAIN, Moment.END)
WITH_WORKERS = (Moment.STEP, Moment.SAVE, Moment.END)
EITHER, A_RANK_LIVES = Return.EITHER, Loss.UNLESS_A_RANK_LIVES
FAULTS = [
    Fault("local-parent", "SIGKILL of the command that started the ranks", kill_parent, PHASES, returns=EITHER),
    Fault("local-supervisor", "SIGKILL of a rank's supervisor", kill_supervisor, PHASES, A_RANK_LIVES, EITHER),
    Fault("local-rank", "SIGKILL of a rank", kill_rank, PHASES, A_RANK_LIVES, EITHER),
    Fault("local-worker", "SIGKILL of a loader worker", kill_worker, WITH_WORKERS, returns=EITHER),
    Fault("local-no-forks", "fork fails with EAGAIN for 0.5 to 3.5 s", no_forks, PHASES, Loss.SINCE_SAVE, EITHER),
]
KINDS = {fault.name: fault for fault in FAULTS}


class LocalRun:
    """One run under --local, from its start to the last check."""

    def __init__(self, folder: Path, name: str, forks: Path | None) -> None:
        self._root = folder / "runs"
        setting = replace(SETTING, forks=forks is not None)
        run = RunDir(self._root / name)
        nothing = SimpleNamespace(cluster=SimpleNamespace(conf=folder / "no-slurm"))
        self.victim = LocalVictim(cast(Site, nothing), run, folder / "aside" / name, setting)
        config = Config.load(CONFIG, [*WORDS[:3]])
        self.victim.total = config.train.epochs * int(config.data.args["samples"]) // config.train.batch_size
        self._unwritten = config.train.log_every + round(1000 * WRITE_EVERY_S / PACE_MS)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", ASIDE: str(self.victim.aside)}
        if forks is not None:
            self._env |= {"LD_PRELOAD": str(forks), "LASTSTEP_FAULTS_FORKS": str(self.victim.forks)}
        self.victim.set_pace(PACE_MS)
        self._log = folder / f"{name}.log"

    def _types(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "launch.py", *words, f"launch.root={self._root}"]
        with self._log.open("a") as log:
            return subprocess.Popen(command, cwd=PROJECT, env=self._env, stdout=log, stderr=log, text=True)

    def start(self) -> None:
        """Start the run."""
        self.victim.launcher = self._types("--local", "--config", str(CONFIG), "--name", self.victim.run.name, *WORDS)

    def finish(self) -> int:
        """Resume the run, as its user would, until it has finished; returns how often."""
        for resumes in range(RESUMES + 1):
            self._ends()
            if self.victim.finished:
                return resumes
            self.victim.launcher = self._types("resume", self.victim.run.name, "--local")
        raise NeverCame(f"not finished after {RESUMES} times launch.py resume; see {self._log}")

    def _ends(self) -> None:
        """Wait until this start of the run has ended."""
        victim = self.victim
        over = lambda: victim.launcher.poll() is not None and not victim.processes()  # noqa: E731
        victim.wait(over, ENDS_S, "HANGS: neither the command nor all of its ranks have ended")

    def result(self) -> Undisturbed:
        """The result of the finished run."""
        return Undisturbed(self._verified()[-1]["weights_sha256"], read_lines(self.victim.run.metrics))

    def _verified(self) -> list[dict[str, Any]]:
        words = [sys.executable, "launch.py", "verify", self.victim.run.name, "--json", f"launch.root={self._root}"]
        done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def strike(self, fault: Fault, shot: Shot, undisturbed: Undisturbed) -> Hit:
        """The whole life of the run with this fault. Raises Missed if its target was gone."""
        victim = self.victim
        self.start()
        try:
            self._aim(shot)
            kept, before = victim.kept(), len(victim.records())
            struck = time.monotonic()
            fault.inject(victim, shot)
        except (Missed, NeverCame) as error:
            victim.launcher.kill()
            raise Missed(str(error)) from None
        hit = Hit(victim.run.name, fault.name, shot.moment, shot.delay_ms)
        victim.set_pace(PACE_MS)
        try:
            resumes = self.finish()
        except NeverCame as error:
            hit.wrong.append(str(error))
            self.clear()
            return hit
        hit.back_s = time.monotonic() - struck
        ended = victim.records()
        hit.by = "launch.py resume" if resumes else "itself" if len(ended) > before + 1 else "stayed"
        hit.recorded = ended[min(before, len(ended) - 1)]["reason"]
        later = ended[before + 1 :]  # attempts that began after the fault
        if any(record["start_step"] < kept for record in later):
            hit.wrong.append(f"began after step {later[0]['start_step']}, but step {kept} was saved")
        self._judge(hit, fault, shot, undisturbed)
        return hit

    def _aim(self, shot: Shot) -> None:
        victim, moment = self.victim, shot.moment
        wait: Callable[[Callable[[], Any], str], Any] = lambda what, failure: victim.wait(  # noqa: E731
            what, COMES_S, failure, QUICK_POLL_S
        )
        if moment is Moment.START:
            wait(lambda: victim.supervisors(), "no supervisor")
        elif moment is Moment.RESTORE:
            wait(lambda: victim.traces(), "no attempt began")
        else:
            wait(lambda: victim.log.last("step"), "no step")
        if moment in (Moment.SAVE, Moment.STEP):
            victim.set_pace(SLOW_MS)
            wait(lambda: moment is Moment.STEP or victim.writing(), "no save")
        elif moment is Moment.STOP:
            victim.launcher.send_signal(signal.SIGUSR2)
            wait(lambda: victim.log.last("stop"), "no stop")
        elif moment in (Moment.RESCUE, Moment.AGAIN):
            victim.signal(signal.SIGKILL, victim.rank(1).pid)
        elif moment is Moment.END:
            wait(lambda: (e := victim.log.last("step")) and e.number >= victim.total - END_STEPS, "no end")
        time.sleep(shot.delay_ms / 1000)

    def _judge(self, hit: Hit, fault: Fault, shot: Shot, undisturbed: Undisturbed) -> None:
        victim = self.victim
        records, begun = victim.records(), victim.traces()
        known = [(Attempt.of(record), record) for record in records]
        for (attempt, record), (_, after) in itertools.pairwise(known):
            lost = checks.lost_steps(record["start_step"], begun.get(attempt, 0), after["start_step"])
            hit.lost = max(hit.lost, lost)
        twice = shot.moment in (Moment.RESCUE, Moment.AGAIN)  # both ranks may have died
        if fault.loses is Loss.NOTHING or (fault.loses is Loss.UNLESS_A_RANK_LIVES and not twice):
            hit.wrong += [f"{hit.lost} steps lost, 0 allowed"] if hit.lost and not twice else []
        hit.allowed = hit.lost
        resumed = [event.number for event in victim.log.events if event.kind == "resume"]
        seen = Seen(begun, resumed, set(), set(), set())
        hit.wrong += checks.check_run(victim.run, self._verified(), undisturbed, seen, self._unwritten)

    def clear(self) -> None:
        """End what is left of the run."""
        self.victim.launcher.kill()
        for process in self.victim.processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def shots_in_turn(kinds: Mapping[str, Fault], count: int, draw: random.Random) -> list[Shot]:
    """Each kind at each of its moments in turn, then again with other delays and targets."""
    turn = [(fault, moment) for fault in kinds.values() for moment in fault.moments]
    shots: list[Shot] = []
    while len(shots) < count:
        draw.shuffle(turn)
        for fault, moment in turn[: count - len(shots)]:
            shots.append(Shot(fault.name, moment, draw.randint(0, moment.longest_ms), draw.random()))
    return shots


def run_local(folder: Path, shots: Sequence[Shot], forks: Path | None, tell: Callable[[Hit], None]) -> list[str]:
    """One run for each shot; returns those that missed."""
    if not shots:
        return []
    calm = LocalRun(folder, "undisturbed", forks)
    calm.start()
    if calm.finish():
        return ["the undisturbed run did not finish"]
    undisturbed, missed = calm.result(), list[str]()

    def strike(number: int, shot: Shot) -> None:
        fault, why = KINDS[shot.fault], "no C compiler"
        for attempt in range(3 if forks is not None or fault.inject is not no_forks else 0):
            try:
                return tell(LocalRun(folder, f"local-{number:02}-{attempt}", forks).strike(fault, shot, undisturbed))
            except Missed as error:
                shot, why = replace(shot, delay_ms=shot.delay_ms // 3), str(error)
        missed.append(f"{fault.name} in: {shot.moment.words}: {why}")

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(strike, range(1, len(shots) + 1), shots))
    return missed
